"""Runs one trial: launches, breaks something, waits for the end, asks the oracle."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.kit import machine
from tests.kit.cluster import Cluster, is_final
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually
from tests.rigs.chaos import oracle, programs, strikes
from tests.rigs.chaos.faults import END, JOBS, LOCAL, SSH, START, Blame, Fault
from tests.rigs.chaos.oracle import KILLED, Injected
from tests.rigs.chaos.plan import STUB, Trial
from tests.rigs.chaos.sites import Site
from tests.rigs.chaos.strikes import Scene, Struck
from tests.rigs.testbed.commands import RigError

_POLL_S = 0.02
_UP_S = 120.0
_TRAINS_S = 280.0
_END_S = 45.0
"""From the moment when a run is to end (or its loss has been noticed) to its end."""
_CLEAN_S = 15.0
_LEASE_S = 30.0
_REJOIN_S = 60.0
"""From the mending of a cable until a scheduler hears of its host again."""
_UNSURE_S = 4.0
"""How long a fault that may be harmless has time to be noticed."""


@dataclass(slots=True)
class Result:
    """What a trial has shown."""

    trial: Trial
    violations: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    notice_s: float | None = None
    """From the strike to the first word about it; None if no word was due."""
    clean_s: float | None = None
    """From the strike (or from the end, if it was harmless) until all was clean."""
    code: int | None = None
    kept: Path | None = None
    site_is_broken: bool = False
    """Whether the site could not be repaired after it."""

    @property
    def missed(self) -> bool:
        """There was nothing left that could have been struck."""
        return not self.struck


def run(trial: Trial, site: Site, number: int, keep: Path) -> Result:
    """Run one trial. The record of one with a violation is copied to ``keep``."""
    result = Result(trial)
    cluster = site.cluster(number)
    attempt = _Attempt(trial, site, cluster, result)
    try:
        attempt.go()
    except (AssertionError, RigError, ValueError, OSError) as error:
        result.violations.append(f"{type(error).__name__}: {str(error)[:2000]}")
    finally:
        attempt.undo()
        if result.violations:
            result.kept = keep / f"{trial.site}-{trial.fault.name}-{trial.seed}"
            shutil.copytree(
                cluster.folder, result.kept, dirs_exist_ok=True, symlinks=True
            )
            story = {"command": trial.command, "struck": result.struck}
            story["violations"] = result.violations
            (result.kept / "trial.json").write_text(json.dumps(story, indent=1))
        cluster.end()
        try:
            site.repair(cluster)
        except (AssertionError, RigError) as error:
            result.site_is_broken = True
            sys.stderr.write(f"cannot repair {trial.site}: {error}\n")
        if trial.fault.name == "full-state":
            strikes.unmount(cluster.state)
        if not result.violations:
            shutil.rmtree(cluster.folder, ignore_errors=True)
    return result


class _Attempt:
    def __init__(
        self, trial: Trial, site: Site, cluster: Cluster, result: Result
    ) -> None:
        self._trial, self._site, self._cluster = trial, site, cluster
        self._result = result
        self._struck: list[tuple[Struck, float, Injected]] = []
        self._noticed_first = False

    def go(self) -> None:
        trial = self._trial
        host = self._site.hosts[trial.target % len(self._site.hosts)]
        strikes.prepare(self._cluster.folder, trial.fault, self._site, host)
        self._running = self._cluster.start("-v", self._write())
        self._scene = Scene(trial, self._site, self._cluster, self._running)
        began = time.monotonic()
        if trial.phase != START:
            self._wait_up()
            began = time.monotonic()
        if trial.phase == END:
            self._let_end()
        _pause(began + trial.delay_s - time.monotonic())
        self._strike_all()
        if self._struck and trial.pause_s is not None:
            self._until_over(trial.pause_s)
        if trial.pause_s is not None and not self._over():
            self.undo()
        self._finish()

    def undo(self) -> None:
        """End every fault."""
        for struck, _, _ in self._struck:
            try:
                struck.undo()
            except RigError as error:
                self._result.violations.append(f"cannot undo {struck.what}: {error}")

    # --- the launch -----------------------------------------------------------------

    def _write(self) -> str:
        trial, folder = self._trial, self._cluster.folder
        content = {
            "name": f"chaos-{trial.seed}",
            **self._site.keys(),
            **programs.write(folder, trial),
            "grace": "1s",
        }
        return self._cluster.file(yaml.safe_dump(content))

    def _let_end(self) -> None:
        (self._cluster.folder / "go").touch()

    def _wait_up(self) -> None:
        """Wait until every task works; a run that ends before is a violation."""
        stub = self._trial.program == STUB
        limit_s = allow_s(_UP_S if stub else _TRAINS_S)
        up = self._all_said_up if stub else self._all_train
        eventually(
            lambda: up() or self._over(),
            lambda: f"the tasks did not start: {self._running.err[-1500:]}",
            limit_s,
        )
        assert not self._over(), f"it ended before the fault: {self._running.err}"

    def _all_said_up(self) -> bool:
        shown = self._running.out
        return all(f"{task} | up" in shown for task in self._trial.tasks)

    def _all_train(self) -> bool:
        folder = self._scene.folder
        if folder is None:
            return False
        try:
            found = json.loads((folder / "progress.json").read_text())["tasks"]
        except FileNotFoundError:
            return False
        ranks = [task for task in self._trial.tasks if task.startswith("worker")]
        return all((found.get(task) or {}).get("step") for task in ranks)

    def _over(self) -> bool:
        return self._running.process.poll() is not None

    # --- the strikes ----------------------------------------------------------------

    def _strike_all(self) -> None:
        trial = self._trial
        self._strike(trial.fault)
        if trial.second is None or not self._struck:
            return
        self._until_over(trial.gap_s)
        self._noticed_first = self._word(self._struck[0][1]) is not None
        self._strike(trial.second)

    def _strike(self, fault: Fault) -> None:
        """Strike as soon as there is something to be struck, unless the run ends."""
        struck: Struck | None = None
        at = 0.0
        # What is up has all of its processes.
        wait_s = _UP_S if self._trial.phase == START else _UNSURE_S
        deadline = time.monotonic() + allow_s(wait_s)
        while struck is None and time.monotonic() < deadline:
            over = self._over()
            at = time.time()
            struck = strikes.strike(fault, self._scene)
            if over or self._struck or self._trial.phase == END:
                break
            if struck is None:
                time.sleep(_POLL_S)
        if struck is not None:
            injected = Injected(
                fault=fault,
                phase=self._trial.phase,
                host=struck.host,
                task=struck.task,
            )
            self._struck.append((struck, at, injected))
            self._result.struck.append(struck.what)

    def _until_over(self, seconds: float) -> None:
        """Let the fault last for so long; what it has ended may be clean before."""
        self._wait(self._over, seconds)

    def _word(self, since: float) -> float | None:
        """When the record, or the command, first told of a failure."""
        folder = self._scene.folder
        if folder is None:
            return None
        self._running.adopt(folder.name)
        times = [float(event["t"]) for event in self._running.found("failure")]
        return min((t for t in times if t >= since), default=None)

    # --- the end --------------------------------------------------------------------

    def _finish(self) -> None:
        trial, result = self._trial, self._result
        first = self._struck[0] if self._struck else None
        fatal = first is not None and first[2].fault.blame not in (
            Blame.NOBODY,
            Blame.PERHAPS_HOST,
        )
        if self._struck and not fatal and trial.second is None:
            unsure = first is not None and first[2].fault.blame is Blame.PERHAPS_HOST
            if unsure:
                self._wait(self._over, _UNSURE_S)
            self._let_end()
        elif not self._struck:
            self._let_end()
        elif not fatal:
            # Whether the second one ends the run is seen soon.
            self._wait(self._over, 2 * _UNSURE_S)
            self._let_end()
        limit_s = _END_S + (first[2].fault.notice_s if first else 0.0)
        limit_s = allow_s(limit_s if trial.program == STUB else limit_s + _TRAINS_S)
        lost_at: float | None = None
        deadline = time.monotonic() + limit_s
        while not self._over() and time.monotonic() < deadline:
            if lost_at is None and "lost: " in self._running.err:
                lost_at = time.time()
            time.sleep(_POLL_S)
        if not self._over():
            result.violations.append(
                f"no end within {limit_s:.0f} s: {self._running.err[-1500:]}"
            )
            self._running.process.kill()
            return
        result.code = self._running.process.returncode
        ended = time.time()
        self._take_notice(lost_at or ended)
        self._judge(fatal, ended)

    def _take_notice(self, lost_at: float) -> None:
        if not self._struck:
            return
        _, at, injected = self._struck[0]
        fault = injected.fault
        if fault.blame is Blame.LAUNCHER and self._trial.site in JOBS:
            self._result.notice_s = lost_at - at
        elif fault.blame in (Blame.TASK, Blame.HOST, Blame.ANY_HOST):
            word = self._word(at)
            self._result.notice_s = None if word is None else word - at
        limit_s = allow_s(fault.notice_s)
        late = self._result.notice_s is not None and self._result.notice_s > limit_s
        if late:
            self._result.violations.append(
                f"noticed after {self._result.notice_s:.1f} s, limit {limit_s:.1f} s"
            )

    def _judge(self, fatal: bool, ended: float) -> None:
        result = self._result
        result.violations += oracle.words(self._running.err)
        kinds = {injected.fault.name for _, _, injected in self._struck}
        runs = self._cluster.run_ids()
        if not runs:
            self._wait_clean("", fatal, ended)
            if not kinds & {"kill-launcher", "kill-launcher-guard-agent"}:
                result.violations.append("there is no record of a run")
            return
        self._running.adopt(runs[0])
        if "kill-follower" in kinds:
            self._wait_for_the_record()
        if self._nobody_cleans(kinds):
            # No process is left that could clean up, so the user has to do it.
            done = self._cluster.command("stop", runs[0], timeout_s=90)
            if done.returncode:
                result.violations.append(f"stop: {done.returncode} {done.stderr}")
        self._wait_clean(runs[0], fatal, ended)
        status = self._cluster.recorded(runs[0])
        result.violations += self._wrong(status, kinds)

    def _nobody_cleans(self, kinds: set[str]) -> bool:
        killed = {word for kind in kinds for word in kind.split("-")[1:]}
        return killed >= {"launcher", "agent"} or (
            self._trial.site == SSH and killed >= {"launcher", "guard"}
        )

    def _wrong(self, status: dict[str, Any], kinds: set[str]) -> Iterator[str]:
        trial, code = self._trial, self._result.code
        reported = status["state"] != "lost" and code != KILLED
        yield from oracle.record(self._running.folder, status, reported=reported)
        told = [injected for _, _, injected in self._struck]
        if self._noticed_first:
            told = told[:1]
        killed = "kill-follower" in kinds or (
            trial.site in (LOCAL, SSH) and any("launcher" in kind for kind in kinds)
        )
        if killed and code == KILLED:
            code = None
        if told and any(
            "launcher" in kind and kind.startswith("kill") for kind in kinds
        ):
            # Once it is dead, it records nothing more: also a second one hides a first.
            told = [injected for _, _, injected in self._struck]
        yield from oracle.outcome(code, status, told)
        if trial.program == STUB:
            yield from self._wrong_logs(status, kinds)

    def _wrong_logs(self, status: dict[str, Any], kinds: set[str]) -> Iterator[str]:
        full = bool(kinds & {"full-logs", "full-state"})
        for task in status["tasks"]:
            name, ended = task["task"], task["state"] == "succeeded"
            text = self._running.text(name)
            for wrong in oracle.log_of_stub(text, ended=ended, gaps=full):
                yield f"{name}: {wrong}"
            followed = self._trial.site in (LOCAL, SSH)
            if ended and followed and not full and status["state"] == "succeeded":
                yield from oracle.echo_of_stub(self._running.out, name, text)

    # --- waiting --------------------------------------------------------------------

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return condition()

    def _wait_for_the_record(self) -> None:
        def final() -> bool:
            state = self._cluster.recorded(self._running.run)["state"]
            return is_final(state)

        if not self._wait(final, allow_s(_END_S)):
            self._result.violations.append("the run did not end without its follower")

    def _wait_clean(self, run: str, fatal: bool, ended: float) -> None:
        """Hosts that are cut off clean up by themselves, before the cable is mended.

        An agent that is stopped cannot: it does once it goes on. A scheduler may keep a
        job until the host that ran its script answers again.
        """
        cut = any(i.fault.name.startswith("cut") for _, _, i in self._struck)
        limit_s = allow_s(_CLEAN_S) + (_LEASE_S if cut or "stop" in self._kind else 0)
        left: list[str] = []

        def clean() -> bool:
            nonlocal left
            if self._lasted_long_enough():
                self.undo()
            left = self._site.left(self._running, run)
            if not cut:
                left += [f"job {job}" for job in self._site.jobs()]
            if run and machine.is_locked(self._running.folder / "lock"):
                left.append("the lock")
            return not left

        if not self._wait(clean, limit_s):
            self._result.violations.append(f"left after {limit_s:.0f} s: {left}")
        since = self._struck[0][1] if fatal else ended
        self._result.clean_s = max(0.0, time.time() - since)
        self.undo()
        still: list[str] = []

        def closed() -> bool:
            nonlocal still
            still = self._site.sessions(self._cluster)
            still += [f"job {job}" for job in self._site.jobs()]
            return not still

        limit_s = allow_s(_CLEAN_S) + (_REJOIN_S if cut else 0)
        if not self._wait(closed, limit_s):
            self._result.violations.append(f"open connections, or jobs: {still}")

    def _lasted_long_enough(self) -> bool:
        pause_s = self._trial.pause_s
        if pause_s is None or not self._struck:
            return False
        return time.time() - self._struck[0][1] > pause_s

    @property
    def _kind(self) -> str:
        return self._trial.fault.name


def _pause(seconds: float) -> None:
    time.sleep(max(0.0, seconds))
