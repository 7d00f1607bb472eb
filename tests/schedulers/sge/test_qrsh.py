"""qrsh as the channel to a remote process, with a short script in place of qrsh."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.time_limits import allow_s
from tests.plan.descriptions import describe
from tfcluster.base.errors import StartError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.plan.model import Host, TaskGroup
from tfcluster.schedulers.job_hosts import parse_gpus
from tfcluster.schedulers.process_channel import ProcessChannel
from tfcluster.schedulers.sge import GPU_VARIABLES, SCHEDULER, ask_gpus
from tfcluster.schedulers.sge.queue import qrsh_argv, shielded, start_process

# Like the real qrsh: words are joined with spaces, and the user's shell parses them.
QRSH = """\
#!/bin/sh
[ "$1" = -inherit ] || exit 99
case "$2" in
refuses) echo "error: executing task of job 12 failed: execution daemon on host \
\\"refuses\\" didn't accept task" >&2; exit 1 ;;
hangs) exec sleep 600 ;;
esac
shift 2
exec /bin/sh -c "$*"
"""


@pytest.fixture
def qrsh(tmp_path: Path) -> str:
    program = tmp_path / "qrsh"
    program.write_text(QRSH)
    program.chmod(0o755)
    return str(program)


Start = Callable[[str, tuple[str, ...]], ProcessChannel]


def end(channel: ProcessChannel) -> None:
    """Close what a launcher leaves open until its own end."""
    channel.kill()
    assert channel._process.stdout is not None
    channel._process.stdout.close()
    channel._stderr.close()


@pytest.fixture
def start(qrsh: str) -> Iterator[Start]:
    """Starts commands on a host through qrsh; all of them are ended after the test."""
    started: list[ProcessChannel] = []

    def begin(host: str, argv: tuple[str, ...]) -> ProcessChannel:
        started.append(start_process(host, qrsh_argv(qrsh, host, argv), 20.0))
        return started[-1]

    yield begin
    for channel in started:
        end(channel)


def read_all(channel: ProcessChannel) -> bytes:
    found = b""
    while data := channel.read():
        found += data
    return found


@pytest.mark.parametrize(
    "word", ["a b", "'", '"', "$HOME", "`id`", "a;b", "\\", "*", "(x)", "", "é\n#"]
)
def test_words_arrive_as_they_are(start: Start, word: str) -> None:
    argv = (sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", word, "end")
    channel = start("node1", argv)
    assert read_all(channel).decode() == f"{[word, 'end']!a}\n"
    channel.close()


def test_bytes_go_both_ways_and_the_end_is_passed_on(start: Start) -> None:
    channel = start("node1", ("/bin/cat",))
    data = bytes(range(256)) * 64
    channel.write(data)
    channel.close()
    assert read_all(channel) == data
    assert channel.diagnosis() == "exit status 0"


def test_a_refusal_is_explained(start: Start) -> None:
    with pytest.raises(StartError, match="control_slaves TRUE") as caught:
        start("refuses", ("true",))
    assert "didn't accept task" in caught.value.message


def test_one_that_never_begins_is_given_up(qrsh: str) -> None:
    began = time.monotonic()
    with pytest.raises(StartError, match="started nothing there"):
        start_process("hangs", qrsh_argv(qrsh, "hangs", ("true",)), 0.2)
    assert time.monotonic() - began < allow_s(20)


def test_an_agent_is_started_and_answers(qrsh: str, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("elsewhere.test 1\n")
    env = {
        "JOB_ID": "12",
        "SGE_TASK_ID": "undefined",
        "PE_HOSTFILE": str(hostfile),
        "PATH": str(Path(qrsh).parent),
    }
    description = describe({"worker": 1}, python=sys.executable)
    starter = SCHEDULER.starter(description, env)
    channel = starter.start_agent(Host(name="elsewhere.test", address="elsewhere.test"))
    assert isinstance(channel, ProcessChannel)
    channel.close()
    assert b'"type"' in read_all(channel), "it speaks in frames"
    assert channel.diagnosis().startswith("exit status 10")
    end(channel)


def test_hosts_are_asked_for_gpus_only_where_tasks_want_some(
    qrsh: str, tmp_path: Path
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1.test 2\nnode2.test 2\n")
    env = {
        "JOB_ID": "12",
        "SGE_TASK_ID": "undefined",
        "PE_HOSTFILE": str(hostfile),
        "HOSTNAME": "node1.test",
        "PATH": f"{Path(qrsh).parent}:/bin:/usr/bin",
        "SGE_HGR_gpu": "0 3",
    }
    unasked = SCHEDULER.allocate(describe({"worker": 4}), env)
    assert [host.gpus for host in unasked.hosts] == [("0", "3"), None]
    wanting = describe({"worker": TaskGroup(count=4, gpus=1)})
    asked = SCHEDULER.allocate(wanting, env)
    assert [host.gpus for host in asked.hosts] == [("0", "3"), ("0", "3")]


def test_a_host_that_cannot_be_asked_is_named(qrsh: str) -> None:
    with pytest.raises(StartError, match=r"^refuses: .*control_slaves TRUE"):
        ask_gpus(qrsh, ["refuses"], {"PATH": "/bin:/usr/bin"})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("tfcluster-gpus 1,2|unset|unset|unset\n", ("1", "2")),
        ("motd\n\ntfcluster-gpus unset|0 1|unset|unset\n", ("0", "1")),
        ("tfcluster-gpus unset|unset|unset|unset\n", None),
        ("tfcluster-gpus |unset|unset|unset\n", ()),
    ],
)
def test_what_a_host_says_of_its_gpus(
    said: str, expected: tuple[str, ...] | None
) -> None:
    assert parse_gpus("node2", said, GPU_VARIABLES) == expected


def test_a_host_that_says_something_else_is_named() -> None:
    with pytest.raises(StartError, match=r"^node2: "):
        parse_gpus("node2", "welcome\n")


IGNORES = "import signal; print(signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN)"


@pytest.mark.parametrize("here", [True, False])
def test_warnings_for_all_do_not_end_what_knows_nothing_of_them(
    qrsh: str, here: bool
) -> None:
    program = (sys.executable, "-c", IGNORES)
    argv = shielded(program) if here else qrsh_argv(qrsh, "node1", program)
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


SPAWN = """\
import os, signal, socket, sys
from tfcluster.agent.spawn import SpawnedProgram, spawn
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)  # the agent's own handlers
ours, theirs = socket.socketpair()
program = SpawnedProgram((sys.executable, "-c", sys.argv[1]), os.environb, "/")
os.waitpid(spawn(program, 1, theirs.fileno()), 0)
"""


@pytest.mark.parametrize(("trap", "ignored"), [('trap "" USR2; ', True), ("", False)])
def test_what_the_agent_ignored_from_the_start_its_tasks_ignore(
    trap: str, ignored: bool
) -> None:
    argv = shlex.join([sys.executable, "-c", SPAWN, IGNORES])
    done = subprocess.run(
        ["/bin/sh", "-c", f"{trap}exec {argv}"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
        check=True,
    )
    assert done.stdout.strip() == str(ignored)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL, "else this shows nothing"
