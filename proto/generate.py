"""Makes the stubs in `proto/gen` from the `.proto` files; with `--check`, tells whether they are up to date."""

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO = Path(__file__).resolve().parent
GENERATED = PROTO / "gen"


def generate(target: Path) -> None:
    """Generate all stubs into a folder."""
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / "duecourse").rglob("*.proto"))
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", "-I."),
        *(f"--python_out={target}", f"--grpc_python_out={target}"),
        *(f"--mypy_out=quiet:{target}", f"--mypy_grpc_out=quiet,only_async:{target}"),
    ]
    subprocess.run([*command, *sources], cwd=PROTO, check=True)


def stubs_in(folder: Path) -> set[str]:
    """Return the generated files below a folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi")}


def differences(fresh: Path) -> list[str]:
    """Name the committed stubs that differ from fresh ones, are missing, or have no source."""
    expected, found = stubs_in(fresh), stubs_in(GENERATED)
    _, changed, _ = filecmp.cmpfiles(fresh, GENERATED, sorted(expected & found), shallow=False)
    return sorted({*changed, *(expected ^ found)})


def main() -> int:
    """Generate in place, or compare."""
    if sys.argv[1:] == ["--check"]:
        with tempfile.TemporaryDirectory() as fresh:
            generate(Path(fresh))
            stale = differences(Path(fresh))
        for name in stale:
            print(f"proto/gen/{name} is not what its source makes: run `poe generate`", file=sys.stderr)
        return 1 if stale else 0
    generate(GENERATED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
