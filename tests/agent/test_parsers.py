from __future__ import annotations

import os
import signal

import pytest

from tfcluster.agent import proc
from tfcluster.agent.children import oom_kills
from tfcluster.agent.host_network import candidates, parse_reserved, shuffled
from tfcluster.agent.proc import ProcessEntry
from tfcluster.agent.signals import signal_name, signal_number
from tfcluster.agent.sweep import belongings
from tfcluster.agent.task import Identity, members
from tfcluster.agent.tcp_sockets import Listener, parse
from tfcluster.protocol.frames import ProtocolError

STAT = b"4711 (a) b\n (c) S 12 13 14 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 99887 1 2\n"
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 00000000:9C42 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000 0 123
   1: 0100007F:9C43 00000000:0000 01 00000000:00000000 00:00000000 00000000  1000 0 124
   2: 00000000000000000000000000000000:9C44 00000000000000000000000000000000:0000 0A \
00000000:00000000 00:00000000 00000000     0        0 125 1
"""


def process(pid: int, ppid: int, session: int = 0, state: str = "S") -> ProcessEntry:
    session = session or pid
    return ProcessEntry(pid, f"p{pid}", state, ppid, session, session, 7)


def table(*processes: ProcessEntry) -> dict[int, ProcessEntry]:
    return {p.pid: p for p in processes}


def test_stat_of_a_name_with_parentheses_and_newlines() -> None:
    parsed = proc.parse_stat(STAT)
    assert parsed == ProcessEntry(
        4711, "a) b\n (c", "S", 12, 13, 14, 99887, 8192, parsed.cpu_s
    )


def test_our_own_stat() -> None:
    me = proc.read(os.getpid())
    assert me is not None
    assert (me.ppid, me.session) == (os.getppid(), os.getsid(0))


def test_environ_of_anything() -> None:
    data = b"A=1\0B=x=y\0junk\0\0=odd\0\xff=\xfe"
    expected = {"A": "1", "B": "x=y", "junk": "", "": "odd", "\udcff": "\udcfe"}
    assert proc.parse_environ(data) == expected


def test_listeners_of_both_families() -> None:
    found = list(parse(TCP.splitlines()))
    assert found == [Listener(40002, 1000, 123), Listener(40004, 0, 125)]


def test_a_family_is_roots_sessions_and_their_descendants() -> None:
    tree = table(
        process(1, 0), process(5, 1), process(6, 5), process(7, 6), process(8, 1, 5)
    )
    assert proc.family(tree, [6]) == {6, 7}
    assert proc.family(tree, [], [5]) == {5, 6, 7, 8}
    assert proc.family(tree, [99]) == set()
    assert proc.ancestors(tree, 7) == {7, 6, 5, 1}


def identity(leader: int | None, *, waited_for: bool = False) -> Identity:
    return Identity("w:0", 1, leader, "pipe:[5]", waited_for)


def member_pids(
    tree: dict[int, ProcessEntry],
    who: Identity,
    environs: dict[int, dict[str, str]] | None = None,
    holders: dict[int, dict[int, str]] | None = None,
    others: tuple[int, ...] = (),
) -> set[int]:
    environs, holders = environs or {}, holders or {}
    found = members(
        tree,
        10,
        who,
        others,
        lambda pid: environs.get(pid, {}),
        lambda pid: holders.get(pid, {}),
    )
    return {p.pid for p in found}


def test_members_are_the_tree_the_session_and_orphans_that_say_so() -> None:
    tree = table(
        process(1, 0),
        process(10, 1),
        process(20, 10),
        process(21, 20, 21),
        process(30, 10, 20),
        process(40, 10),
        process(41, 40),
        process(50, 10),
        process(60, 10),
        process(70, 10),
        process(71, 20, 20, "Z"),
    )
    mine = {"TFCLUSTER_TASK": "w:0", "TFCLUSTER_ATTEMPT": "1"}
    environs = {40: mine, 50: {**mine, "TFCLUSTER_ATTEMPT": "0"}}
    holders = {60: {1: "pipe:[5]"}, 70: {1: "pipe:[6]"}}
    found = member_pids(tree, identity(20), environs, holders)
    assert found == {20, 21, 30, 40, 41, 60}


def test_a_foreign_process_with_a_reused_pid_is_not_a_member() -> None:
    foreign = table(process(1, 0), process(10, 1), process(20, 1), process(21, 20, 20))
    assert member_pids(foreign, identity(20, waited_for=True)) == set()
    ours = table(process(1, 0), process(10, 1), process(20, 10), process(21, 20, 20))
    assert member_pids(ours, identity(20, waited_for=True), others=(20,)) == set()


def test_what_belongs_to_a_run() -> None:
    agent = os.getpid()
    run = {"TFCLUSTER_RUN": "r"}
    tree = table(
        process(1, 0),
        process(agent, 1),
        process(20, agent),
        process(21, 20, state="Z"),
        process(30, 1),
        process(31, 1),
        process(32, 1),
        process(40, 1),
    )
    environs = {
        30: {**run, "TFCLUSTER_AGENT": "40:7"},  # its agent is alive
        31: {**run, "TFCLUSTER_AGENT": "40:6"},  # its agent's pid was reused
        32: {"TFCLUSTER_RUN": "r2"},
    }
    # Whether a process has our uid is looked up in /proc, so the result depends on
    # whether pid 31 exists.
    found = belongings(tree, "r", agent, lambda pid: environs.get(pid, {}))
    assert {p.pid for p in found} - {31} == {20}


def test_where_the_oom_counter_stands() -> None:
    assert oom_kills("low 0\noom 2\noom_kill 3\n") == 3
    assert oom_kills("oom_kill_disable 0\n") is None


def test_ports_outside_the_ephemeral_range_first() -> None:
    assert parse_reserved("25000,25002-25004\n") == {25000, 25002, 25003, 25004}
    assert parse_reserved("\n") == set()
    ports = candidates((32768, 60999), {25000})
    assert min(ports) == 20000
    assert max(ports) == 65535
    assert not any(32768 <= port <= 60999 or port == 25000 for port in ports)
    assert len(candidates((1024, 65535), set())) == 65536 - 20000


def test_shuffled_is_each_port_once() -> None:
    ports = list(range(100))
    orders = [list(shuffled(ports)) for _ in range(3)]
    assert all(sorted(order) == ports for order in orders)
    assert orders[0] != orders[1] or orders[1] != orders[2]


def test_signal_names() -> None:
    assert signal_name(9) == "KILL"
    assert signal_name(signal.SIGRTMIN + 1) == "RTMIN+1"


def test_an_unknown_signal() -> None:
    assert signal_number("INT") == signal.SIGINT
    with pytest.raises(ProtocolError, match="'TREM'"):
        signal_number("TREM")
