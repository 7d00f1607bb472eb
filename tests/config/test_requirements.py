"""``requirements``: what hosts get of a requirements file or a pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import SMALLEST, Bad, check_bad, loaded
from tfcluster.launcher.requirements_digest import requirements_digest
from tfcluster.model import Requirements

HERE = "${TFCLUSTER_WORKDIR}"


def required(folder: Path, text: str, **others: str) -> Requirements:
    for name, content in {"requirements.txt": text, **others}.items():
        (folder / name).write_text(content)
    content = SMALLEST + "requirements: requirements.txt\n"
    found = loaded(folder, content).description.requirements
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "expected", "local"),
    [
        ("keras>=3 ; python_version > '3'", None, None),
        ("a @ https://x.example/a-1-py3-none-any.whl", None, None),
        ("https://x.example/a-1-py3-none-any.whl", None, None),
        ("--extra-index-url https://x.example/", None, None),
        ("-e git+https://x.example/a.git", None, None),
        ("# ./comment", None, None),
        ("./pkg[gpu] ; x", f"{HERE}/pkg[gpu] ; x", "pkg"),
        (".", HERE, "."),
        ("-e .[test]", f"-e {HERE}[test]", "."),
        ("--find-links=wheels", f"--find-links={HERE}/wheels", "wheels"),
        ("w/a-1-py3-none-any.whl", f"{HERE}/w/a-1-py3-none-any.whl", None),
        ("a @ file:///srv/a.whl", None, "/srv/a.whl"),
        ("/srv/a", None, "/srv/a"),
    ],
)
def test_local_packages(
    line: str, expected: str | None, local: str | None, tmp_path: Path
) -> None:
    """Paths below the working directory are those of the hosts' one."""
    found = required(tmp_path, f"{line}\n")
    assert found.files == (("requirements.txt", f"{expected or line}\n"),)
    if local is not None:
        assert found.local == (tmp_path / local,)
    elif expected is None:
        assert found.local == ()


def test_files_that_are_included(tmp_path: Path) -> None:
    more = "-c requirements.txt\nb\n"
    found = required(tmp_path, "-r more.txt\na\n", **{"more.txt": more})
    assert found.files == (
        ("requirements.txt", "-r 1-more.txt\na\n"),
        ("1-more.txt", "-c requirements.txt\nb\n"),
    )


def test_the_dependencies_of_a_project(tmp_path: Path) -> None:
    project = '[project]\nname = "x"\ndependencies = ["a>1", "b[c]"]\n'
    (tmp_path / "pyproject.toml").write_text(project)
    asked = "{file: pyproject.toml, system_site_packages: true}"
    content = f"{SMALLEST}requirements: {asked}\n"
    found = loaded(tmp_path, content).description.requirements
    files = (("requirements.txt", "a>1\nb[c]\n"),)
    expected = Requirements(
        file="pyproject.toml", files=files, system_site_packages=True
    )
    assert found == expected


@pytest.mark.parametrize(
    ("project", "words"),
    [
        ("[project", "pyproject.toml: Expected ']'"),
        ("[tool.x]\n", "pyproject.toml: it has no [project] table"),
        ('[project]\ndynamic = ["dependencies"]\n', "its dependencies are dynamic"),
        ("[project]\ndependencies = [1]\n", "are not a list of strings"),
    ],
)
def test_bad_projects(project: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(project)
    content = f"requirements: pyproject.toml\n{SMALLEST}"
    check_bad(Bad(content, "1:15", words), tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    content = f"requirements: requirements.txt\n{SMALLEST}"
    missing = f"'{tmp_path}/requirements.txt' does not exist"
    check_bad(Bad(content, "1:15", missing), tmp_path)
    (tmp_path / "requirements.txt").write_text("-r more.txt\n")
    missing = f"'{tmp_path}/more.txt' does not exist"
    check_bad(Bad(content, "1:15", missing), tmp_path)


def test_the_digest_covers_local_packages(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "a.py").write_text("1")
    found = required(tmp_path, "./pkg\n")
    first = requirements_digest(found)
    (package / "notes.log").write_text("2")
    (package / ".git").mkdir()
    (package / ".git" / "a.py").write_text("2")
    assert requirements_digest(found) == first
    (package / "a.py").write_text("2")
    assert requirements_digest(found) != first
