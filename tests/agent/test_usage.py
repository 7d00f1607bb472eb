"""Tests of what tasks use: memory and CPU time of all their processes, and GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.agent.client import Agent
from tests.kit.waiting import eventually
from tfcluster.agent import proc
from tfcluster.agent.gpus import GpuUsage
from tfcluster.agent.loop import Loop
from tfcluster.agent.run_services import RunServices
from tfcluster.agent.task import AgentTask
from tfcluster.agent.tasks import UsageReports, interval_s
from tfcluster.protocol.messages import Gpu

MIB = 1 << 20
BUSY = """
import time
def burn(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
"""


@pytest.fixture
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with Agent(tmp_path_factory.mktemp("agent")) as started:
        yield started


def test_a_task_and_its_descendants_are_measured(agent: Agent) -> None:
    code = (
        f"{BUSY}import os; burn(0.4)\n"
        f"if os.fork() == 0: memory = bytearray(b'x') * (80 << 20); burn(0.4)\n"
        "time.sleep(60)"
    )
    agent.python("worker:0", code, attempt=3)
    found = agent.wait_for(
        lambda frame: (
            frame["type"] == "usage"
            and frame["rss_bytes"] > 80 * MIB
            and frame["cpu_s"] > 0.6
        )
    )
    assert (found["task"], found["attempt"], found["processes"]) == ("worker:0", 3, 2)
    assert found["rss_bytes"] < 500 * MIB


def test_a_task_that_ends_at_once_has_a_usage(agent: Agent) -> None:
    agent.python("worker:0", f"{BUSY}memory = bytearray(b'x') * (60 << 20); burn(0.3)")
    exited = agent.wait("exited", task="worker:0")
    assert exited["max_rss_bytes"] > 60 * MIB
    assert exited["cpu_s"] >= 0.3


def test_nothing_is_reported_of_a_task_that_has_ended_already() -> None:
    sent: list[object] = []
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
        asked = SimpleNamespace(env={})
        task = cast(
            "AgentTask",
            SimpleNamespace(process_id=ended.pid, request=asked, key=("w:0", 0)),
        )
        channel = SimpleNamespace(send_event=sent.append)
        shared = SimpleNamespace(loop=Loop(), channel=channel, base={})
        UsageReports(cast("RunServices", shared), lambda: [task])._measure()
    assert sent == []


def test_usage_in_proc_is_parsed() -> None:
    fields = [f"{number}" for number in range(3, 53)]
    found = proc.parse_stat(b"7 (a) b) S " + " ".join(fields[1:]).encode())
    ticks = os.sysconf("SC_CLK_TCK")
    assert found.cpu_s == (14 + 15 + 16 + 17) / ticks
    assert found.rss_bytes == 24 * os.sysconf("SC_PAGE_SIZE")
    assert proc.read(2**22 + 1) is None


def test_measuring_becomes_rarer_and_never_takes_much() -> None:
    assert interval_s(1, 0.0) == 1.0
    assert interval_s(300, 0.004) == 1.0
    assert interval_s(900, 0.0) == 3.0
    assert interval_s(10**6, 0.0) == 10.0
    assert interval_s(1, 0.1) == pytest.approx(20.0)


def test_a_task_has_the_gpus_that_it_may_see() -> None:
    usage = GpuUsage()
    gpus = [Gpu(n, f"GPU-{n}ab", 0.5, None, None) for n in range(3)]
    usage.latest = gpus
    assert usage.of(None) == gpus
    assert usage.of("2, 0") == [gpus[2], gpus[0]]
    assert usage.of("GPU-1") == [gpus[1]]
    assert usage.of("") == usage.of("-1") == usage.of("MIG-7") == []


NVML = """
#include <string.h>
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static int devices[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = devices + i; return 0; }
int nvmlDeviceGetUUID(void *h, char *text, unsigned size) {
    strcpy(text, *(int *)h ? "GPU-b" : "GPU-a"); return 0;
}
int nvmlDeviceGetUtilizationRates(void *h, utilization *u) {
    if (*(int *)h) return 3; /* NVML_ERROR_NOT_SUPPORTED */
    u->gpu = 75; u->memory = 10; return 0;
}
int nvmlDeviceGetMemoryInfo(void *h, memory *m) {
    m->total = 80ull << 30; m->free = 70ull << 30; m->used = 10ull << 30; return 0;
}
"""


def test_gpus_are_asked_through_the_library_of_the_driver(tmp_path: Path) -> None:
    """A library with the signatures of nvml.h; the tests need no GPU."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "nvml.c", tmp_path / "nvml.so"
    source.write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    usage = GpuUsage("/proc/version", str(library))
    usage.start()
    eventually(lambda: bool(usage.latest), lambda: "no GPUs", 20)
    assert usage.of("0") == [Gpu(0, "GPU-a", 0.75, 10 << 30, 80 << 30)]
    assert usage.of("GPU-b") == [Gpu(1, "GPU-b", None, 10 << 30, 80 << 30)]


def test_without_a_driver_or_its_library_there_are_no_gpus() -> None:
    for driver in ("/nowhere", "/proc/version"):
        usage = GpuUsage(driver, "libnowhere.so.1")
        usage.start()
        if usage._thread is not None:
            usage._thread.join(10)
        assert usage.of(None) == []
