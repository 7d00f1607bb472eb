"""The costs of many SSH hosts (start, launcher, output, doctor), and of scheduler jobs.

``python -m benchmarks.fanout [PART...] [--hosts N...] [--repeats N] [--imports]``
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.measure import HERE, Row, show
from benchmarks.rigs import USER, Bench, Cost, Usage, bench
from tests.rigs.testbed import Options, RigError, Unavailable

REPEATS = 5
DOCTOR_S = 15.0
OVERHEAD_S = 1.0
SCHEDULED = 4
LINES_PER_S = 20_000
LINES_S = 10
SETTLE_S = 120.0
STATUS_S = 0.3
LEFT_S = 10.0


def main(words: Sequence[str] | None = None) -> None:
    given = _parser().parse_args(words)
    try:
        _run(given.parts or list(_PARTS), given)
    except Unavailable as error:
        print(f"\n### Fan-out\n\nnot here: {error}")


def _run(parts: Sequence[str], given: argparse.Namespace) -> None:
    if set(parts) - {"schedulers"}:
        with bench(Options(nodes=max(given.hosts))) as site:
            for name in parts:
                if name != "schedulers":
                    _PARTS[name](site, given)
    if "schedulers" in parts:
        with bench(Options(nodes=SCHEDULED, slurm=True, sge=True)) as site:
            _schedulers(site, given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(_PARTS))
    parser.add_argument("--hosts", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--imports", action="store_true", help="doctor: import TensorFlow, too"
    )
    return parser


def medians(trials: Mapping[str, Callable[[], Cost]], repeats: int) -> dict[str, Cost]:
    """The median of each figure separately; the trials take turns."""
    found: dict[str, list[Cost]] = {name: [] for name in trials}
    for _ in range(repeats):
        for name, trial in trials.items():
            found[name].append(trial())
    return {
        name: Cost(
            statistics.median(cost.seconds for cost in costs),
            statistics.median(cost.cpu_s for cost in costs),
            statistics.median(cost.nodes_cpu_s for cost in costs),
        )
        for name, costs in found.items()
    }


def _table(title: str, header: str, rows: Iterable[Sequence[object]]) -> None:
    columns = header.split(" | ")
    print(f"\n### {title}\n\n| {header} |\n|{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


# --- one task that does nothing on each host ----------------------------------------


def _mpirun(site: Bench, count: int) -> tuple[str, ...]:
    """Open MPI 4 (Debian's openmpi-bin), with default settings, over the rig's ssh."""
    program = shutil.which("mpirun", path="/usr/bin:/usr/local/bin")
    if program is None:
        raise SystemExit("mpirun is missing: apt-get install openmpi-bin")
    hosts = ",".join(host.name for host in site.rig.nodes[:count])
    agent = f"ssh -F {site.rig.ssh_config}"
    options = ("--mca", "plm", "rsh", "--mca", "plm_rsh_agent", agent)
    return (program, *options, "-n", str(count), "--host", hosts, "true")


def _hosts(site: Bench, given: argparse.Namespace) -> None:
    counts: list[int] = sorted(given.hosts)
    trials: dict[str, Callable[[], Cost]] = {}
    for count in counts:
        ours, peer = site.launch(count, "true"), _mpirun(site, count)
        site.cost(ours)  # the first run installs the agent on the hosts
        trials[f"tfcluster {count}"] = lambda argv=ours: site.cost(argv)  # type: ignore[misc]
        trials[f"mpirun {count}"] = lambda argv=peer: site.cost(argv)  # type: ignore[misc]
    found = medians(trials, given.repeats)
    rows = []
    for count in counts:
        ours_s = found[f"tfcluster {count}"].seconds
        peer_s = found[f"mpirun {count}"].seconds
        what = f"{count} SSH hosts, a task that does nothing on each"
        rows.append(Row(what, ours_s, "mpirun over ssh", peer_s, 1.2))
    for less, more in itertools.pairwise(counts):
        pair = (found[f"tfcluster {count}"].seconds for count in (more, less))
        growth = 1.1 * more / less
        rows.append(
            Row(f"{more} hosts", next(pair), f"{less} hosts", next(pair), growth)
        )
    show("Fan-out", rows)
    _table(
        "Fan-out: CPU",
        "what | on the launcher's host | on all others | together, for each host",
        (
            (
                name,
                f"{cost.cpu_s:.2f} s",
                f"{cost.nodes_cpu_s:.2f} s",
                f"{cost.together_s / int(name.split()[1]) * 1e3:.0f} ms",
            )
            for name, cost in found.items()
        ),
    )


# --- the launcher while tasks run ---------------------------------------------------


def _launcher(site: Bench, given: argparse.Namespace) -> None:
    """What each host costs the launcher, and how fast a large run answers and ends."""
    counts: list[int] = sorted(given.hosts)
    if len(counts) == 1:
        counts = [max(1, counts[0] // 2), *counts]
    found = {count: _while_running(site, count) for count in counts}
    rows: list[Sequence[object]] = [
        (
            f"{count} hosts",
            f"{running.usage.cpu_s:.2f} s",
            f"{running.usage.rss_kib >> 10} MiB",
            running.usage.threads,
            running.usage.files,
            f"{1e3 * running.idle_cpu:.0f} ms",
        )
        for count, running in found.items()
    ]
    (few, less), *_, (many, more) = found.items()
    used, usage = less.usage, more.usage
    rows.append(
        (
            "for each host",
            f"{(usage.cpu_s - used.cpu_s) / (many - few) * 1e3:.0f} ms",
            f"{(usage.rss_kib - used.rss_kib) / (many - few):.0f} KiB",
            f"{(usage.threads - used.threads) / (many - few):.1f}",
            f"{(usage.files - used.files) / (many - few):.1f}",
            f"{(more.idle_cpu - less.idle_cpu) / (many - few) * 1e3:.1f} ms",
        )
    )
    header = "what | CPU to start | memory | threads | descriptors | CPU in each second"
    _table("Launcher", header, rows)
    _table(
        "A running launch",
        f"what | `status` (target: {STATUS_S} s) | same, CPU | from Ctrl-C to its "
        f"end | until nothing is left (target: {LEFT_S:.0f} s)",
        (
            (
                f"{count} hosts",
                f"{running.status.seconds:.2f} s",
                f"{running.status.cpu_s:.2f} s",
                f"{running.ended_s:.1f} s",
                f"{running.nothing_left_s:.1f} s",
            )
            for count, running in found.items()
        ),
    )


@dataclass(frozen=True, slots=True)
class _Running:
    """A launch whose tasks all run, and then its end."""

    usage: Usage
    """The launcher's usage once all tasks run."""
    idle_cpu: float
    """The CPU seconds that the launcher uses in each second afterwards."""
    status: Cost
    """The cost of ``tfcluster status`` for the run."""
    ended_s: float
    """Seconds from Ctrl-C to the end of the launcher."""
    nothing_left_s: float
    """Seconds from Ctrl-C until no host has a process of the user."""


def _while_running(site: Bench, count: int) -> _Running:
    output = site.folder / "launched"
    process = site.start(site.launch(count, "sh", "-c", "echo up; sleep 600"), output)
    try:
        _until(lambda: output.read_text().count("| up") == count, output.read_text)
        usage, begin = Usage.of(process.inside_pid), time.monotonic()
        time.sleep(10)  # measures an idle launcher; there is no event to wait for
        later = Usage.of(process.inside_pid)
        idle_cpu = (later.cpu_s - usage.cpu_s) / (time.monotonic() - begin)
        status = site.cost(site.tfcluster("status", _newest_run(site).name))
    finally:
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(SETTLE_S)
    ended_s = time.monotonic() - interrupted
    _until(lambda: not _of_user(site), lambda: "\n".join(_of_user(site)))
    left_s = time.monotonic() - interrupted
    return _Running(usage, idle_cpu, status, ended_s, left_s)


def _of_user(site: Bench) -> list[str]:
    """The user's processes on all hosts, which share this machine's kernel."""
    number = site.rig.accounts[USER].number
    return [
        " ".join(process.info["cmdline"] or [process.info["name"]])
        for process in psutil.process_iter(["uids", "cmdline", "name"])
        if process.info["uids"] and process.info["uids"].real == number
    ]


def _newest_run(site: Bench) -> Path:
    runs = (site.folder / "state" / "runs").iterdir()
    return max(runs, key=lambda path: path.stat().st_mtime)


def _until(done: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited in vain:\n{said()[-2000:]}")
        time.sleep(0.1)  # polls a file that another process writes


# --- lines ---------------------------------------------------------------------------


def _lines(site: Bench, given: argparse.Namespace) -> None:
    count = min(given.hosts)
    rate = LINES_PER_S // count
    each = rate * LINES_S
    program = (sys.executable, str(HERE / "programs" / "steady.py"))
    output = site.folder / "shown"
    begin = time.monotonic()
    argv = site.launch(count, *program, str(each), str(rate))
    process = site.start(argv, output)
    used = Usage(0, 0, 0, 0)
    while process.poll() is None:
        with contextlib.suppress(OSError, RigError, KeyError, IndexError):
            used = Usage.of(process.inside_pid)
        time.sleep(0.1)  # between samples of the usage
    elapsed = time.monotonic() - begin
    if process.returncode:
        raise SystemExit(f"{argv} failed:\n{output.read_text()[-2000:]}")
    logs = sorted(_newest_run(site).glob("logs/worker*.log"))
    lost = count * each - sum(_in_order(path.read_text(), each) for path in logs)
    shown = output.read_text().count(" line ")
    header = "what | target | found"
    _table(
        "Lines",
        header,
        [
            (f"lines of {count} hosts, {LINES_PER_S} a second", "", count * each),
            ("lost in the log files", 0, lost),
            ("not shown on the console", "", count * each - shown),
            ("time from launch to exit", "", f"{elapsed:.1f} s"),
            ("launcher's CPU", f"< {LINES_S:.1f} s", f"{used.cpu_s:.1f} s"),
            ("launcher's memory", "< 200 MiB", f"{used.rss_kib >> 10} MiB"),
        ],
    )


def _in_order(text: str, count: int) -> int:
    """The number of expected lines that a log has in the right places."""
    lines = text.splitlines()
    wanted = (f"line {number} " for number in range(count))
    pairs = zip(lines, wanted, strict=False)
    return sum(line.startswith(words) for line, words in pairs)


# --- doctor --------------------------------------------------------------------------


def _doctor(site: Bench, given: argparse.Namespace) -> None:
    count = min(given.hosts)
    path = site.write(
        "doctor.yaml",
        f"backend: ssh\nhosts: ['{site.hosts(count)}']\ntasks: {{worker: {count}}}\n"
        'workdir: /\nruntime: {strategy: none}\ncommand: "true"\n',
    )
    kinds: dict[str, tuple[str, ...]] = {"without importing TensorFlow": ("--quick",)}
    if given.imports:
        kinds["with all imports"] = ()
    trials: dict[str, Callable[[], Cost]] = {
        name: lambda words=words: site.cost(  # type: ignore[misc]
            site.tfcluster("doctor", *words, str(path)), codes=(0, 4)
        )
        for name, words in kinds.items()
    }
    repeats = 1 if given.imports else given.repeats
    _table(
        "Doctor",
        "what | time | target | CPU on the launcher's host | CPU on all others",
        (
            (
                f"{count} hosts, {name}",
                f"{cost.seconds:.1f} s",
                f"{DOCTOR_S:.0f} s",
                f"{cost.cpu_s:.1f} s",
                f"{cost.nodes_cpu_s:.1f} s",
            )
            for name, cost in medians(trials, repeats).items()
        ),
    )


# --- schedulers ----------------------------------------------------------------------


def _schedulers(site: Bench, given: argparse.Namespace) -> None:
    times = (sys.executable, str(HERE / "programs" / "times.py"))
    rows = []
    for backend, peer, job in (
        ("slurm", ("srun", "hostname"), _in_slurm),
        ("sge", ("qrsh", "-inherit", "{host}", "hostname"), _in_sge),
    ):
        text = f"backend: {backend}\ntasks: {{worker: {SCHEDULED}}}\nworkdir: /\n"
        section = (
            "slurm: {nodes: 4}"
            if backend == "slurm"
            else ("sge: {parallel_environment: tf, slots: 4}")
        )
        more = f'{section}\nruntime: {{strategy: none}}\ncommand: "true"\n'
        path = site.write(f"{backend}.yaml", text + more)
        commands = {"ours": site.tfcluster("launch", str(path)), "theirs": peer}
        said = job(site, (*times, json.dumps(commands), str(given.repeats)))
        line = next(line for line in said.splitlines() if line.startswith("TIMES "))
        found = json.loads(line.removeprefix("TIMES "))
        more_s = found["ours"] - found["theirs"]
        rows.append(
            (
                f"{SCHEDULED} hosts in a job of {backend}",
                f"{found['ours']:.3f} s",
                " ".join(peer[:2]),
                f"{found['theirs']:.3f} s",
                f"**{more_s:+.3f} s**",
                f"{OVERHEAD_S:.2f} s",
            )
        )
    header = "what | tfcluster | peer | peer's time | difference | target"
    _table("Schedulers", header, rows)


def _in_slurm(site: Bench, argv: Sequence[str]) -> str:
    options = ("--quiet", f"-N{SCHEDULED}", "--ntasks-per-node=1")
    return _output(site, ("salloc", *options, *argv))


def _in_sge(site: Bench, argv: Sequence[str]) -> str:
    said = site.folder / "sge.out"
    job = ("-sync", "y", "-b", "y", "-shell", "n", "-j", "y", "-V", "-cwd")
    _output(site, ("qsub", *job, "-o", str(said), "-pe", "tf", str(SCHEDULED), *argv))
    return said.read_text()


def _output(site: Bench, argv: Sequence[str]) -> str:
    done = site.rig.login.run(
        argv, user=USER, cwd=site.folder, env=site.environ, timeout_s=SETTLE_S * 5
    )
    if done.returncode:
        raise SystemExit(f"{argv} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


_PARTS: dict[str, Callable[[Bench, argparse.Namespace], None]] = {
    "hosts": _hosts,
    "launcher": _launcher,
    "lines": _lines,
    "doctor": _doctor,
    "schedulers": _schedulers,
}


if __name__ == "__main__":
    main()
