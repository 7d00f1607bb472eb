from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.time_limits import allow_s
from tfcluster.plan.host_patterns import (
    HostlistError,
    expand,
    fold,
    host_name_problem,
    split,
)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-04,7]", ["node01", "node02", "node03", "node04", "node7"]),
        ("gpu[008-011]", ["gpu008", "gpu009", "gpu010", "gpu011"]),
        ("node[8-11]", ["node8", "node9", "node10", "node11"]),
        ("node[1-2]-ib", ["node1-ib", "node2-ib"]),
        ("a-[1-2],b", ["a-1", "a-2", "b"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("b,a", ["b", "a"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
        ("a, b", ["a", "b"]),
        ("a,b,", ["a", "b"]),
        ("[1-3]", ["1", "2", "3"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("n[1-1]", ["n1"]),
        ("[::1]", ["::1"]),
        ("[fe80::1%eth0],a", ["fe80::1%eth0", "a"]),
        ("node[1-2].example.org", ["node1.example.org", "node2.example.org"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


def test_expand_keeps_every_node_of_a_many_dimensional_list() -> None:
    names = expand("r[1-2]n[1-4]")
    assert names == [f"r{rack}n{node}" for rack in (1, 2) for node in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("node[1-3", 5, "']' is missing"),
        ("a,node[1-3", 7, "']' is missing"),
        ("node1-3]", 8, "']' without '['"),
        ("node[3-1]", 6, "range 3-1 is reversed"),
        ("node[1-2,9-4]", 10, "range 9-4 is reversed"),
        ("n[1-1000000000]", 1, "expands to 1000000000 hosts (limit 10000)"),
        ("a[1-1000]b[1-1000]", 1, "expands to 1000000 hosts"),
        ("n[1-999999999999999999]", 1, "expands to 999999999999999999 hosts"),
        ("n[1-9999999999999999999999]", 3, "not a number or a range"),
        ("", 1, "no host"),
        (" ", 1, "no host"),
        (",a", 1, "empty item"),
        ("a,,b", 3, "empty item"),
        ("a,b,,", 5, "empty item"),
        ("n[]", 3, "empty item"),
        ("n[1,,2]", 5, "empty item"),
        ("n[[1-2]]", 3, "brackets inside brackets"),
        ("n[a-b]", 3, "'a-b' is not a number"),
        ("n[1-]", 3, "'1-' is not a number"),
        ("n[-1]", 3, "'-1' is not a number"),
        ("[::1:22", 1, 'write IPv6 as "[::1]"'),
        ("::1:22", 1, 'write IPv6 as "[::1]"'),
        ("a,[::1]x", 3, 'write IPv6 as "[::1]"'),
        ("[::g]", 1, 'write IPv6 as "[::1]"'),
        ("a:22", 1, "not a host name"),
        ("x" * 254, 1, "longer than 253"),
        ("y," + "x" * 250 + "[1-1000]", 3, "longer than 253"),
    ],
)
def test_expand_refuses(text: str, column: int, words: str) -> None:
    with pytest.raises(HostlistError) as caught:
        expand(text)
    assert words in caught.value.message
    assert caught.value.column == column


def test_the_limit_is_found_before_expanding() -> None:
    began = time.perf_counter()
    with pytest.raises(HostlistError):
        expand("n[1-99999999][1-99999999][1-99999999]")
    assert time.perf_counter() - began < allow_s(1)


def test_limit_counts_all_items() -> None:
    assert len(expand("a[1-3],b[1-2]", limit=5)) == 5
    with pytest.raises(HostlistError):
        expand("a[1-3],b[1-2]", limit=4)


def test_split_keeps_brackets_and_columns() -> None:
    assert split("a[1,2]:4, b") == [("a[1,2]:4", 1), ("b", 11)]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["node01", "node02", "node03", "node04", "node7"], "node[01-04,7]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n1-ib", "n2-ib", "x"], "n[1-2]-ib,x"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r1n[1-2],r2n[1-2]"),
        (["n2", "n1"], "n[2,1]"),
        (["n1", "n1"], "n1,n1"),
        (["::1", "::2"], "[::1],[::2]"),
        (["n1.a2.org", "n2.a2.org"], "n[1-2].a2.org"),
    ],
)
def test_fold(names: list[str], text: str) -> None:
    assert fold(names) == text


_names = st.lists(
    st.one_of(
        st.from_regex(
            r"[a-c]{0,2}[0-9]{1,3}(-[ab])?(\.[ab][0-9]{1,20})?", fullmatch=True
        ),
        st.ip_addresses(v=6).map(str),
    ),
    min_size=1,
    max_size=30,
)


@given(_names)
def test_fold_is_the_inverse_of_expand(names: list[str]) -> None:
    assert expand(fold(names)) == names


@given(st.text(alphabet="a1-09,[]: .", max_size=30))
def test_any_text_expands_or_is_refused_with_a_column(text: str) -> None:
    column = 1
    try:
        expand(text, limit=100)
    except HostlistError as error:
        column = error.column
    assert 1 <= column <= len(text) + 1


@pytest.mark.parametrize(
    "name",
    [
        "localhost",
        "node-1.example.org",
        "node1.example.org.",
        "my_host",
        "1e3",
        "10.9.0.1",
        "::1",
        "fe80::1%eth0",
        "a" * 63,
    ],
)
def test_host_names(name: str) -> None:
    assert host_name_problem(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-oProxyCommand=touch X",
        "-a",
        "a-",
        "a b",
        "a;b",
        "$(reboot)",
        "`id`",
        "a\n",
        "a\nb",
        "a\x00",
        "a..b",
        ".a",
        "user@host",
        "a:22",
        "[::1]",
        "::1%$(id)",
        "10.9.0",
        "10.9.0.256",
        "a" * 64,
        ".".join(["a" * 60] * 5),
        "käse",
        "a/b",
        "a,b",
        "n[1-2]",
        "\u0661",
    ],
)
def test_what_is_not_a_host_name(name: str) -> None:
    assert host_name_problem(name) is not None
