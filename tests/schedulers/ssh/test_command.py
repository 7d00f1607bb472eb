"""Arguments pass through every login shell unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfcluster.schedulers.agent_bundle import agent_argv
from tfcluster.schedulers.ssh.starter import remote_command

SHELLS = ["sh", "bash", "dash", "zsh", "ksh", "csh", "tcsh", "fish"]
_PRINT = "import os,sys;os.write(1,b'|'.join(map(os.fsencode,sys.argv[1:])))"
_WORD = st.binary(max_size=40).filter(lambda word: not set(word) & {0, 10, 13})


def _through(shell: str, words: list[bytes], folder: Path) -> bytes:
    """The words that a program gets if ``shell`` runs our line as sshd does."""
    program = folder / "print.py"
    program.write_text(_PRINT)
    argv = [sys.executable, "-IS", str(program), *map(os.fsdecode, words)]
    done = subprocess.run(
        [shell, "-c", remote_command(argv)],
        capture_output=True,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "LC_ALL": "C"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _installed(shell: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    return shell


@pytest.mark.parametrize("shell", SHELLS)
def test_every_byte(shell: str, tmp_path: Path) -> None:
    every = bytes(byte for byte in range(1, 256) if byte not in b"\n\r")
    words = [
        every,
        every[::-1],
        b"",
        b" ",
        b"!!",
        b"\\",
        b"\\\\'",
        b"a!b'c\\",
        b"-x",
        b"~",
    ]
    assert _through(_installed(shell), words, tmp_path) == b"|".join(words)


@pytest.mark.parametrize("shell", SHELLS)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(words=st.lists(_WORD, min_size=1, max_size=4))
def test_any_words(shell: str, words: list[bytes], tmp_path: Path) -> None:
    assert _through(_installed(shell), words, tmp_path) == b"|".join(words)


def test_the_agents_own_line_is_legible() -> None:
    line = remote_command(agent_argv(("/opt/venv/bin/python",))).decode()
    assert line.startswith("exec /opt/venv/bin/python -I -S -c 'import os;")


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "a\0b"])
def test_line_ends_cannot_pass(word: str) -> None:
    with pytest.raises(ValueError, match="cannot be passed"):
        remote_command(["python", word])


@pytest.mark.parametrize("argv", [[], ["-c", "x"]])
def test_a_program_is_needed(argv: list[str]) -> None:
    with pytest.raises(ValueError, match="names no program"):
        remote_command(argv)
