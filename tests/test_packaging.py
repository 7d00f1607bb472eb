"""The man page, the README of an index, and the help of every command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.cli import cli
from tools.cli_reference import commands
from tools.index_readme import with_absolute_links
from tools.man_page import man_page

COMMANDS = list(commands(cli, "tfcluster"))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.name)
def test_every_command_has_examples(command: object) -> None:
    (found,) = [each for each in COMMANDS if each is command]
    examples = [block.text for block in found.blocks if block.verbatim]
    lines = [line for text in examples for line in text.splitlines()]
    assert any(found.name in line for line in lines)
    assert all(about for _, about in found.options)


def test_the_man_page_has_every_command_and_no_warning(tmp_path: Path) -> None:
    file = tmp_path / "tfcluster.1"
    file.write_text(man_page(COMMANDS, "1.2"))
    if shutil.which("man") is None:
        pytest.skip("no man")
    done = subprocess.run(
        ["man", "--warnings", "-l", str(file)],
        env={"MANWIDTH": "100", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert command.name in done.stdout
    assert "    tfcluster launch -n 4 -- python train.py\n" in done.stdout
    assert "-h, --help" in done.stdout


def test_links_of_the_index_lead_to_the_repository() -> None:
    text = "[a](docs/a.md#b) [c](https://x.example/y) [d](#e)"
    shown = with_absolute_links(text, "https://h.example/s/", "1.2")
    base = "https://h.example/s/blob/v1.2"
    assert shown == f"[a]({base}/docs/a.md#b) [c](https://x.example/y) [d](#e)"


def test_links_of_the_readme_lead_to_files() -> None:
    root = Path(PACKAGE_ROOT)
    readme = (root / "README.md").read_text(encoding="utf-8")
    shown = with_absolute_links(readme, "https://h.example", "1")
    base = "(https://h.example/blob/v1/"
    links = [part.partition(")")[0] for part in shown.split(base)[1:]]
    assert len(links) > 10
    assert [
        link for link in links if not (root / link.partition("#")[0]).exists()
    ] == []
