"""The wheel holds all that the tree holds: packages, types, SQL and the API's sources."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_wheel_leaves_nothing_behind(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [wheel] = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(root))
        for root in (ROOT / "server", ROOT / "worker", ROOT / "client", ROOT / "proto" / "gen")
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {
        str(Path("duecourse/client/proto") / path.relative_to(ROOT / "proto"))
        for path in (ROOT / "proto" / "duecourse").rglob("*.proto")
    }
    assert {path.suffix for path in map(Path, expected)} >= {".py", ".pyi", ".typed", ".proto"}
    assert {path for path in packed if ".dist-info/" not in path} == expected
