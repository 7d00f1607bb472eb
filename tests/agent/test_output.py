"""Tests of output: complete in files, bounded on the channel, even on a bad disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import PYTHON, Agent
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually
from tfcluster.protocol.wire import Frame

MIB = 1 << 20


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path, heartbeat_s=0.25) as started:
        yield started


def logs_of(agent: Agent, task: str) -> list[Frame]:
    return [f for f in agent.frames if f["type"] == "log" and f["task"] == task]


def lines_of(agent: Agent, task: str) -> list[str]:
    return [line for frame in logs_of(agent, task) for line in frame["lines"]]


def test_four_floods_are_complete_and_heartbeats_go_on(agent: Agent) -> None:
    agent.keep_pings = True
    code = (
        "import hashlib,os,random,sys\n"
        "r=random.Random(int(sys.argv[1])); h=hashlib.sha256()\n"
        "def line(): return r.randbytes(r.randrange(90)).replace(b'\\r',b'')+b'\\n'\n"
        "block=b''.join(line() for _ in range(20000))\n"
        "for i in range(50*2**20//len(block)):\n"
        "    view=memoryview(block); h.update(block)\n"
        "    while view: view=view[os.write(1,view):]\n"
        "open(sys.argv[2],'w').write(h.hexdigest())\n"
    )
    sums = {f"w:{i}": agent.folder / f"sum-{i}" for i in range(4)}
    for index, (task, path) in enumerate(sums.items()):
        agent.start(task, PYTHON, "-c", code, str(index), str(path))
    began = last = time.monotonic()
    longest, ended = 0.0, 0
    while ended < 4:
        assert agent.read(5)
        now = time.monotonic()
        ended = sum(f["type"] == "exited" for f in agent.frames)
        if agent.frames[-1]["type"] == "ping" or ended == 4:
            longest, last = max(longest, now - last), now
        assert now - began < allow_s(50)
    assert longest < allow_s(1.25)
    for task, path in sums.items():
        assert agent.wait("exited", task=task)["code"] == 0
        content = agent.log(task).read_bytes()
        assert len(content) > 45 * MIB
        assert hashlib.sha256(content).hexdigest() == path.read_text()
    status = Path(f"/proc/{agent.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 80_000
    assert agent.close() == 0
    for task in sums:
        frames = logs_of(agent, task)
        shown = sum(len(frame["lines"]) + frame["dropped"] for frame in frames)
        assert shown == agent.log(task).read_bytes().count(b"\n")


def test_a_line_of_100_mib(agent: Agent) -> None:
    code = "import os\nfor _ in range(100): os.write(1, b'y' * 2**20)\nprint('\\nend')"
    agent.start("w:0", PYTHON, "-c", code)
    exited = agent.wait("exited", timeout_s=30)
    assert exited["tail"] == ["y" * 2000, "end"]
    assert agent.log("w:0").stat().st_size == 100 * MIB + 5
    status = Path(f"/proc/{agent.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 60_000
    assert agent.close() == 0
    assert lines_of(agent, "w:0") == ["y" * 16384, "end"]


def test_bytes_that_are_no_text(agent: Agent) -> None:
    everything = bytes(range(256))
    code = "import os; os.write(1, bytes(range(256)) + b'\\nnext \\xe2\\x82\\xac\\n')"
    agent.start("w:0", PYTHON, "-c", code)
    tail = agent.wait("exited")["tail"]
    assert agent.log("w:0").read_bytes() == everything + "\nnext €\n".encode()
    assert tail[-1] == "next €"
    assert tail[-2].endswith("\\xfe\\xff")
    assert agent.close() == 0
    assert lines_of(agent, "w:0") == tail


def test_a_progress_bar_does_not_flood(agent: Agent) -> None:
    code = (
        "import sys,time\n"
        "for i in range(1200):\n"
        "    sys.stdout.write(f'\\r{i}/1200'); sys.stdout.flush(); time.sleep(0.001)\n"
        "print('\\rdone')"
    )
    agent.start("w:0", PYTHON, "-c", code)
    assert agent.wait("exited")["tail"] == ["done"]
    assert agent.close() == 0
    lines = lines_of(agent, "w:0")
    assert lines[-1] == "done"
    assert 2 <= len(lines) <= 8
    assert all(frame["dropped"] == 0 for frame in logs_of(agent, "w:0"))


def test_a_line_is_never_shown_in_two_parts(agent: Agent) -> None:
    code = "printf 'one '; sleep 1.2; printf 'line\\nrest'; sleep 0.1"
    agent.start("w:0", "sh", "-c", code)
    agent.wait("exited")
    assert agent.close() == 0
    assert lines_of(agent, "w:0") == ["one line", "rest"]


def test_the_tail_is_the_last_twenty_lines(agent: Agent) -> None:
    agent.start("w:0", "seq", "100000")
    exited = agent.wait("exited")
    assert exited["tail"] == [str(n) for n in range(99981, 100001)]


def test_a_flood_leaves_exact_counts(agent: Agent) -> None:
    agent.start("w:0", "seq", "1000000")
    agent.wait("exited")
    assert agent.close() == 0
    expected = 1
    for frame in logs_of(agent, "w:0"):
        expected += frame["dropped"]
        for line in frame["lines"]:
            assert int(line) == expected
            expected += 1
    assert expected == 1_000_001
    shown = len(lines_of(agent, "w:0"))
    assert 1000 < shown < 20_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("a small file system can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_no_task(agent: Agent, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    log = small_disk / "w.log"
    code = (
        "import os,time\n"
        "for i in range(512): os.write(1, b'%1023d\\n' % i)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "print('after')\n"
    )
    ballast.write_bytes(b"x" * (128 << 10))
    agent.start("w:0", PYTHON, "-c", code, log=str(log))
    error = agent.wait("log_error", task="w:0")
    assert "No space left" in error["cause"]
    assert error["dropped_bytes"] > 0
    ballast.unlink()
    note = agent.wait("note", timeout_s=20)["text"]
    assert "can be written again" in note
    (agent.folder / "go").touch()
    exited = agent.wait("exited")
    assert (exited["code"], exited["tail"][-1]) == (0, "after")
    content = log.read_bytes()
    assert content.endswith(b"after\n")
    missing = int(content.split(b" bytes are missing here")[0].split()[-1])
    kept = content.replace(b"\n---- %d bytes are missing here ----\n" % missing, b"")
    assert len(kept) + missing == 512 * 1024 + len("after\n")
    assert str(missing) in note


def test_a_removed_log_folder_is_made_again(agent: Agent) -> None:
    code = (
        "import time\n"
        "for i in range(60): print('line', i, flush=True); time.sleep(0.05)\n"
    )
    agent.start("w:0", PYTHON, "-c", code)
    log = agent.log("w:0")
    eventually(lambda: log.exists() and log.stat().st_size, "the log has begun")
    shutil.rmtree(log.parent)
    assert "removed" in agent.wait("log_error", task="w:0")["cause"]
    assert agent.wait("exited")["code"] == 0
    assert log.read_text().endswith("line 59\n")


def test_a_folder_that_is_a_file(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    log = tmp_path / "file" / "w.log"
    agent.start("w:0", "echo", "hello", log=str(log))
    error = agent.wait("log_error", task="w:0")
    assert str(log) in error["cause"]
    exited = agent.wait("exited")
    assert (exited["code"], exited["tail"]) == (0, ["hello"])
    agent.wait("log", task="w:0", lines=["hello"])


def test_a_slow_disk_delays_no_heartbeat(agent: Agent) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace makes the disk slow")
    agent.start("first", "true")
    agent.wait("exited")  # by now the capture thread runs
    threads = [int(path.name) for path in Path(f"/proc/{agent.pid}/task").iterdir()]
    [capture] = [thread for thread in threads if thread != agent.pid]
    slow = ["-e", "trace=write", "-e", "inject=write:delay_enter=700000"]
    tracer = subprocess.Popen(
        [strace, "-p", str(capture), *slow], stderr=subprocess.PIPE, text=True
    )
    try:
        assert tracer.stderr is not None
        if "attached" not in tracer.stderr.readline():
            pytest.skip("this thread may not be traced")
        agent.keep_pings = True
        agent.start("w:0", "sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.3; done")
        agent.wait("started")
        waits_s = []
        for _ in range(9):
            began = time.monotonic()
            agent.wait("ping")
            waits_s.append(time.monotonic() - began)
        assert statistics.median(waits_s) < 0.6
    finally:
        tracer.terminate()
        tracer.communicate()
    assert agent.wait("exited")["code"] == 0
    assert agent.log("w:0").read_text() == "1\n2\n3\n"


def test_control_frames_overtake_logs(agent: Agent) -> None:
    # Long lines, so that one second's worth is far more than the channel holds.
    flood = f"yes {'x' * 499} | head -c 30000000"
    agent.start("w:0", "sh", "-c", flood)
    log = agent.log("w:0")
    # Read nothing from the channel until the flood has ended.
    eventually(
        lambda: log.exists() and log.stat().st_size == 30_000_000,
        "the flood is in the file",
        20,
    )
    agent.start("w:1", "true")
    eventually(agent.log("w:1").exists, "the second has started")
    assert agent.close() == 0
    order = [(f["type"], f.get("task")) for f in agent.frames]
    last_log = len(order) - 1 - order[::-1].index(("log", "w:0"))
    assert order.index(("started", "w:1")) < last_log - 10
