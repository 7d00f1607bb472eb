"""Tests of stopping tasks, and of the processes that they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import PYTHON, Agent, gone, marked
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually
from tfcluster.agent import proc
from tfcluster.agent.signals import send
from tfcluster.base.light_dataclasses import replace

IGNORE = "import signal,time; signal.signal(15,signal.SIG_IGN); print('up',flush=True)"
SLEEP = "import time; time.sleep(600)"

# Starts a grandchild in a session of its own, and prints its pid.
LEFT_BEHIND = """
import os, subprocess, sys, time
def daemon(env=None, out=None):
    r, w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        p = subprocess.Popen(["sleep", "600"], env=env, stdout=out, stderr=out)
        os.write(w, str(p.pid).encode()); os._exit(0)
    os.wait(); pid = os.read(r, 20).decode(); print(pid, flush=True)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as started:
        yield started


def said(agent: Agent, task: str, lines: int = 1) -> list[str]:
    """Wait for the first lines that a task prints, and return them."""
    eventually(
        lambda: agent.output(task).count("\n") >= lines, f"{lines} lines of {task}"
    )
    return agent.output(task).splitlines()[:lines]


def test_term_is_enough_for_most(agent: Agent) -> None:
    agent.start("w:0", "sleep", "600")
    agent.wait("started")
    agent.stop("w:0")
    exited = agent.wait("exited", timeout_s=20)
    assert (exited["signal"], exited["stopped"]) == ("TERM", True)


def test_who_ignores_term_is_killed_after_the_grace(agent: Agent) -> None:
    agent.python("w:0", f"{IGNORE}; time.sleep(600)")
    said(agent, "w:0")
    began = time.monotonic()
    agent.stop("w:0", grace_s=0.7)
    exited = agent.wait("exited")
    assert (exited["signal"], exited["stopped"]) == ("KILL", True)
    assert not exited["oom"]
    assert 0.6 < time.monotonic() - began < allow_s(10)


def test_no_grace_is_kill_at_once(agent: Agent) -> None:
    agent.python("w:0", f"{IGNORE}; time.sleep(600)")
    said(agent, "w:0")
    agent.stop("w:0", grace_s=0)
    assert agent.wait("exited", timeout_s=20)["signal"] == "KILL"


def test_a_later_stop_shortens_the_grace(agent: Agent) -> None:
    agent.python("w:0", f"{IGNORE}; time.sleep(600)")
    said(agent, "w:0")
    agent.stop("w:0", grace_s=600)
    agent.stop("w:0", grace_s=0)
    assert agent.wait("exited", timeout_s=20)["signal"] == "KILL"


def test_a_stopped_process_hears_it_too(agent: Agent) -> None:
    agent.start("w:0", "sleep", "600")
    pid = agent.wait("started")["pid"]
    os.kill(pid, signal.SIGSTOP)
    agent.stop("w:0", grace_s=8)
    assert agent.wait("exited", timeout_s=20)["signal"] == "TERM"


HANDLE = """
import os, signal, sys, time
def on(number, frame):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], on)
os.write(1, b"up\\n")
while True:
    time.sleep(600)
"""


def test_a_warning_goes_to_who_handles_it(agent: Agent) -> None:
    code = "import subprocess,sys; subprocess.run([sys.executable,'-c',*sys.argv[1:]])"
    agent.start("w:0", PYTHON, "-c", code, HANDLE, "SIGUSR1")
    said(agent, "w:0")
    agent.stop("w:0", signal="USR1", grace_s=600)
    assert said(agent, "w:0", 2) == ["up", "SIGUSR1"]
    agent.stop("w:0", grace_s=0)
    assert agent.wait("exited")["signal"] == "KILL"


def test_who_does_not_handle_a_warning_gets_term(agent: Agent) -> None:
    agent.start("w:0", PYTHON, "-c", HANDLE, "SIGTERM")
    said(agent, "w:0")
    agent.stop("w:0", signal="USR1", grace_s=600)
    assert said(agent, "w:0", 2) == ["up", "SIGTERM"]
    agent.stop("w:0", grace_s=0)
    assert agent.wait("exited")["signal"] == "KILL"


def test_after_a_warning_comes_term(agent: Agent) -> None:
    agent.start("w:0", PYTHON, "-c", HANDLE, "SIGUSR1", "SIGTERM")
    said(agent, "w:0")
    agent.stop("w:0", signal="USR1", grace_s=2)
    assert said(agent, "w:0", 3) == ["up", "SIGUSR1", "SIGTERM"]
    assert agent.wait("exited")["signal"] == "KILL"


def test_each_process_of_the_tree_gets_the_signal_once(agent: Agent) -> None:
    code = (
        "import os,signal,subprocess,sys,time\n"
        "def on(*_):\n"
        "    os.write(1, b'%s INT\\n' % NAME)\n"
        "signal.signal(signal.SIGINT, on)\n"
        "NAME = sys.argv[1].encode()\n"
        "me = ['-u', '-c', CODE]\n"
        "if NAME == b'parent':\n"
        "    run = [sys.executable, '-u', '-c', os.environ['CODE']]\n"
        "    subprocess.Popen([*run, 'child'])\n"
        "    subprocess.Popen([*run, 'session'], start_new_session=True)\n"
        "    subprocess.Popen([*run, 'group'], preexec_fn=os.setpgrp)\n"
        "os.write(1, b'%s up\\n' % NAME)\n"
        "while True: time.sleep(600)\n"
    ).replace("me = ['-u', '-c', CODE]\n", "")
    run = [PYTHON, "-u", "-c", code, "parent"]
    agent.start("w:0", *run, env={"CODE": code})
    said(agent, "w:0", 4)
    agent.stop("w:0", signal="INT", grace_s=600)
    lines = said(agent, "w:0", 8)
    names = ["child", "group", "parent", "session"]
    assert sorted(lines[4:]) == [f"{name} INT" for name in names]
    agent.stop("w:0", signal="INT", grace_s=0.3)
    assert agent.wait("exited")["signal"] == "KILL"
    assert agent.log("w:0").read_text().count("INT") == 4


def test_children_that_end_with_their_parent_are_not_leftovers(agent: Agent) -> None:
    # Like a helper process that waits for the end of its parent's pipe.
    agent.start("w:0", "bash", "-c", "cat < <(sleep 0.05) & exit 0")
    assert agent.wait("exited")["code"] == 0
    assert agent.close() == 0
    assert not [f for f in agent.frames if f["type"] == "swept"]


@pytest.mark.parametrize(
    ("how", "out"),
    [("", "None"), ("", "subprocess.DEVNULL"), ("env={}", "None")],
    ids=["plain", "silent", "no environment"],
)
def test_daemons_of_a_task_go_with_it(agent: Agent, how: str, out: str) -> None:
    code = f"{LEFT_BEHIND}\ndaemon({how}{', ' * bool(how)}out={out})"
    if how:
        code = code.replace('["sleep"', '["/bin/sleep"')
    agent.python("w:0", code)
    exited = agent.wait("exited")
    pid = int(exited["tail"][0])
    assert agent.wait("swept")["count"] == 1
    assert gone(pid)


def test_an_exit_is_reported_though_a_grandchild_holds_the_pipe(agent: Agent) -> None:
    agent.python(
        "w:0",
        "import subprocess,sys\n"
        f"p=subprocess.Popen([sys.executable,'-c',{IGNORE + ';time.sleep(600)'!r}],"
        "stdout=subprocess.PIPE)\n"
        "p.stdout.read(3)\n"  # it ignores TERM by now
        "subprocess.Popen(['sleep','600'])\n"
        "print('bye')\n",
    )
    exited = agent.wait("exited", timeout_s=20)
    assert (exited["code"], exited["tail"]) == (0, ["bye"])
    assert exited["seconds"] < allow_s(10)
    assert agent.wait("swept", timeout_s=20)["count"] == 2


def test_leftovers_of_a_stopped_task_keep_the_grace(agent: Agent) -> None:
    agent.start(
        "w:0",
        "bash",
        "-c",
        "loop() { echo up; while :; do sleep 0.1; done; };"
        "(trap 'sleep 0.8; echo saved; exit' TERM; loop) & trap 'exit 7' TERM; loop",
    )
    said(agent, "w:0", 2)
    agent.stop("w:0", grace_s=8)
    assert agent.wait("exited")["code"] == 7
    eventually(lambda: "saved" in agent.output("w:0"), "the child has saved")
    assert agent.close() == 0
    assert not [f for f in agent.frames if f["type"] == "swept"]


def test_other_tasks_and_foreign_processes_are_left_alone(agent: Agent) -> None:
    agent.start("w:0", "sleep", "601")
    first = agent.wait("started")["pid"]
    agent.python("w:1", f"{LEFT_BEHIND}\ndaemon()\n{SLEEP}")
    agent.wait("started", task="w:1")
    daemon = int(said(agent, "w:1")[0])
    agent.stop("w:0", grace_s=1)
    agent.wait("exited", task="w:0")
    # The daemon of the next attempt is not a leftover of the previous one.
    agent.python("w:0", f"{LEFT_BEHIND}\ndaemon()\n{SLEEP}", attempt=1)
    again = agent.wait("started", task="w:0", attempt=1)["pid"]
    young = int(said(agent, "w:0", 2)[1])
    assert gone(first)
    assert not gone(daemon)
    assert not gone(young)
    agent.stop("w:1", grace_s=1)
    agent.wait("exited", task="w:1")
    eventually(lambda: gone(daemon), "the daemon of w:1 is gone")
    assert not gone(again)
    assert not gone(young)


def test_close_sweeps_whatever_hides(agent: Agent, tmp_path: Path) -> None:
    code = (
        f"{LEFT_BEHIND}\nsys.stdout.flush()\n"
        "null = subprocess.DEVNULL\n"
        "import shutil; sleep = shutil.which('sleep')\n"
        "def hidden():\n"
        "    r, w = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        os.write(w, str(os.getpid()).encode())\n"
        "        for fd in (0, 1, 2): os.close(fd)\n"
        "        os.closerange(3, 100)\n"
        "        os.execve(sleep, ['sleep', '600'], {})\n"
        "    os.wait(); print(os.read(r, 20).decode(), flush=True)\n"
        "hidden(); daemon(); time.sleep(600)\n"
    )
    agent.python("w:0", code)
    pids = [int(line) for line in said(agent, "w:0", 2)]
    assert not any(gone(pid) for pid in pids)
    began = time.monotonic()
    assert agent.close() == 0
    assert time.monotonic() - began < allow_s(15)
    assert all(gone(pid) for pid in pids)
    swept = [f for f in agent.frames if f["type"] == "swept"]
    assert sum(frame["count"] for frame in swept) >= 1
    assert not marked(agent.run)


def test_close_leaves_another_agents_tasks_of_the_run(tmp_path: Path) -> None:
    with Agent(tmp_path / "a") as first:
        with Agent(tmp_path / "b", run=first.run) as second:
            second.start("w:1", "sleep", "600", cwd="/")
            pid = second.wait("started")["pid"]
            assert first.close() == 0
            assert not gone(pid)
            assert second.close() == 0
        assert gone(pid)


def test_a_fresh_agent_sweeps_what_a_dead_one_left(tmp_path: Path) -> None:
    with Agent(tmp_path) as first:
        first.start("w:0", "sh", "-c", "echo up; sleep 600; :")
        pid = first.wait("started")["pid"]
        said(first, "w:0")
        # Stop the guard first, so that it cannot clean up before it is killed as well.
        os.kill(first.process.pid, signal.SIGSTOP)
        os.kill(first.pid, signal.SIGKILL)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        assert not gone(pid)
        with Agent(tmp_path, run=first.run) as second:
            second.send(type="close", grace_s=0)
            assert second.wait("bye")["swept"] == 2
        assert gone(pid)


def test_a_sweeper_waits_for_another_agent(tmp_path: Path) -> None:
    """When the other agent is killed meanwhile, the sweeper ends its processes."""
    with Agent(tmp_path / "a") as first:
        first.start("w:0", "sleep", "600", cwd="/")
        pid = first.wait("started")["pid"]
        with Agent(tmp_path / "b", run=first.run) as second:
            second.send(type="close", grace_s=0, others_s=60)
            with pytest.raises(AssertionError):
                second.wait("bye", timeout_s=0.5)
            assert not gone(pid)
            os.kill(first.process.pid, signal.SIGSTOP)  # so it cannot clean up
            os.kill(first.pid, signal.SIGKILL)
            os.kill(first.process.pid, signal.SIGKILL)
            bye = second.wait("bye")
            assert (bye["swept"], bye["others"]) == (1, False)
        assert gone(pid)


def test_a_sweeper_says_that_another_agent_lives_on(tmp_path: Path) -> None:
    with Agent(tmp_path / "a") as first:
        first.start("w:0", "sleep", "600", cwd="/")
        pid = first.wait("started")["pid"]
        with Agent(tmp_path / "b", run=first.run) as second:
            second.send(type="close", grace_s=0, others_s=0.3)
            bye = second.wait("bye")
            assert (bye["swept"], bye["others"]) == (0, True)
        assert not gone(pid)


@pytest.mark.parametrize("how", ["closed", "killed", "swept"])
def test_folders_of_the_run_are_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Agent(tmp_path / "a") as agent:
        start = f"tfcluster-{os.geteuid()}-{agent.run}"
        kept, other, link = (tmp_path / f"{start}{end}" for end in ("-a", "", "-c"))
        for folder in (kept, other):
            (folder / "b").mkdir(parents=True)
        link.symlink_to(other)
        agent.start("w:0", "sleep", "600")
        agent.wait("started")
        if how == "killed":
            os.kill(agent.pid, signal.SIGKILL)
            agent.process.wait(20)
        elif how == "closed":
            assert agent.close() == 0
        else:
            for pid in (agent.process.pid, agent.pid):  # the guard first
                os.kill(pid, signal.SIGKILL)
            assert kept.exists()
            with Agent(tmp_path / "b", run=agent.run) as sweeper:
                assert sweeper.close() == 0
    assert not kept.exists()
    assert (other / "b").exists()
    assert link.is_symlink()


def test_pids_of_others_are_safe() -> None:
    with subprocess.Popen(["sleep", "600"]) as bystander:
        process = proc.read(bystander.pid)
        assert process is not None
        reused = replace(process, start_time=process.start_time - 1)
        send(reused, signal.SIGKILL)
        send(process, signal.SIGTERM)
        assert bystander.wait(20) == -signal.SIGTERM
        send(process, signal.SIGTERM)


def test_nothing_is_started_while_closing(agent: Agent) -> None:
    agent.python("w:0", f"{IGNORE}; time.sleep(600)")
    said(agent, "w:0")
    agent.send(type="close", grace_s=0.5)
    agent.start("w:1", "true")
    assert "closing" in agent.wait("failed", task="w:1")["cause"]
    assert agent.wait("exited", task="w:0")["signal"] == "KILL"
    agent.wait("bye")


def test_the_oom_killer_is_named(tmp_path: Path, memory_group: Path) -> None:
    limit = next(
        memory_group / name
        for name in ("memory.limit_in_bytes", "memory.max")
        if (memory_group / name).exists()
    )
    limit.write_text(str(100 << 20))
    enter = ["sh", "-c", f'echo $$ >{memory_group}/cgroup.procs; exec "$@"', "sh"]
    with Agent(tmp_path, prefix=enter) as agent:
        agent.start("calm", "sh", "-c", "kill -KILL $$")
        assert not agent.wait("exited", task="calm")["oom"]
        agent.start("hungry", PYTHON, "-c", "x = b'x' * (400 << 20)")
        exited = agent.wait("exited", task="hungry")
        assert (exited["signal"], exited["oom"]) == ("KILL", True)
        agent.start("calm", "sh", "-c", "kill -KILL $$", attempt=1)
        assert not agent.wait("exited", task="calm")["oom"]
        assert agent.close() == 0
