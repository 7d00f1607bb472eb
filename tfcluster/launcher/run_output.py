"""What a launch shows while it runs, and at its end."""

from __future__ import annotations

import ipaddress
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TextIO

from tfcluster import schedulers
from tfcluster.base.states import RunState
from tfcluster.base.task_id import TaskId
from tfcluster.console.display import DEFAULT, Display, is_debugging, is_terminal
from tfcluster.console.line_folding import Echo, HasGpus, LineFolding, Shown
from tfcluster.console.screen import Screen
from tfcluster.console.views.failures import failure, outcome, where_logs_are
from tfcluster.console.views.progress import live_text
from tfcluster.launcher.job import CurrentJob, Job
from tfcluster.plan.host_patterns import fold
from tfcluster.record.files import open_private
from tfcluster.record.paths import state_dir
from tfcluster.record.run_status import RunView

_LIVE_S = 0.25
_CLOSE_S = 5.0
_ROOT_WARNED = "root-warned"
"""The file of the state folder that says that root has been warned."""


class RunOutput:
    def __init__(
        self,
        screen: Screen,
        environ: Mapping[str, str],
        display: Display = DEFAULT,
        tasks: Iterable[str] = (),
        has_gpus: HasGpus = lambda task: None,
    ) -> None:
        """Show output of ``tasks``, on a terminal equal lines once."""
        self._screen = screen
        self._environ = environ
        self._display = display
        everything = display.everything or is_debugging(environ)
        self._echo = Echo(has_gpus, everything=everything)
        folds = is_terminal(sys.stdout, environ) and not everything
        self._folding = LineFolding(tasks if folds else ())
        self._next_live_s = 0.0

    @classmethod
    def on_terminal(
        cls,
        current: CurrentJob,
        out: TextIO,
        err: TextIO,
        environ: Mapping[str, str],
        display: Display,
    ) -> RunOutput:
        tasks = [str(task) for task in current.job.specs]
        screen = Screen(out, err, environ=environ, tasks=tasks, display=display)
        return cls(screen, environ, display, tasks, lambda t: _has_gpus(current.job, t))

    def begin(self, job: Job) -> None:
        if not self._display.quiet:
            self._screen.say(f"run {job.run}")
        if os.geteuid() == 0 and _is_first(state_dir(self._environ) / _ROOT_WARNED):
            self._screen.say("warning: running as root; your program will, too")

    def ports(self, job: Job, ports: Mapping[TaskId, int]) -> None:
        """Warn about TensorFlow's servers, which obey anybody who can connect."""
        exposed = [task for task in ports if job.runs_tensorflow_server(task)]
        away = {job.specs[task].place.host.name for task in exposed}
        if schedulers.get(job.description.backend).here:
            away = set()
        numbers = [ports[task] for task in exposed]
        anyone = job.description.expose == "any"
        if warning := exposure_warning(numbers, away, anyone=anyone):
            self._screen.say(warning)

    def places(
        self, job: Job, apart: Sequence[str], copies: Mapping[str, Sequence[str]]
    ) -> None:
        """Say where logs and workdir copies are on hosts that don't share our files."""
        if apart:
            self._screen.say(
                f"logs are on {fold(apart)} under {job.logs}, which this machine "
                "cannot see; displayed lines are copied here"
            )
        for folder, names in copies.items():
            self._screen.say(
                f"files of the workdir were copied to {folder} on {fold(names)}; "
                + _returning(job)
            )

    def log(self, task: str, lines: Sequence[str], skipped: int) -> None:
        if self._display.quiet:
            return
        chosen = self._echo.chosen(task, lines)
        if skipped:
            self._put(self._folding.rest(task))
            self._screen.log(task, (), skipped=skipped)
        self._put(self._folding.add(task, chosen, time.monotonic()))

    def _put(self, shown: Sequence[Shown]) -> None:
        for part in shown:
            self._screen.log(part.task, part.lines, also=part.also)

    def say(self, text: str) -> None:
        self._screen.say(text)

    def live(
        self,
        view: Callable[[], RunView],
        now_s: float,
        more: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Refresh the status line, with what ``more`` says, if it is due."""
        self._put(self._folding.due(time.monotonic()))
        if self._display.quiet or now_s < self._next_live_s:
            return
        self._next_live_s = now_s + _LIVE_S
        shown = view()
        rest = more() if shown.state is RunState.STOPPING else None
        text = live_text(shown, time.time())
        self._screen.live(f"{text}, {rest}" if rest else text)

    def end(self, view: RunView) -> None:
        self._put(self._folding.rest())
        self._screen.live(None)
        self._screen.show(outcome(view, self._screen.style))
        self._screen.show(failure(view, self._screen.style))
        self._screen.show(where_logs_are(view, self._screen.style))

    def close(self) -> None:
        self._screen.close(_CLOSE_S)


def _has_gpus(job: Job, task: str) -> bool | None:
    spec = job.specs.get(TaskId.parse(task))
    if spec is None:
        return None
    share, there = spec.place.gpus, spec.place.host.gpus
    gpus = there if share is None else share
    return None if gpus is None else bool(gpus)


def _is_first(mark: Path) -> bool:
    """Whether nobody has called this for ``mark``, a file in an existing folder."""
    try:
        os.close(open_private(mark, os.O_WRONLY | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _returning(job: Job) -> str:
    results = job.description.results
    if results is None:
        return (
            "files that tasks write there are not copied back (set 'workdir: results', "
            f"or `tfcluster fetch {job.run} PATTERN`)"
        )
    return f"at the end, {', '.join(results.patterns)} come back from there"


def exposure_warning(
    ports: Collection[int], away: Collection[str] = (), *, anyone: bool
) -> str | None:
    """The warning for these ports, ``away`` or here; None: only the user connects."""
    if not ports:
        return None
    if away:
        return describe(sorted(ports), fold(sorted(away)), None, anyone=anyone)
    import psutil  # imported here: most launches open no such port

    others = len({user.name for user in psutil.users()} - {psutil.Process().username()})
    if not anyone and not others:
        return None
    where = "localhost"
    if anyone:
        addresses = {
            name: [entry.address for entry in entries]
            for name, entries in psutil.net_if_addrs().items()
        }
        where = ", ".join([where, *reachable(addresses)[:4]])
    return describe(sorted(ports), where, others, anyone=anyone)


def reachable(addresses: Mapping[str, Sequence[str]]) -> list[str]:
    """The addresses at which others can connect; public ones come first, marked."""
    public, private = [], []
    for text in chain.from_iterable(addresses.values()):
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            continue  # a MAC address
        if address.is_loopback or address.is_link_local:
            continue
        if address.is_global:
            public.append(f"{address} PUBLIC")
        else:
            private.append(str(address))
    return public + private


def describe(
    ports: Sequence[int], where: str, others: int | None, *, anyone: bool
) -> str:
    """The text; ``others`` is the number of other users logged in, if known."""
    shown = ", ".join(map(str, ports[:6])) + (", ..." if ports[6:] else "")
    begin = f"warning: TensorFlow servers may listen on port {shown} of {where} and "
    users = f"; other users are logged in: {others}" if others else ""
    if anyone:
        what = f"accept commands from any client{users}"
    elif others is None:
        what = "accept commands from every user of these hosts"
    else:
        what = f"accept commands from every user of this machine{users}"
    return f"{begin}{what} (see SECURITY.md)"
