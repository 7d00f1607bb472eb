"""All-reduce of float32 between hosts of a test rig, compared with gloo and Open MPI.

Hosts are namespaces on this machine, joined by a bridge. So this measures the work of
the programs and the kernel per byte, not a network.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.collective import MIB, PROGRAMS, Times, by_size, said_in, words
from benchmarks.rigs import TIMEOUT_S, USER, Bench, bench
from tests.rigs.testbed import Options, Unavailable

SIZES = [MIB, 16 * MIB, 64 * MIB]
LAYOUTS = [(2, 1), (2, 2), (4, 1), (4, 2)]
"""The number of hosts, and of ranks on each host."""
ROUNDS = 3
TARGETS = {16 * MIB: 1.0, 64 * MIB: 1.2}


def times(
    site: Bench, argv: tuple[str, ...], env: Mapping[str, str] | None = None
) -> Times:
    """Run a command on the login host; returns the times that its rank 0 prints.

    Raises SystemExit if it prints no times.
    """
    environ = {
        **site.environ,
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **(env or {}),
    }
    done = site.rig.login.run(
        argv, user=USER, cwd=site.folder, env=environ, timeout_s=TIMEOUT_S
    )
    return by_size(said_in(done.stdout + done.stderr, argv))


def launch(
    site: Bench,
    hosts: int,
    each: int,
    name: str,
    *more: str,
    sizes: Sequence[int] = SIZES,
) -> Times:
    where = ",".join(f"{host.name}:{each}" for host in site.rig.nodes[:hosts])
    port = random.randrange(20000, 30000)
    settings = ("backend=ssh", "workdir=/", f"env.BENCH_PORT={port}", *more)
    argv = site.tfcluster(
        *("launch", "-n", str(hosts * each), "--hosts", where),
        *(word for each in settings for word in ("--set", each)),
        *("--", "python", str(PROGRAMS / f"{name}.py"), json.dumps(sizes)),
    )
    return times(site, argv)


def mpirun(site: Bench, hosts: int, each: int) -> Times:
    """Debian's Open MPI 4, with default settings, over the rig's ssh."""
    program = shutil.which("mpirun", path="/usr/bin:/usr/local/bin")
    if program is None:
        raise SystemExit("mpirun is missing: install the package openmpi-bin")
    where = ",".join(f"{host.name}:{each}" for host in site.rig.nodes[:hosts])
    agent = f"ssh -F {site.rig.ssh_config}"
    env = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": "libmpi.so.40"}
    passed = ("PYTHONPATH", "OMP_NUM_THREADS", *env)
    argv = (
        *(program, "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", agent),
        *("--oversubscribe", "-n", str(hosts * each), "--host", where),
        *(word for name in passed for word in ("-x", name)),
        *(sys.executable, str(PROGRAMS / "reduce_mpi.py"), json.dumps(SIZES)),
    )
    return times(site, argv, env)


def measure(site: Bench, hosts: int, each: int) -> dict[str, Times]:
    trials: dict[str, Callable[[], Times]] = {
        "tfcluster": lambda: launch(site, hosts, each, "reduce_tfcluster"),
        "gloo": lambda: launch(
            site, hosts, each, "reduce_gloo", "runtime.strategy=none"
        ),
        "Open MPI": lambda: mpirun(site, hosts, each),
    }
    found: dict[str, list[Times]] = {name: [] for name in trials}
    for _, (name, trial) in itertools.product(range(ROUNDS), trials.items()):
        found[name].append(trial())
    return {
        name: {size: statistics.median(t[size] for t in several) for size in SIZES}
        for name, several in found.items()
    }


def main() -> None:
    print("\n### All-reduce of float32 between hosts\n")
    names = ("gloo", "Open MPI")
    heads = " | ".join(f"{name} | times ours" for name in names)
    print(f"| hosts x ranks | size | tfcluster | {heads} | target |")
    print(f"| {' | '.join(['---'] * 8)} |")
    try:
        with bench(Options(nodes=max(hosts for hosts, _ in LAYOUTS))) as site:
            for hosts, each in LAYOUTS:
                found = measure(site, hosts, each)
                for size in SIZES:
                    ours = found["tfcluster"][size]
                    cells = [f"{hosts} x {each}", words(size), f"{ours * 1e3:.2f} ms"]
                    for name in names:
                        theirs = found[name][size]
                        cells += [f"{theirs * 1e3:.2f} ms", f"**{theirs / ours:.2f}**"]
                    target = TARGETS.get(size)
                    cells.append("" if target is None else f"{target:.1f}")
                    print(f"| {' | '.join(cells)} |", flush=True)
    except Unavailable as error:
        print(f"not here: {error}")


if __name__ == "__main__":
    main()
