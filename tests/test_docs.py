"""What the pages show: commands exist, YAML is valid, and programs train."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.config.files import loaded
from tests.kit.cluster import Cluster
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.cli import cli

ROOT = Path(PACKAGE_ROOT)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)(?P<rest>.*)\n(?P<text>(?:.*\n)*?)(?P=indent)```$",
    re.MULTILINE,
)


def blocks(page: Path, *kinds: str) -> Iterator[tuple[str, str]]:
    """The text of each block of these kinds, without its indent, and its title."""
    for match in _FENCE.finditer(page.read_text(encoding="utf-8")):
        if match["kind"] in kinds:
            text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            title = re.search('title="(.*?)"', match["rest"])
            yield text, title[1] if title else ""


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _command_lines(page: Path) -> Iterator[str]:
    for text, _ in blocks(page, "console"):
        for line in text.splitlines():
            if line.startswith("$ "):
                yield line.removeprefix("$ ")
    for text, _ in blocks(page, "sh"):
        yield from text.splitlines()
    # Blocks of four spaces, and commands within sentences and tables.
    written = page.read_text(encoding="utf-8")
    yield from re.findall(r"^    (tfcluster .*)$", written, re.MULTILINE)
    # (`tfcluster needs ...` begins an error message.)
    yield from re.findall(r"`(tfcluster (?!needs )[a-z][^`\n]*)`", written)


def _calls(line: str) -> Iterator[list[str]]:
    """The words after ``tfcluster``, for each call in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split = True
    words = list(lexer)
    for at, word in enumerate(words):
        if word == "tfcluster" and (at == 0 or words[at - 1] != "pip"):
            call = words[at + 1 :]
            ends = [i for i, each in enumerate(call) if set(each) <= set(";&|()<>")]
            yield call[: ends[0]] if ends else call


def _problem(call: list[str]) -> str | None:
    """Why click would refuse the words, or None."""
    if not call or not re.fullmatch("[a-z]+", call[0]):
        return None
    command = cli.get_command(click.Context(cli), call[0])
    if command is None:
        return f"there is no command {call[0]}"
    if {"-h", "--help"} & set(call):
        return None
    try:
        command.make_context(call[0], call[1:], resilient_parsing=False)
    except click.MissingParameter:
        return None  # prose names a command without its arguments
    except click.UsageError as error:
        return error.format_message()
    return None


def test_the_tests_of_threats_exist() -> None:
    table = (
        (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition("| threat |")[2]
    )
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        *_, answers, _ = row.split("|")
        file = ""
        named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", answers)
        assert named, row
        for given, name in named:
            file = given or file
            text = (ROOT / file).read_text(encoding="utf-8")
            assert f"def {name}(" in text, f"{file} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_command_lines_exist(page: Path) -> None:
    problems = {
        line: problem
        for line in _command_lines(page)
        for call in _calls(line.partition("  #")[0])
        if (problem := _problem(call))
    }
    assert problems == {}


def test_a_wrong_command_line_is_found() -> None:
    line = "cd x && tfcluster launch --nosuch y.yaml; tfcluster lanch"
    problems = [_problem(call) for call in _calls(line)]
    assert problems[0] is not None
    assert "--nosuch" in problems[0]
    assert problems[1] == "there is no command lanch"


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_yaml_loads(page: Path, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("tensorflow\n")
    for text, _ in blocks(page, "yaml"):
        whole = text
        if not re.search("^command:", text, re.MULTILINE) and "command:" not in text:
            whole += "command: python train.py\n"
        if not re.search("^tasks:", text, re.MULTILINE):
            whole += "tasks: {worker: 2}\n"
        loaded(tmp_path, whole)


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_links_lead_somewhere(page: Path) -> None:
    """Links between pages; the site's strict build checks those to headings, too."""
    written = re.sub(
        r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", written)
    generated = {ROOT / "docs" / "reference" / "cli.md"}
    missing = [
        link
        for link in links
        if not (page.parent / link).exists()
        and (page.parent / link).resolve() not in generated
    ]
    assert missing == []


MOVED = {
    "horovod": ["-n", "2"],
    "multi-worker-mirrored": ["-n", "2"],
    "parameter-server-strategy": ["-n", "2", "--ps", "1"],
    "torchrun-and-mpirun": ["-n", "2"],
}


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("page", MOVED)
def test_moved_programs_train(page: str, tmp_path: Path) -> None:
    """The program of "after", as the page launches it."""
    programs = {
        title: text
        for text, title in blocks(ROOT / "docs" / "moving" / f"{page}.md", "python")
    }
    (tmp_path / "after.py").write_text(programs["after.py"])
    cluster = Cluster(tmp_path)
    try:
        running = cluster.start(*MOVED[page], "--", "python", "after.py")
        assert running.end() == 0, running.err
        for rank in range(2):
            assert "trained True" in running.text(f"worker:{rank}"), running.out
    finally:
        cluster.end()
    compile(programs["before.py"], "before.py", "exec")


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_horovod_program_runs_unchanged(tmp_path: Path) -> None:
    page = ROOT / "docs" / "moving" / "horovod.md"
    programs = {title: text for text, title in blocks(page, "python")}
    (tmp_path / "before.py").write_text(programs["before.py"])
    cluster = Cluster(tmp_path)
    try:
        running = cluster.start("-n", "2", "--", "python", "before.py")
        assert running.end() == 0, running.err
        for rank in range(2):
            assert "trained True" in running.text(f"worker:{rank}"), running.out
    finally:
        cluster.end()


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_first_tutorial_has_the_result_of_one_machine(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorials" / "first-script.md"
    (tmp_path / "train.py").write_text(next(blocks(page, "python"))[0])
    alone = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    cluster = Cluster(tmp_path)
    try:
        running = cluster.start("-n", "3", "--", "python", "train.py")
        assert running.end() == 0, running.err
        result = re.findall("done .*", alone.stdout)
        assert re.findall("done .*", running.out) == result * 3
        for rank in range(3):
            assert re.findall("done .*", running.text(f"worker:{rank}")) == result
    finally:
        cluster.end()
