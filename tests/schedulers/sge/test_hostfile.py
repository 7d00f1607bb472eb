"""Parses PE_HOSTFILE as Grid Engine and its descendants write it."""

from __future__ import annotations

import pytest

from tfcluster.base.errors import ConfigError
from tfcluster.schedulers.sge import slots_by_host

READABLE = {
    "as SGE 8.1.9 writes it": (
        "node4.cluster.test 2 all.q@node4.cluster.test UNDEFINED\n"
        "node1.cluster.test 2 all.q@node1.cluster.test UNDEFINED\n"
        "node2.cluster.test 1 all.q@node2.cluster.test UNDEFINED\n",
        {"node4.cluster.test": 2, "node1.cluster.test": 2, "node2.cluster.test": 1},
    ),
    "with cores": (
        "n1 2 all.q@n1 0,1:0,2\nn2 1 all.q@n2 <NULL>\n",
        {"n1": 2, "n2": 1},
    ),
    "three columns": ("n1 4 all.q@n1\nn2 4 all.q@n2\n", {"n1": 4, "n2": 4}),
    "two columns": ("n1 4\n", {"n1": 4}),
    "one host in two queues": (
        "n1 2 short.q@n1 UNDEFINED\nn2 1 short.q@n2\nn1 3 long.q@n1 UNDEFINED",
        {"n1": 5, "n2": 1},
    ),
    "blank lines, tabs, carriage returns": (
        "\n  n1\t2\tall.q@n1\tUNDEFINED\r\n\r\n\nn2 1 all.q@n2 UNDEFINED\n\n",
        {"n1": 2, "n2": 1},
    ),
    "not sorted as text": ("n10 1\nn9 1\nn8 1\n", {"n10": 1, "n9": 1, "n8": 1}),
    "a host without slots": ("n1 0 all.q@n1 UNDEFINED\nn2 1\n", {"n2": 1}),
}


@pytest.mark.parametrize("name", READABLE)
def test_slots_are_read_in_the_files_order(name: str) -> None:
    text, expected = READABLE[name]
    assert list(slots_by_host("file", text).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n1\n", "line 1: 'n1' has too few fields"),
        ("n1 2\nn2 two all.q@n2\n", "line 2: 'n2 two all.q@n2'"),
        ("n1 -1\n", "line 1"),
        ("n1 ²\n", "line 1"),
        ("-nostdin 1 all.q@x UNDEFINED\n", "line 1"),
        ("n1;reboot 1\n", "line 1"),
        ("n1- 1\n", "line 1"),
        ("", "no host"),
        ("\n \n", "no host"),
        ("n1 0\n", "no host"),
    ],
)
def test_what_is_no_host_file_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        slots_by_host("file", text)
