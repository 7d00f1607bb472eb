"""Runs the commands of a scheduler: without a shell, with a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping

from tfcluster.submit.scheduler import Answer

ASK_S = 30.0

Ask = Callable[[tuple[str, ...]], Answer]
"""Runs an argv to its end. Never raises: a failure is an Answer, too."""


def asker(environ: Mapping[str, str], timeout_s: float = ASK_S) -> Ask:
    """An Ask with ``environ``, which has PATH and the controller's address."""

    def ask(argv: tuple[str, ...]) -> Answer:
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
            return Answer(127, "", f"{argv[0]} is not on the PATH")
        except OSError as error:
            return Answer(126, "", f"{argv[0]}: {error.strerror}")
        except subprocess.TimeoutExpired:
            return Answer(124, "", f"{argv[0]} did not answer in {timeout_s:g} s")
        return Answer(done.returncode, done.stdout, done.stderr)

    return ask
