"""``make soak``: a training with a fault every minute, against an undisturbed one.

Three ranks train on digits, over SSH on a rig of hosts where one is possible, else on
this machine. Prints what the processes and files use at the beginning and at the end.
Exits with 1 if the result differs, or if something grows.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, TextIO

import yaml

from tests.kit import machine
from tests.kit.cluster import Cluster, Running
from tests.kit.waiting import eventually
from tests.rigs.chaos.faults import LOCAL, SSH
from tests.rigs.chaos.sites import LocalSite, RigSite, Site
from tests.rigs.soak import usage, verdict
from tests.rigs.testbed import packages
from tests.rigs.testbed.commands import Unavailable
from tests.rigs.testbed.layout import REPOSITORY
from tests.schedulers.ssh.rig_launches import USER

RANKS = 3
FAULTS = ("kill a rank", "stop a rank", "kill an agent")
_PACE_S = 2.0
_SAMPLE_S = 5.0
_LONGEST_STOP_S = 20.0
_RESUMABLE = {1, 5}
"""A task failed, or contact was lost: another launch continues from the checkpoint."""


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.rigs.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--every", type=float, default=60, help="seconds (default: 60)")
    parser.add_argument("--site", choices=(LOCAL, SSH))
    given = parser.parse_args(words)
    seed = SystemRandom().randrange(10**6) if given.seed is None else given.seed
    folder = Path(tempfile.mkdtemp(prefix="tfcluster-soak-"))
    site = _site(given.site, folder)
    _say(f"seed {seed}, {site.name}\n", sys.stderr)
    epochs = max(4, round(given.minutes * 60 / _PACE_S))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        alone = _Training(site, 0, epochs, pace_s=0.0)
        alone.undisturbed(limit_s=given.minutes * 120 + 600)
        soak = _Training(site, 1, epochs, pace_s=_PACE_S)
        soak.disturbed(Random(seed), given.every, limit_s=given.minutes * 180 + 600)
        return _judge(soak, alone, folder)
    finally:
        site.close()


def _site(wanted: str | None, folder: Path) -> Site:
    if wanted != LOCAL:
        try:
            packages.check_root()
            packages.require(("ssh",))
            return RigSite(SSH, RANKS)
        except Unavailable as error:
            if wanted == SSH:
                raise SystemExit(f"no rig: {error}") from error
            _say(f"on this machine, because there is no rig: {error}\n", sys.stderr)
    return LocalSite(folder / "local")


class _Training:
    """One training, which may take several launches."""

    def __init__(self, site: Site, number: int, epochs: int, *, pace_s: float) -> None:
        self._site = site
        self.cluster: Cluster = site.cluster(number)
        self.output = self.cluster.folder / "output"
        self.output.mkdir()
        owner = self.cluster.folder.stat()
        os.chown(self.output, owner.st_uid, owner.st_gid)
        self.cluster.environ["XDG_CACHE_HOME"] = str(self.cluster.folder / "cache")
        self.samples: list[usage.Sample] = []
        self.faults: Counter[str] = Counter()
        self.launches = 0
        self.problems: list[str] = []
        self._config = self._write(epochs, pace_s)
        self._next_sample = 0.0
        self._done = 0
        """Completed epochs at the last fault."""

    def _write(self, epochs: int, pace_s: float) -> str:
        program = REPOSITORY / "tests" / "soak" / "program.py"
        words = ["--epochs", str(epochs), "--pace", str(pace_s)]
        words += ["--began", str(time.time())]
        content: dict[str, Any] = {
            **self._site.keys(),
            "command": ["python", str(program), *words, "--output", str(self.output)],
            "tasks": {"worker": {"count": RANKS, "min": RANKS - 1}},
            "runtime": {"shards": 2 * RANKS},
            "restart": {"max": 1000},
            "grace": "2s",
        }
        return self.cluster.file(yaml.safe_dump(content))

    @property
    def interruptions(self) -> int:
        """How often a rank or a host was lost; a rank that was stopped goes on."""
        return self.faults["kill a rank"] + self.faults["kill an agent"]

    @property
    def restarts(self) -> int:
        attempts = 0
        for run in self.cluster.run_ids():
            tasks = self.cluster.recorded(run)["tasks"]
            attempts += max((task["attempt"] for task in tasks), default=0)
        return attempts

    def undisturbed(self, limit_s: float) -> None:
        self.launches += 1
        running = self.cluster.start(self._config)
        try:
            code = running.end(limit_s)
        finally:
            self.cluster.end()
        if code:
            self.problems.append(
                f"undisturbed: exit code {code}: {running.err[-2000:]}"
            )

    def disturbed(self, rng: Random, every_s: float, limit_s: float) -> None:
        """Launch again until the training is over, as the docs say."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            self.launches += 1
            running = self.cluster.start(self._config)
            try:
                code = self._watch(running, rng, every_s, deadline)
            finally:
                self.cluster.end()
            if code == 0:
                return
            _say(f"  exit code {code}: launching again\n", sys.stderr)
            self._site.repair(self.cluster)
            if code not in _RESUMABLE:
                self.problems.append(f"exit code {code}: {running.err[-2000:]}")
                return
        self.problems.append(f"not over after {limit_s:.0f} s")

    def _watch(
        self, running: Running, rng: Random, every_s: float, deadline: float
    ) -> int:
        next_fault: float | None = None
        while running.process.poll() is None:
            now = time.monotonic()
            if now > deadline:
                running.process.kill()
                return running.process.wait()
            # A rank that starts has not yet what it needs to train.
            if next_fault is not None and now > self._next_sample:
                self._next_sample = now + _SAMPLE_S
                self._take_sample(running)
            if next_fault is None:
                # The time counts from when the training goes on: a machine that starts
                # it slowly would never get on otherwise.
                if self._completed() > self._done:
                    next_fault = now + every_s * rng.uniform(0.7, 1.3)
            elif now > next_fault and self._strike(rng):
                next_fault = None
            with suppress(Exception):
                running.process.wait(0.2)
        return int(running.process.returncode)

    def _take_sample(self, running: Running) -> None:
        roles = [self._site.roles(self.cluster, host) for host in self._site.hosts]
        pids = {
            "launcher": self._site.launcher(running),
            "agents": [pid for each in roles for pid in each.agents],
            "ranks": [pid for each in roles for pid in each.tasks],
        }
        cache = self.cluster.folder / "cache"
        if isinstance(self._site, RigSite):
            cache = self._site.rig.accounts[USER].home / ".cache" / "tfcluster"
        files = {"record": self.cluster.state, "cache": cache}
        self.samples.append(usage.sample(pids, files))

    def _completed(self) -> int:
        epochs = self.output / "epochs.jsonl"
        return len(epochs.read_text().splitlines()) if epochs.exists() else 0

    def _strike(self, rng: Random) -> bool:
        """Break something; False if nothing trains at the moment."""
        hosts = [
            (host, roles)
            for host in self._site.hosts
            for roles in [self._site.roles(self.cluster, host)]
            if roles.tasks and roles.agents
        ]
        if not hosts:
            return False
        host, roles = rng.choice(hosts)
        what = rng.choice(FAULTS)
        pid = rng.choice(roles.agents if what == "kill an agent" else roles.tasks)
        self.faults[what] += 1
        self._done = self._completed()
        _say(f"  {what} on {host} after {self._done} epochs\n", sys.stderr)
        with suppress(ProcessLookupError):
            if what == "stop a rank":
                os.kill(pid, signal.SIGSTOP)
                # This wait is the fault.
                time.sleep(rng.uniform(1.0, _LONGEST_STOP_S))
                os.kill(pid, signal.SIGCONT)
            else:
                os.kill(pid, signal.SIGKILL)
                eventually(
                    lambda: not machine.is_alive(pid), lambda: f"{pid} lives", 30
                )
        return True


def _judge(soak: _Training, alone: _Training, folder: Path) -> int:
    problems = [*alone.problems, *soak.problems]
    if not problems:
        found = verdict.read_epochs(soak.output / "epochs.jsonl")
        wanted = verdict.read_epochs(alone.output / "epochs.jsonl")
        problems += verdict.of_epochs(found, wanted, soak.interruptions)
        problems += verdict.of_weights(
            soak.output / "weights.npz", alone.output / "weights.npz"
        )
        _say(f"{len(wanted)} epochs, {len(found) - len(wanted)} of them repeated; ")
    faults = ", ".join(f"{what}: {count}" for what, count in soak.faults.items())
    _say(f"faults: {faults or 'none'}; ")
    _say(f"{soak.launches} launches with {soak.restarts} restarts\n")
    rows = usage.rows(soak.samples)
    for line in usage.table(rows):
        _say(line + "\n")
    _say(usage.RULE + "\n")
    problems += [f"{row.whose}: {row.what} grows" for row in rows if not row.flat]
    for problem in problems:
        _say(f"VIOLATION: {problem}\n")
    if problems:
        kept = folder / "kept"
        shutil.copytree(soak.cluster.folder, kept, symlinks=True)
        _say(f"record: {kept}\n")
    else:
        _say("the same epochs, and the same bits in the weights\n")
    return 1 if problems else 0


def _say(text: str, stream: TextIO = sys.stdout) -> None:
    stream.write(text)
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
