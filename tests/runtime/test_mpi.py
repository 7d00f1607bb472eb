"""MPI between the ranks: its process manager, its results and its failures."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit import PYTHONPATH
from tests.kit.ranks import PROGRAMS, held_addresses, in_threads, results
from tests.runtime.looping import LONG_S, processes
from tests.runtime.programs.mpi_rank import DTYPES, OPS, values
from tfcluster.runtime.collective.transports.base import UFUNCS, ReduceOp
from tfcluster.runtime.collective.transports.mpi import (
    MpiRankInfo,
    disagreement,
    reducible,
)
from tfcluster.runtime.collective.transports.pmi_server import (
    ProcessManager,
    process_mapping,
    serving,
    words,
)

needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None,
    reason="mpi4py is not installed: pip install 'tfcluster[mpi]'",
)

# --- the process manager --------------------------------------------------------------


def test_a_request_is_split_into_words() -> None:
    line = "cmd=put kvsname=job  key=P0-card value=a=b#c"
    assert words(line) == {
        "cmd": "put",
        "kvsname": "job",
        "key": "P0-card",
        "value": "a=b#c",
    }


@pytest.mark.parametrize(
    ("host_keys", "expected"),
    [
        (["a"], "(vector,(0,1,1))"),
        (["a", "a", "a"], "(vector,(0,1,3))"),
        (["a", "a", "b", "b"], "(vector,(0,1,2),(1,1,2))"),
        (["b", "a", "b"], "(vector,(0,1,1),(1,1,1),(0,1,1))"),
    ],
)
def test_ranks_are_mapped_to_nodes(host_keys: list[str], expected: str) -> None:
    assert process_mapping(host_keys) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (
            "cmd=init pmi_version=1 pmi_subversion=1",
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
        ),
        (
            "cmd=init pmi_version=2 pmi_subversion=0",
            "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=-1",
        ),
        ("cmd=get_maxes", "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024"),
        ("cmd=get_appnum", "cmd=appnum appnum=0"),
        ("cmd=get_universe_size", "cmd=universe_size size=2"),
        ("cmd=get_my_kvsname", "cmd=my_kvsname kvsname=job"),
        (
            "cmd=get kvsname=job key=PMI_process_mapping",
            "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))",
        ),
        ("cmd=get kvsname=job key=other", "cmd=get_result rc=-1 msg=key_not_found"),
        ("cmd=finalize", "cmd=finalize_ack rc=0"),
        ("cmd=spawn", "cmd=spawn_result rc=-1 msg=unknown_command"),
    ],
)
def test_requests_are_answered(request_: str, expected: str) -> None:
    manager = ProcessManager("job", ["a", "a"], lambda data: [data])
    assert manager.answer(request_) == expected


def test_what_is_put_down_is_known_to_all_after_the_barrier() -> None:
    meeting, said = threading.Barrier(2), dict[int, bytes]()

    def gather(rank: int, data: bytes) -> list[bytes]:
        said[rank] = data
        meeting.wait(LONG_S)
        found = [said[0], said[1]]
        meeting.wait(LONG_S)
        return found

    def run(rank: int) -> list[str | None]:
        manager = ProcessManager("job", ["a", "b"], partial(gather, rank))
        ask = f"cmd=get kvsname=job key=card-{1 - rank}"
        manager.answer(f"cmd=put kvsname=job key=card-{rank} value=at:{rank}=x")
        before = manager.answer(ask)
        barrier = manager.answer("cmd=barrier_in")
        return [before, barrier, manager.answer(ask)]

    for rank, answers in enumerate(
        results(in_threads([partial(run, 0), partial(run, 1)]))
    ):
        assert answers == [
            "cmd=get_result rc=-1 msg=key_not_found",
            "cmd=barrier_out rc=0",
            f"cmd=get_result rc=0 msg=success value=at:{1 - rank}=x",
        ]


def test_a_library_finds_its_manager_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PMI_RANK", "7")
    monkeypatch.setenv("PMIX_NAMESPACE", "slurm")
    manager = ProcessManager("job", ["a"] * 3, lambda data: [data])
    with serving(manager, 2, 3):
        found = {name: os.environ[name] for name in os.environ if "PMI" in name}
        library = socket.socket(fileno=int(found.pop("PMI_FD")))
    assert found == {"PMI_RANK": "2", "PMI_SIZE": "3"}
    assert "PMI_FD" not in os.environ
    assert os.environ["PMI_RANK"] == "7"
    assert os.environ["PMIX_NAMESPACE"] == "slurm"
    with library:
        library.settimeout(LONG_S)
        library.sendall(b"cmd=get_appnum\ncmd=get_univ")
        assert library.recv(100) == b"cmd=appnum appnum=0\n"
        library.sendall(b"erse_size\n")
        assert library.recv(100) == b"cmd=universe_size size=3\n"


def test_ranks_that_lose_each_other_while_mpi_starts() -> None:
    def gather(data: bytes) -> list[bytes]:
        raise ConnectionAbortedError("rank 1 has left")

    manager = ProcessManager("job", ["a", "b"], gather)
    with serving(manager, 0, 2):
        library = socket.socket(fileno=int(os.environ["PMI_FD"]))
    with library:
        library.settimeout(LONG_S)
        library.sendall(b"cmd=barrier_in\n")
        assert library.recv(100) == b""


# --- what can be one MPI job ----------------------------------------------------------


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        ([MpiRankInfo("a", "j", "MPICH 5"), MpiRankInfo("b", "k", "MPICH 5")], None),
        (
            [
                MpiRankInfo("a", "j", "MPICH 5"),
                MpiRankInfo("b", "k", problem="no mpi4py"),
            ],
            "rank 1: no mpi4py",
        ),
        (
            [MpiRankInfo("a", "j", x) for x in ("MPICH 5", "MPICH 4", "MPICH 5")],
            "rank 0, 2: MPICH 5; rank 1: MPICH 4",
        ),
    ],
)
def test_ranks_that_cannot_be_one_job(
    sites: list[MpiRankInfo], expected: str | None
) -> None:
    assert disagreement(sites) == expected


def test_mpi_reduces_what_it_reduces_like_numpy() -> None:
    assert reducible(np.dtype("float32"), ReduceOp.SUM)
    assert reducible(np.dtype("complex64"), ReduceOp.PRODUCT)
    assert not reducible(np.dtype("complex64"), ReduceOp.MAX)
    assert not reducible(np.dtype("float16"), ReduceOp.SUM)
    assert not reducible(np.dtype("bool"), ReduceOp.SUM)
    assert not reducible(np.dtype(">f4"), ReduceOp.SUM)


# --- with MPI -------------------------------------------------------------------------


def run_ranks(
    what: str, host_keys: list[str], paths: dict[int, Path] | None = None
) -> list[dict[str, Any]]:
    """The results of each rank; ``paths`` come first on a rank's PYTHONPATH."""
    with held_addresses(len(host_keys)) as addresses:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(PROGRAMS / "mpi_rank.py"),
                    *(what, str(rank), host_key, *addresses),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(
                        [str(path) for r, path in (paths or {}).items() if r == rank]
                        + [PYTHONPATH]
                    ),
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, host_key in enumerate(host_keys)
        ]
        found = []
        for rank in ranks:
            out, err = rank.communicate(timeout=LONG_S)
            assert rank.returncode == 0, (out, err)
            found.append(json.loads(out.splitlines()[-1]))
        return found


@needs_mpi
@pytest.mark.parametrize(
    "host_keys", [[""], ["", ""], ["", "", ""], ["a", "b"], ["a", "b", "a"]]
)
def test_ranks_compute_what_numpy_does(host_keys: list[str]) -> None:
    size = len(host_keys)
    ranks = run_ranks("operations", host_keys)
    for dtype in DTYPES.split():
        for op in OPS:
            expected = values(0, dtype)
            for rank in range(1, size):
                expected = UFUNCS[op](expected, values(rank, dtype))
            for found in ranks:
                assert found[f"{dtype} {op.value}"] == [str(x) for x in expected]
    for length in (1, 5_000, 300_001):
        assert len({found[f"bits {length}"] for found in ranks}) == 1
    for rank, found in enumerate(ranks):
        assert found["gathered"] == " ".join(map(str, range(size)))
        assert found["shared"] == str(size - 1)
        assert found["swapped"] == " ".join(f"{peer}{rank}" for peer in range(size))
        assert found["over mpi"] is (size > 1)
        assert found["files"] == []
        assert found["environment"] == []


@needs_mpi
def test_two_runs_at_one_time_do_not_meet() -> None:
    runs = [partial(run_ranks, "operations", ["", ""]) for _ in range(2)]
    first, second = results(in_threads(runs))
    assert first == second


@needs_mpi
def test_a_rank_without_mpi_is_named_by_all(tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no libmpi')")
    ranks = run_ranks("operations", ["", "", ""], {1: tmp_path})
    for found in ranks:
        assert found["error"].startswith("CollectiveError: transport mpi: rank 1: ")
        assert "(no libmpi): pip install 'tfcluster[mpi]'" in found["error"]


@needs_mpi
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("length", [10, 3_000_000])
def test_a_killed_rank_is_named_within_a_second(size: int, length: int) -> None:
    with processes(size, length, transport="mpi") as ranks:
        ranks.wait_until_under_way()
        ranks.ranks[1].kill()
        killed = time.monotonic()
        for rank in {*range(size)} - {1}:
            at, text, _ = ranks.failure(rank)
            assert at - killed < 1.0, text
            assert text.startswith("PeerLostError: rank 1 has left: its process"), text


@needs_mpi
def test_a_stopped_rank_is_given_up() -> None:
    with processes(
        2, 3_000_000, transport="mpi", stall_warning_s=0.5, stall_timeout_s=3.0
    ) as ranks:
        ranks.wait_until_under_way()
        os.kill(ranks.ranks[1].pid, signal.SIGSTOP)
        _, text, said = ranks.failure(0)
    assert text.startswith("CollectiveTimeoutError: ")
    assert "rank 1 has not entered" in text
    assert "rank 1 has not entered" in said
