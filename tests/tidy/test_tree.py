"""The tree keeps its shape: names, packages, generated code, and the companions beside the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = [ROOT / "server", ROOT / "worker", ROOT / "client", ROOT / "proto" / "gen"]
DRAWERS = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
QUICK_START = re.compile(r"^## Quick start\n.*?```sh\n(?P<demo>.*?)```.*?```sh\n(?P<test>.*?)```", re.M | re.S)


def python_files() -> list[Path]:
    return [path for root in [*SOURCE_ROOTS, ROOT / "tests"] for path in root.rglob("*.py")]


def test_there_are_files_to_look_at() -> None:
    assert len(python_files()) > 50


@pytest.mark.parametrize("source_root", SOURCE_ROOTS, ids=lambda path: path.name)
def test_the_namespace_has_no_init_file(source_root: Path) -> None:
    assert not (source_root / "duecourse" / "__init__.py").exists()


@pytest.mark.parametrize("source_root", SOURCE_ROOTS, ids=lambda path: path.name)
def test_every_package_says_that_it_is_typed(source_root: Path) -> None:
    packages = [path for path in (source_root / "duecourse").iterdir() if path.is_dir() and any(path.rglob("*.py"))]
    assert packages
    assert [package.name for package in packages if not (package / "py.typed").exists()] == []


def test_no_file_is_a_drawer_for_anything() -> None:
    names = {path for path in python_files() if DRAWERS & {path.stem, path.parent.name, *path.stem.split("_")}}
    assert names == set()


def test_generated_code_is_what_its_sources_make() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "proto" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stderr


def test_the_quick_start_holds_two_commands_of_one_line_each() -> None:
    found = QUICK_START.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    for command in found.groups():
        assert len(command.strip().splitlines()) == 1
        subprocess.run(["bash", "-n", "-c", command], check=True)
    assert found["demo"].strip().endswith(".venv/bin/duecourse demo")
    assert found["test"].strip().endswith(" && .venv/bin/poe test")


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert documents
    dead = [
        f"{document.name}: {target}"
        for document in documents
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#]+)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert dead == []


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_dependency_has_its_reason() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    names = set(re.findall(r'^    "([a-z0-9-]+)', declared, re.M)) - {"duecourse"}
    names |= set(re.findall(r'^(?:embedded|fast) = \["([a-z0-9-]+)', declared, re.M))
    reasons = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert len(names) > 20
    assert {name for name in names if f"| {name} |" not in reasons} == set()
