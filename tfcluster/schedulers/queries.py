"""Runs the commands of a scheduler: without a shell, with a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from tfcluster.schedulers.base import Ask, CommandAnswer

ASK_S = 30.0


def asker(environ: Mapping[str, str], timeout_s: float = ASK_S) -> Ask:
    """An Ask with ``environ``, which has PATH and the controller's address."""

    def ask(argv: tuple[str, ...]) -> CommandAnswer:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="backslashreplace",
                timeout=timeout_s,
                check=False,
                env={**environ, "LC_ALL": "C"},
                # Ctrl-C must reach only us; we then tell the scheduler.
                start_new_session=True,
            )
        except FileNotFoundError:
            return CommandAnswer(127, "", f"{argv[0]} is not on the PATH")
        except OSError as error:
            return CommandAnswer(126, "", f"{argv[0]}: {error.strerror}")
        except subprocess.TimeoutExpired:
            return CommandAnswer(
                124, "", f"{argv[0]} did not answer in {timeout_s:g} s"
            )
        return CommandAnswer(done.returncode, done.stdout, done.stderr)

    return ask


def told(argv: tuple[str, ...], env: Mapping[str, str], timeout_s: float) -> str:
    """What a program writes to standard output; empty if it fails."""
    answer = asker(env, timeout_s)(argv)
    return answer.stdout if answer.exit_code == 0 else ""
