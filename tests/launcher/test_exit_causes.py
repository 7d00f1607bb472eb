"""Messages about why tasks ended."""

from __future__ import annotations

import pytest

from tfcluster.launcher.task_messages import (
    cause_of_exit,
    last_words,
    looks_like_victim,
)

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 1, in <module>',
    "    import foo",
    "ModuleNotFoundError: No module named 'foo'",
]


@pytest.mark.parametrize(
    ("code", "signal", "oom", "tail", "expected"),
    [
        (0, None, False, [], None),
        (3, None, False, ["bye"], "exited with code 3"),
        (1, None, False, TRACEBACK, "ModuleNotFoundError: No module named 'foo'"),
        (1, None, False, ["KeyboardInterrupt"], "KeyboardInterrupt"),
        (
            1,
            None,
            False,
            ["keras.src.Oops.ShapeError: no"],
            "keras.src.Oops.ShapeError: no",
        ),
        (1, None, False, ["    ValueError: quoted code"], "exited with code 1"),
        (127, None, False, [], "exited with code 127 (command not found?)"),
        (
            1,
            None,
            False,
            ["OSError: [Errno 98] Address already in use"],
            "address in use: OSError: [Errno 98] Address already in use",
        ),
        (None, "SIGKILL", False, [], "killed by SIGKILL"),
        (
            None,
            "SIGKILL",
            True,
            [],
            "killed by SIGKILL: out of memory (the kernel's OOM killer)",
        ),
        (None, "SIGSEGV", False, [], "crashed with SIGSEGV (segmentation fault)"),
        (
            None,
            "SIGABRT",
            False,
            ["F0000 x.cc:1] Check failed: a == b", "more"],
            "aborted (SIGABRT): F0000 x.cc:1] Check failed: a == b",
        ),
        (None, "SIGRTMIN+3", False, [], "killed by SIGRTMIN+3"),
    ],
)
def test_causes(
    code: int | None,
    signal: str | None,
    oom: bool,
    tail: list[str],
    expected: str | None,
) -> None:
    assert cause_of_exit(code=code, signal=signal, oom=oom, tail=tail) == expected


def test_the_last_exception_counts_not_the_first() -> None:
    assert last_words([*TRACEBACK, "", "RuntimeError: later"]) == "RuntimeError: later"


def test_long_words_are_cut() -> None:
    said = last_words(["ValueError: " + "x" * 1000])
    assert said is not None
    assert len(said) == 300


@pytest.mark.parametrize(
    ("cause", "tail", "victim"),
    [
        ("PeerLostError: worker:1 has left", [], True),
        (None, ["tensorflow.errors_impl.UnavailableError: Socket closed"], True),
        ("ValueError: no", TRACEBACK, False),
        (None, [], False),
    ],
)
def test_victims(cause: str | None, tail: list[str], victim: bool) -> None:
    assert looks_like_victim(cause, tail) is victim
