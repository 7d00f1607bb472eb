"""Tests of the lease, the guard, and what makes an agent end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.agent.client import DEADLINE_S, PYTHON, Agent, gone, marked
from tests.agent.test_stopping import LEFT_BEHIND, said
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually

STUBBORN = (
    f"{LEFT_BEHIND}\nimport signal; signal.signal(15, signal.SIG_IGN)\n"
    "daemon(); daemon(out=subprocess.DEVNULL); time.sleep(600)"
)


def pids_of(agent: Agent) -> list[int]:
    """Start a task that ignores TERM and has two daemons; returns all three pids."""
    agent.python("w:0", STUBBORN)
    pid = agent.wait("started")["pid"]
    return [pid, *map(int, said(agent, "w:0", 2))]


def test_end_of_file_stops_everything(tmp_path: Path) -> None:
    with Agent(tmp_path, grace_s=0.5) as agent:
        pids = pids_of(agent)
        agent.hang_up()
        assert agent.process.wait(8) == 10
        assert all(gone(pid) for pid in pids)
        agent.read_all()
        assert agent.wait("exited")["signal"] == "KILL"
        # The launcher did not ask for the end; if it still listens, it must see a lost
        # host, not an orderly end.
        assert agent.frames[-1]["type"] != "bye"
        assert not marked(agent.run)


def test_silence_stops_everything(tmp_path: Path) -> None:
    with Agent(tmp_path, lease_s=1.0, heartbeat_s=0.2, grace_s=0.3) as agent:
        pids = pids_of(agent)
        for _ in range(10):  # well beyond the lease
            agent.send(type="ping")
            agent.read(0.2)
        assert not gone(pids[0])
        began = time.monotonic()
        assert agent.process.wait(8) == 10
        assert time.monotonic() - began > 0.8
        assert all(gone(pid) for pid in pids)
        agent.read_all()
        assert "heard nothing" in agent.wait("note")["text"]


def test_heartbeats_come(tmp_path: Path) -> None:
    with Agent(tmp_path, heartbeat_s=0.1) as agent:
        agent.keep_pings = True
        agent.wait("ping")
        agent.wait("ping")


def test_the_clock_is_told_with_the_question(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        before_s = time.monotonic()
        agent.send(type="clock", asked_s=12.5)
        answer = agent.wait("clock")
        assert answer["asked_s"] == 12.5
        assert before_s <= answer["monotonic_s"] <= time.monotonic()


def test_an_agent_that_was_stopped_reads_before_it_judges(tmp_path: Path) -> None:
    with Agent(tmp_path, lease_s=0.6, heartbeat_s=0.1) as agent:
        agent.start("w:0", "sleep", "600")
        pid = agent.wait("started")["pid"]
        os.kill(agent.pid, signal.SIGSTOP)
        agent.send(type="ping")
        time.sleep(1.5)  # the pause is what is tested
        os.kill(agent.pid, signal.SIGCONT)
        for _ in range(5):
            agent.send(type="ping")
            agent.read(0.1)
        assert not gone(pid)
        assert agent.close() == 0


def test_a_pause_of_the_agent_is_not_the_launchers_silence(tmp_path: Path) -> None:
    with Agent(tmp_path, lease_s=1.5, heartbeat_s=0.2) as agent:
        agent.start("w:0", "sleep", "600")
        pid = agent.wait("started")["pid"]
        os.kill(agent.pid, signal.SIGSTOP)
        time.sleep(2.5)  # the pause is what is tested
        os.kill(agent.pid, signal.SIGCONT)
        agent.keep_pings = True
        agent.wait("ping")
        agent.wait("ping")  # it has checked the lease by now
        agent.send(type="ping")
        assert not gone(pid)
        assert agent.close() == 0


def test_no_open_frame(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.hang_up()
    assert agent.process.wait(20) == 10
    agent.dispose()


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[1]\n",
        b'{"type":5}\n',
        b'{"type":"start","task":"w:1"}\n',
        b'{"type":"open"}\n',
        b"x" * (2 << 20),
        b'{"type":"stop","tasks":["w:0"],"grace_s":-1,"signal":"TERM"}\n',
    ],
)
def test_a_malformed_frame_stops_everything(tmp_path: Path, line: bytes) -> None:
    with Agent(tmp_path, grace_s=0.5) as agent:
        agent.start("w:0", "sleep", "600")
        pid = agent.wait("started")["pid"]
        with suppress(BrokenPipeError):  # it has stopped reading
            agent.send_bytes(line)
        assert agent.wait("fault")["cause"]
        assert agent.wait("exited")["signal"] == "TERM"
        agent.wait("bye")
        assert agent.process.wait(20) == 11
        assert gone(pid)


def test_a_frame_before_open(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.send(type="hold", count=1, low=None, high=None)
    assert "open" in agent.wait("fault")["cause"]
    assert agent.process.wait(20) == 11
    agent.dispose()


def test_another_protocol(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.open["protocol"] = 99
    agent.send(**agent.open)
    assert agent.wait("hello")["protocol"] == 1
    assert "99" in agent.wait("fault")["cause"]
    assert agent.process.wait(20) == 11
    agent.dispose()


def test_an_unknown_frame_stops_everything(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        agent.send(type="of the future", x=1)
        assert "'of the future'" in agent.wait("fault")["cause"]
        assert agent.process.wait(20) == 11


def test_a_launcher_that_closes_its_ear(tmp_path: Path) -> None:
    with Agent(tmp_path, heartbeat_s=0.1) as agent:
        agent.start("w:0", "sleep", "600")
        pid = agent.wait("started")["pid"]
        assert agent.process.stdout is not None
        agent.process.stdout.close()
        assert agent.process.wait(8) == 10
        assert gone(pid)


def test_term_to_the_agent_closes_it(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        agent.start("w:0", "sleep", "600")
        agent.wait("started")
        agent.process.send_signal(signal.SIGUSR2)
        assert agent.wait("note")["signal"] == "USR2"
        agent.process.send_signal(signal.SIGINT)
        agent.process.send_signal(signal.SIGHUP)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.wait("note")["signal"] == "TERM"
        assert agent.wait("exited")["signal"] == "TERM"
        agent.wait("bye")
        assert agent.process.wait(20) == 143


def test_a_signal_reaches_the_agent_before_the_guard_has_set_up() -> None:
    code = f"""
import os, signal
from tfcluster.agent import guard

def serve(guard_socket):
    signum = signal.sigtimedwait([signal.SIGTERM], {DEADLINE_S})
    guard_socket.send_clean()
    return 3 if signum else 4

guard.set_title = lambda *words: "guard" in words[0] and os.kill(os.getpid(), 15)
raise SystemExit(guard.guarded(serve))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_the_guard_sweeps_after_the_agent(tmp_path: Path, how: int) -> None:
    with Agent(tmp_path) as agent:
        pids = pids_of(agent)
        os.kill(agent.pid, how)
        began = time.monotonic()
        eventually(lambda: all(gone(pid) for pid in pids), "all are gone")
        assert time.monotonic() - began < allow_s(5)
        assert agent.process.wait(20) == 12
        assert signal.Signals(how).name in agent.stderr()
        assert not marked(agent.run)


def test_without_a_guard_the_agent_goes_on(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        pids = pids_of(agent)
        agent.process.kill()
        note = agent.wait("note")
        assert "guard" in note["text"]
        assert note["guard"] == agent.process.pid
        assert not any(gone(pid) for pid in pids)
        agent.start("w:1", "true")
        assert agent.wait("exited", task="w:1")["code"] == 0
        agent.send(type="close", grace_s=0.3)
        agent.wait("bye")
        eventually(lambda: gone(agent.pid), "the agent is gone")
        assert all(gone(pid) for pid in pids)
        assert not marked(agent.run)


def test_sessions_of_their_own(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        pids = (0, agent.pid, agent.process.pid)
        # The guard may be slower than the agent, which has already said hello.
        eventually(lambda: len(set(map(os.getsid, pids))) == 3, "three sessions")


def test_a_launcher_that_does_not_read_delays_nothing(tmp_path: Path) -> None:
    with Agent(tmp_path, heartbeat_s=0.1, grace_s=1) as agent:
        flood = "import os\nwhile True: os.write(1, b'x' * 99 + b'\\n')"
        agent.start("w:0", PYTHON, "-c", flood)
        agent.start("w:1", "sh", "-c", f"sleep 1; echo $$ >{tmp_path}/told; exit 3")
        eventually((tmp_path / "told").exists, "the second task has run", 5)
        rss = Path(f"/proc/{agent.pid}/status").read_text().split("VmRSS:")[1].split()
        assert int(rss[0]) < 60_000
        agent.stop("w:0")
        assert agent.wait("exited", task="w:1")["code"] == 3
        assert agent.wait("exited", task="w:0")["signal"] == "TERM"
        assert agent.close() == 0
        logs = [f for f in agent.frames if f["type"] == "log" and f["task"] == "w:0"]
        shown = sum(len(frame["lines"]) + frame["dropped"] for frame in logs)
        # The last line may be incomplete.
        assert shown == -(-agent.log("w:0").stat().st_size // 100)
