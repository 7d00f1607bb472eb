"""Runs programs that answer a question about a job."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def ask(
    argv: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a program without input, and return what it wrote.

    Raises OSError, and subprocess.TimeoutExpired after ``timeout_s``.
    """
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
        env=dict(env),
        encoding="utf-8",
        errors="backslashreplace",
    )


def answer(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> str:
    """What a program writes to standard output; empty if it fails."""
    try:
        done = ask(argv, env, timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
