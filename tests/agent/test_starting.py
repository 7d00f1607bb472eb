"""Tests of starting programs: what they inherit, and why they cannot be started."""

from __future__ import annotations

import ast
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import PYTHON, Agent
from tests.kit.time_limits import allow_s
from tfcluster.agent.file_names import raw


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with Agent(tmp_path_factory.mktemp("agent")) as started:
        yield started


def test_hello(agent: Agent) -> None:
    hello = agent.hello
    assert hello["nonce"] == "n-1"
    assert hello["root"] == (os.geteuid() == 0)
    assert hello["cpus"] == len(os.sched_getaffinity(0))
    assert hello["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text()[:-1]
    assert hello["pid"] != agent.process.pid


def test_the_agent_is_small(agent: Agent) -> None:
    for pid in (agent.pid, agent.process.pid):
        status = Path(f"/proc/{pid}/status").read_text()
        line = next(x for x in status.splitlines() if x.startswith("VmRSS"))
        assert int(line.split()[1]) < 40_000


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_exit_codes(agent: Agent, code: int) -> None:
    agent.start(f"exit:{code}", "sh", "-c", f"echo out; echo err >&2; exit {code}")
    started = agent.wait("started", task=f"exit:{code}", attempt=0)
    exited = agent.wait("exited", task=f"exit:{code}")
    assert started["pid"] > 1
    assert exited["code"] == code
    assert exited["signal"] is None
    assert not exited["stopped"]
    assert not exited["oom"]
    assert exited["tail"] == ["out", "err"]
    assert 0 <= exited["seconds"] < allow_s(5)


@pytest.mark.parametrize("name", ["KILL", "SEGV", "ABRT", "TERM"])
def test_signals(agent: Agent, name: str) -> None:
    agent.start(f"die:{name}", "sh", "-c", f"ulimit -c 0; kill -{name} $$")
    exited = agent.wait("exited", task=f"die:{name}")
    assert (exited["code"], exited["signal"]) == (None, name)
    assert not exited["stopped"]


HOSTILE = [
    "",
    " ",
    "a b",
    "'\"`$(touch x)`",
    "line\nbreak\ttab",
    "-n",
    "ü€😀",
    "\udcff\udc80",
    "*",
    "\\",
    "\x01\x1b[31m",
    "\ud800",
]


def test_bytes_of_texts() -> None:
    assert raw("ü\udcff") == b"\xc3\xbc\xff"
    assert raw("\ud800") == b"\xed\xa0\x80"


def test_arguments_and_environment_arrive_as_they_are(agent: Agent) -> None:
    code = (
        "import os,sys; print(sorted(os.environb.items()));"
        "print([os.fsencode(a) for a in sys.argv[1:]])"
    )
    env = {f"X{i} {value}".rstrip("="): value for i, value in enumerate(HOSTILE)}
    argv = [PYTHON, "-c", code, *HOSTILE]
    agent.start("hostile", *argv, env={**env, "HOME": None})
    assert agent.wait("exited", task="hostile")["code"] == 0
    lines = agent.log("hostile").read_text().splitlines()
    got = dict(ast.literal_eval(lines[0]))
    for key, value in env.items():
        assert got[raw(key)] == raw(value)
    assert b"HOME" not in got
    assert got[b"TFCLUSTER_RUN"].decode() == agent.run
    assert got[b"TFCLUSTER_TASK"] == b"hostile"
    assert ast.literal_eval(lines[1]) == [raw(word) for word in HOSTILE]


def test_a_task_starts_clean(agent: Agent) -> None:
    code = (
        "import os,signal,json; print(json.dumps({"
        "'sid': os.getsid(0)==os.getpid(), 'stdin': os.read(0,1).decode(),"
        "'ignored': [s for s in range(1,32) if s not in (9,19)"
        " and signal.getsignal(s)==signal.SIG_IGN],"
        "'blocked': [int(s) for s in signal.pthread_sigmask(0,[])],"
        "'fds': [int(fd) for fd in os.listdir('/proc/self/fd')],"
        "'events': int(os.environ['TFCLUSTER_EVENTS'])}))"
    )
    agent.start("clean", PYTHON, "-I", "-c", code)
    assert agent.wait("exited", task="clean")["code"] == 0
    said = json.loads(agent.log("clean").read_text())
    assert said["sid"]
    assert said["stdin"] == ""
    assert said["blocked"] == []
    more = set(said["fds"]) - {0, 1, 2, said["events"]}
    assert len(more) == 1, "only the folder that was just listed"
    # Python itself ignores SIGPIPE and SIGXFSZ.
    assert set(said["ignored"]) <= {13, 25}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    for name, text, mode in [
        ("plain.txt", "x", 0o644),
        ("noline", "\x01\x02", 0o755),
        ("nointerpreter", "#!/no/such/thing\n", 0o755),
    ]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        (["pyhton", "x"], "'pyhton' not found on PATH"),
        (["./missing"], "'./missing' does not exist"),
        (["./plain.txt"], "'./plain.txt' is not executable"),
        (["./folder"], "'./folder' is a folder"),
        (["./noline"], "'./noline' is not a program (it has no #! line)"),
        (
            ["./nointerpreter"],
            "'./nointerpreter': its interpreter (the #! line) does not exist",
        ),
        ([], "the command is empty"),
        ([""], "the command is empty"),
        (["true", "a\0b"], "cannot be executed: embedded null byte"),
        (
            ["true", "x" * 200_000],
            "the arguments and environment together are too long for this system",
        ),
    ],
)
def test_why_a_program_cannot_be_started(
    agent: Agent, broken: Path, argv: list[str], cause: str
) -> None:
    agent.start("broken", *argv, cwd=str(broken))
    failed = agent.wait("failed", task="broken", attempt=0)
    assert failed["cause"] == cause


@pytest.mark.parametrize(
    ("cwd", "cause"),
    [("gone", "does not exist"), ("plain.txt", "is not a folder")],
)
def test_why_a_workdir_cannot_be_used(
    agent: Agent, broken: Path, cwd: str, cause: str
) -> None:
    agent.start("homeless", "true", cwd=str(broken / cwd))
    failed = agent.wait("failed", task="homeless")
    assert failed["cause"] == f"workdir {broken / cwd} {cause}"


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"A": "\0"}])
def test_an_impossible_environment(agent: Agent, env: dict[str, str]) -> None:
    agent.start("env", "true", env=env)
    assert "cannot be executed" in agent.wait("failed", task="env")["cause"]


def test_the_path_is_the_tasks_own(agent: Agent, tmp_path: Path) -> None:
    (tmp_path / "only-here").write_text("#!/bin/sh\necho found\n")
    (tmp_path / "only-here").chmod(0o755)
    agent.start("path", "only-here", env={"PATH": f"{tmp_path}:/bin:/usr/bin"})
    assert agent.wait("exited", task="path")["tail"] == ["found"]
    agent.start("nopath", "only-here")
    assert "not found" in agent.wait("failed", task="nopath")["cause"]


def test_logs_are_private(agent: Agent) -> None:
    log = agent.folder / "deep" / "er" / "task.log"
    agent.start("private", "umask", log=str(log), env={})
    agent.wait("failed", task="private")
    agent.start("private", "true", log=str(log))
    agent.wait("exited", task="private")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(log.parent.parent.stat().st_mode) == 0o700


def test_a_log_is_never_followed_through_a_link(agent: Agent, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "link").symlink_to(victim)
    agent.start("link", "echo", "x", log=str(tmp_path / "link"))
    assert agent.wait("exited", task="link")["code"] == 0
    assert "symbolic links" in agent.wait("log_error", task="link")["cause"]
    assert victim.read_text() == "mine"


def test_a_restart_appends_after_a_line(agent: Agent) -> None:
    agent.start("again", "printf", "no newline")
    agent.wait("exited", task="again")
    agent.start("again", "echo", "second", attempt=1)
    agent.wait("exited", task="again", attempt=1)
    lines = agent.log("again").read_text().splitlines()
    assert lines[0] == "no newline"
    assert lines[1].startswith("---- attempt 1, 20")
    assert lines[1].endswith("Z ----")
    assert lines[2:] == ["second"]


def test_one_task_of_a_name_at_a_time(agent: Agent) -> None:
    agent.start("twin", "sleep", "60")
    agent.wait("started", task="twin")
    agent.start("twin", "true", attempt=1)
    assert "already running" in agent.wait("failed", task="twin", attempt=1)["cause"]
    agent.stop("twin")
    assert agent.wait("exited", task="twin", attempt=0)["signal"] == "TERM"


def test_a_task_sends_events_and_answers_requests(agent: Agent) -> None:
    agent.python(
        "talker",
        "import os,socket\n"
        "s=socket.socket(fileno=int(os.environ['TFCLUSTER_EVENTS']))\n"
        's.sendall(b\'{"type":"step","step":1}\\nnonsense\\n\')\n'
        "asked=s.recv(100)\n"
        's.sendall(b\'{"type":"stack","text":"%d"}\\n\' % len(asked))\n',
    )
    assert agent.wait("event", task="talker")["event"] == {"type": "step", "step": 1}
    assert "talker" in agent.wait("note")["text"]
    agent.send(type="stacks", tasks=["talker"])
    answer = agent.wait("event", task="talker", attempt=0)["event"]
    assert answer == {"type": "stack", "text": str(len(b'{"type":"stacks"}\n'))}
    # The last messages were delivered before the exit.
    assert agent.wait("exited", task="talker")["code"] == 0


def test_an_event_without_end_costs_the_socket_not_the_agent(agent: Agent) -> None:
    agent.python(
        "babbler",
        "import os,socket\n"
        "s=socket.socket(fileno=int(os.environ['TFCLUSTER_EVENTS']))\n"
        "s.sendall(b'x'*1000000); print('done')\n",
    )
    assert "babbler" in agent.wait("note")["text"]
    assert agent.wait("exited", task="babbler")["tail"] == ["done"]


def test_no_process_can_be_forked(tmp_path: Path, pids_group: Path) -> None:
    enter = ["sh", "-c", f'echo $$ >{pids_group}/cgroup.procs; exec "$@"', "sh"]
    with Agent(tmp_path, prefix=enter) as agent:
        agent.start("first", "sleep", "60")
        agent.wait("started")
        now = (pids_group / "pids.current").read_text()
        (pids_group / "pids.max").write_text(now)
        agent.start("second", "true")
        failed = agent.wait("failed", task="second")
        assert failed["cause"] == "cannot fork (RLIMIT_NPROC or pids.max)"
        assert agent.close() == 0
