"""``requirements``: what hosts get of a requirements file or a pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import SMALLEST, Bad, check_bad, loaded
from tfcluster.launcher.preparation import requirements_digest
from tfcluster.plan.document import environment_json
from tfcluster.plan.model import Requirements

HERE = "${TFCLUSTER_WORKDIR}"


def required(folder: Path, text: str, **others: str) -> Requirements:
    for name, content in {"requirements.txt": text, **others}.items():
        (folder / name).write_text(content)
    content = SMALLEST + "requirements: requirements.txt\n"
    requirements = loaded(folder, content).description.requirements
    assert requirements is not None
    return requirements


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
        ("--find-links=wheels", f"--find-links={HERE}/wheels", "wheels"),
        ("w/a-1-py3-none-any.whl", f"{HERE}/w/a-1-py3-none-any.whl", None),
        ("libs/pkg", f"{HERE}/libs/pkg", "libs/pkg"),
        ("-f '/srv/my wheels'  # x", None, "/srv/my wheels"),
        ("-fwheels", f"-f{HERE}/wheels", "wheels"),
        ("-e ${HOME}/a", None, None),
        ("${HOME}/a", None, None),
        ("git+https://x.example/a/b.git#egg=c", None, None),
        ("a @ file:///srv/a.whl", None, "/srv/a.whl"),
        ("/srv/a", None, "/srv/a"),
    ],
)
def test_local_packages(
    line: str, expected: str | None, local: str | None, tmp_path: Path
) -> None:
    """Paths below the working directory are those of the hosts' one."""
    requirements = required(tmp_path, f"{line}\n")
    assert requirements.files == (("requirements.txt", f"{expected or line}\n"),)
    if local is not None:
        assert requirements.local == (tmp_path / local,)
    elif expected is None:
        assert requirements.local == ()


def test_editable_packages(tmp_path: Path) -> None:
    requirements = required(tmp_path, "-e .[test]\n--editable=pkg#egg=x\n")
    text = f"-e {HERE}[test]\n--editable={HERE}/pkg#egg=x\n"
    assert requirements.files == (("requirements.txt", text),)
    assert requirements.local == ()
    assert requirements.editable == (tmp_path, tmp_path / "pkg")


def test_paths_are_found_as_pip_finds_them(tmp_path: Path) -> None:
    """Packages: in the working directory, else beside the file; wheels otherwise."""
    folder = tmp_path / "needs"
    folder.mkdir()
    for name in ("pkg", "needs/pkg", "needs/own", "wheels", "needs/wheels", "f"):
        (tmp_path / name).mkdir()
    text = "./pkg\n./own\n-e pkg\n-f wheels\n-f f\n-rmore.txt\n"
    (folder / "a.txt").write_text(text)
    (folder / "more.txt").write_text("b\n")
    content = f"{SMALLEST}requirements: needs/a.txt\n"
    requirements = loaded(tmp_path, content).description.requirements
    assert requirements is not None
    (_, text), _ = requirements.files
    assert text.replace(HERE, "H").split() == [
        *("H/pkg", "H/needs/own", "-e", "H/pkg"),
        *("-f", "H/needs/wheels", "-f", "H/f", "-r1-more.txt"),
    ]


def test_files_that_are_included(tmp_path: Path) -> None:
    more = "-c requirements.txt\nb\n"
    requirements = required(tmp_path, "-r more.txt\na\n", **{"more.txt": more})
    assert requirements.files == (
        ("requirements.txt", "-r 1-more.txt\na\n"),
        ("1-more.txt", "-c requirements.txt\nb\n"),
    )


def test_the_dependencies_of_a_project(tmp_path: Path) -> None:
    listed = '["a>1", "b[c]", "d @ ./d"]'
    project = f'[project]\nname = "x"\ndependencies = {listed}\n'
    (tmp_path / "pyproject.toml").write_text(project)
    asked = "{file: pyproject.toml, system_site_packages: true}"
    content = f"{SMALLEST}requirements: {asked}\n"
    requirements = loaded(tmp_path, content).description.requirements
    files = (("requirements.txt", f"a>1\nb[c]\nd @ {HERE}/d\n"),)
    expected = Requirements(
        file="pyproject.toml",
        files=files,
        local=(tmp_path / "d",),
        system_site_packages=True,
    )
    assert requirements == expected


@pytest.mark.parametrize(
    ("project", "words"),
    [
        ("[project", "pyproject.toml: Expected ']'"),
        ("[tool.x]\n", "pyproject.toml: it has no [project] table"),
        (
            '[project]\ndynamic = ["dependencies"]\n',
            "pyproject.toml: its dependencies are dyn",
        ),
        ("[project]\ndependencies = [1]\n", "pyproject.toml: its dependencies are not"),
        ("[project]\ndependencies = 'a'\n", "pyproject.toml: its dependencies are not"),
        (f"x = {'[' * 9999}", "pyproject.toml: its values are nested too deep"),
        (f"x = {'1' * 9999}", "pyproject.toml: Exceeds the limit"),
        ("project = 1\n", "pyproject.toml: it has no [project] table"),
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
    requirements = required(tmp_path, "./pkg\n")
    first = requirements_digest(requirements)
    (package / "notes.log").write_text("2")
    (package / ".git").mkdir()
    (package / ".git" / "a.py").write_text("2")
    assert requirements_digest(requirements) == first
    (package / "a.py").write_text("2")
    assert requirements_digest(requirements) != first


def test_modules_of_an_editable_package_are_not_covered(tmp_path: Path) -> None:
    """They are read in place; what its installation reads counts."""
    (tmp_path / "train.py").write_text("1")
    requirements = required(tmp_path, "-e .\n")
    first = requirements_digest(requirements)
    (tmp_path / "train.py").write_text("2")
    assert requirements_digest(requirements) == first
    (tmp_path / "pyproject.toml").write_text("")
    second = requirements_digest(requirements)
    assert second != first
    (tmp_path / "fast.c").write_text("")
    assert requirements_digest(requirements) != second


def test_plans_hide_passwords_of_indexes(tmp_path: Path) -> None:
    requirements = required(tmp_path, "--index-url https://me:word@x.example/\na\n")
    document = environment_json(requirements)
    assert document["lines"] == ["--index-url https://***@x.example/", "a"]
