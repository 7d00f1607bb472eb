"""Looks for a kept interpreter that fits a run, and has a new agent forked from it.

Tasks must be children of the run's agent, and a process cannot be given to another
parent. So the agent itself becomes a descendant of the kept interpreter.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from tfcluster.agent import proc
from tfcluster.agent.guard import AWAITED, IGNORED
from tfcluster.agent.kept.agent_link import AGREE_S, OldEnd
from tfcluster.agent.kept.client import Found, ask, found, receive
from tfcluster.agent.kept.fitness import Wanted, misfit, text_environment
from tfcluster.agent.light_dataclasses import dataclass
from tfcluster.agent.proc import Process
from tfcluster.agent.spawn import (
    IGNORED_AT_START,
    Environment,
    environment,
    with_folders_first,
)
from tfcluster.isolated_import import module_argv
from tfcluster.wire import Decoder, Frame, WireError

_SAID = 3
_LIMITS = [
    value for name, value in vars(resource).items() if name.startswith("RLIMIT_")
]


@dataclass(frozen=True, slots=True)
class Taken:
    """A new agent that is ready to take over."""

    old_end: OldEnd
    about: Frame


def wanted(hints: object, base: Environment, package: str) -> list[Wanted]:
    """The interpreters that the launcher expects to need. Raises WireError.

    Folders in ``hints`` are relative to ``package``, and an empty word in a command
    stands for ``package``.
    """
    if not isinstance(hints, list):
        raise WireError("'warm' must be a list")
    found = []
    for hint in hints:
        try:
            argv = tuple(str(word) or package for word in hint["argv"])
            folders = {k: f"{package}/{v}" for k, v in hint["prepend"].items()}
            changes = with_folders_first(base, hint["env"], folders)
            env = environment(base, changes)
            found.append(Wanted(argv, env, sure=hint["sure"] is True))
        except (KeyError, TypeError, AttributeError, UnicodeError) as error:
            raise WireError(f"'warm' is incomplete: {error!r}") from error
    return found


def take(
    needs: Sequence[Wanted],
    run: str,
    streams: tuple[int, int, int],
    package: str,
    say: Callable[[str, bool], None],
) -> Taken | None:
    """Take the first kept interpreter that fits. None: none fits, and ``say`` was
    called for each with the reason, and with whether the reason is only a detail."""
    reasons = []
    for each in found(os.environ):
        fits = [need for need in needs if misfit(each.about, need) is None]
        if not fits:
            reason = misfit(each.about, needs[0])
            reasons.append((f"{each} is not used: {reason}", True))
            continue
        try:
            return _take(each, len(fits), run, streams, package)
        except (OSError, WireError) as error:
            reasons.append((f"{each} is not used: {error}", False))
    for text, detail in reasons[:_SAID]:
        say(text, detail)
    return None


def _take(
    each: Found, count: int, run: str, streams: tuple[int, int, int], package: str
) -> Taken:
    """Take this interpreter. Raises OSError or WireError, and then leaves nothing."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            frame = _request(run, count, package)
            answer = ask(each.path, frame, [*streams, theirs.fileno()])
        if answer["type"] != "taken":
            raise OSError(str(answer.get("cause")))
        ours.settimeout(AGREE_S)
        here, *_ = receive(ours, Decoder())
        agent = _process(int(here["pid"]), int(here["start"]))
    except (OSError, WireError):
        ours.close()
        raise
    return Taken(OldEnd(ours, agent), each.about)


def _process(pid: int, start_time: int) -> Process:
    return Process(pid, "", "S", 0, pid, pid, start_time)


def _request(run: str, count: int, package: str) -> Frame:
    def argv(role: str) -> tuple[str, ...]:
        module = "tfcluster.agent.kept.entry_points"
        options = ("-I", "-S")
        return module_argv(
            (sys.executable,), module, role, options=options, root=package
        )

    umask = os.umask(0o077)
    os.umask(umask)
    return {
        "type": "take",
        "run": run,
        "count": count,
        "guard_argv": list(argv("guard")),
        "agent_argv": list(argv("agent")),
        "env": text_environment(os.environb),
        "umask": umask,
        "limits": {str(number): resource.getrlimit(number) for number in _LIMITS},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": int(proc.text_of("/proc/self/oom_score_adj")),
        "ignored": [int(number) for number in IGNORED_AT_START],
        "blocked": [int(number) for number in (*AWAITED, *IGNORED)],
    }


def summary(about: Mapping[str, object]) -> dict[str, object]:
    """The description of the kept interpreter that was taken, for the launcher."""
    return {key: about.get(key) for key in ("pid", "age_s", "libraries")}
