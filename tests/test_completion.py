"""Shells complete tfcluster's command lines, and keep the names of files."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfcluster import config
from tfcluster.commands.completion import SCRIPTS, setting_words
from tfcluster.schedulers import names

SHELLS = ("bash", "zsh", "fish")
_DEADLINE_S = 30
_INTERACTIVE = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}
_READY = {
    "bash": "bind 'set enable-bracketed-paste off'; PS1=READY;",
    "zsh": "PS1=READY; unset zle_bracketed_paste; autoload -Uz compinit; compinit -u;",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, beside a record of one run."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mycluster.yaml").write_text("tasks: {worker: 2}\n")
    run = tmp_path / "state" / "runs" / "digits-20261120-101500-3f2a"
    run.mkdir(parents=True)
    tasks = [{"task": "chief:0"}, {"task": "worker:0"}, {"task": "worker:1"}]
    (run / "plan.json").write_text(json.dumps({"tasks": tasks}))
    for private in (tmp_path / "state", run.parent, run):
        private.chmod(0o700)
    return tmp_path


def _environ(folder: Path) -> dict[str, str]:
    bin_folder = Path(sys.executable).parent
    return {
        "PATH": f"{bin_folder}:/usr/bin:/bin",
        "HOME": str(folder),
        "TERM": "dumb",
        "LC_ALL": "C.UTF-8",
        "TFCLUSTER_STATE_DIR": str(folder / "state"),
    }


class _Shell:
    """An interactive shell on a terminal of its own."""

    def __init__(self, shell: str, folder: Path) -> None:
        self._shell = shell
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            _INTERACTIVE[shell],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder / "work",
            env=_environ(folder),
            start_new_session=True,
        )
        os.close(theirs)
        (folder / "completion").write_text(SCRIPTS[shell])
        self._send(f"{_READY[shell]} source {folder}/completion; echo BE''GIN\n")
        self._wait("BEGIN")

    def completed(self, line: str, expected: str) -> str:
        """Type a line and TAB; the rest of the line that the shell writes."""
        self._send(f"{line}\t")
        shown = self._wait(line + expected)
        self._send("\x15echo CLEAR''ED\n")
        self._wait("CLEARED")
        return shown

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def _send(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def _wait(self, text: str) -> str:
        """What is written until ``text`` is, without control characters."""
        raw, deadline = b"", time.monotonic() + _DEADLINE_S
        while text not in (shown := _without_controls(raw)):
            left = deadline - time.monotonic()
            assert left > 0, f"{self._shell} did not write {text!r}: {shown!r}"
            if select.select([self._ours], [], [], left)[0]:
                raw += os.read(self._ours, 1 << 16)
        return shown


def _without_controls(raw: bytes) -> str:
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x07", b"", raw).decode()
    while "\b" in text:
        text = re.sub("[^\b]?\b", "", text, count=1)
    return text


@pytest.fixture(params=sorted(_INTERACTIVE))
def shell(request: pytest.FixtureRequest, folder: Path) -> Iterator[_Shell]:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param}")
    running = _Shell(request.param, folder)
    yield running
    running.close()


LINES = {
    "a command": ("tfcluster pla", "n "),
    "an option": ("tfcluster status --wa", "tch "),
    "a file": ("tfcluster plan myc", "luster.yaml "),
    "a file for launch": ("tfcluster launch myc", "luster.yaml "),
    "a file of the program": ("tfcluster launch -n 2 -- cat myc", "luster.yaml "),
    "a program": ("tfcluster launch -n 2 -- ssh-keysc", "an "),
    "a section": ("tfcluster plan mycluster.yaml --set runt", "ime."),
    "a key": ("tfcluster plan mycluster.yaml --set runtime.str", "ategy="),
    "a value": ("tfcluster plan x --set runtime.strategy=para", "meter_server "),
    "a variable": ("tfcluster launch x -x TFCLUSTER_STATE", "_DIR "),
    "a run": ("tfcluster stop dig", "its"),
    "a run to fetch from": ("tfcluster fetch dig", "its"),
    "a task": ("tfcluster logs digits worker:1", " "),
    "the end of a task": ("tfcluster logs chief:", "0 "),
}


def test_real_shells_complete(shell: _Shell) -> None:
    for line, rest in LINES.values():
        if "ssh-keysc" in line and shutil.which("ssh-keyscan") is None:
            continue
        shell.completed(line, rest)


def test_fish_completes(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("no fish")
    (folder / "completion").write_text(SCRIPTS["fish"])
    lines = [line for line, _ in LINES.values() if "ssh-keysc" not in line]
    asked = "; ".join(f"complete -C '{line}'; echo ---" for line in lines)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source {folder}/completion; {asked}"],
        cwd=folder / "work",
        env=_environ(folder),
        capture_output=True,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    answers = done.stdout.split("---\n")
    for line, answer in zip(lines, answers, strict=False):
        rest = next(rest for each, rest in LINES.values() if each == line)
        begun = line.rpartition(" ")[2]
        found = [each.partition("\t")[0] for each in answer.splitlines()]
        assert any(each.startswith(begun + rest.strip()) for each in found), (
            line,
            answer,
            done.stderr,
        )


@pytest.mark.parametrize("shell_name", SHELLS)
def test_the_command_prints_the_script(shell_name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tfcluster", "completion", shell_name],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == SCRIPTS[shell_name]


def test_pressing_tab_creates_nothing(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "_TFCLUSTER_COMPLETE": "bash",
        "_TFCLUSTER_LINE": "tfcluster status ",
        "TFCLUSTER_STATE_DIR": str(tmp_path / "state"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tfcluster"], env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "files\t\n", "")
    assert list(tmp_path.iterdir()) == []


def test_every_key_of_the_schema_can_be_reached() -> None:
    reached, waiting = set(), [""]
    while waiting:
        for word in setting_words(waiting.pop()):
            if word.text.endswith("."):
                waiting.append(word.text)
            reached.add(word.text)
    assert {"tasks.worker=", "tasks.worker.count=", "slurm.options=", "env."} <= reached
    top = {key.rstrip("=.").partition(".")[0] for key in reached}
    assert top == set(config.schema()["properties"])
    values = {word.text for word in setting_words("backend=")}
    assert values == {f"backend={name}" for name in names()}
