"""Tests of which task output is shown: warnings once, follow-up errors in one line."""

from __future__ import annotations

import pytest

from tfcluster.console.line_folding import Echo

CUDA = (
    "E0000 00:00:1795394395.891576   23924 cuda_platform.cc:52] failed call to cuInit: "
    "INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)"
)
LOST = "PeerLostError: rank 1 has left: its program has ended: ValueError: bad shard"
DUMP = [
    f"W0000 00:00:1795394435.953519   24796 op_kernel.cc:1845] UNKNOWN: {LOST}",
    "Traceback (most recent call last):",
    "",
    '  File "group.py", line 118, in exchange',
    "    yield Turn(self._transport)",
    "",
    "tfcluster.runtime.errors.PeerLostError: rank 1 has left",
    "",
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    "",
    '  File "script_ops.py", line 269, in __call__',
    "",
    "tfcluster.runtime.errors.PeerLostError: rank 1 has left",
    "",
    "\t [[{{function_node __inference_one_step_on_data_606}}{{node PyFunc}}]]",
]
ABSL = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to "
    "STDERR"
)
OWN = [
    "Traceback (most recent call last):",
    '  File "train.py", line 10, in <module>',
    "    model.fit(x, y)",
    "tfcluster.runtime.errors.CollectiveError: a sum",
]
WARNING = [
    "/venv/keras/data.py:164: UserWarning: no __len__",
    "  warnings.warn(",
]


@pytest.mark.parametrize(
    ("gpus", "shown"), [(False, False), (True, True), (None, True)]
)
def test_the_search_for_gpus_is_news_only_where_there_are_any(
    gpus: bool | None, shown: bool
) -> None:
    assert bool(Echo(lambda _: gpus).chosen("worker:0", [CUDA])) is shown


def test_of_a_victim_one_line_is_shown() -> None:
    lines = ["Epoch 2/3", *DUMP, DUMP[0], *DUMP[1:], LOST]
    assert Echo(lambda _: None).chosen("worker:0", lines) == ["Epoch 2/3", LOST]


def test_it_matters_not_how_lines_arrive() -> None:
    echo = Echo(lambda _: None)
    shown = [
        line
        for each in [*DUMP, *OWN, "after it"]
        for line in echo.chosen("worker:0", [each])
    ]
    assert shown == [*OWN, "after it"]


def test_what_a_program_prints_itself_is_shown() -> None:
    said = ["Traceback (most recent call last):", "", "  mine", "", LOST, "saving"]
    echo = Echo(lambda _: False)
    assert echo.chosen("worker:0", said) == said
    assert echo.chosen("worker:1", [*DUMP, "saving", "", *OWN]) == ["saving", "", *OWN]


def test_what_a_library_says_of_its_own_log_is_left_out() -> None:
    assert Echo(lambda _: True).chosen("worker:0", [ABSL, "a"]) == ["a"]


def test_everything_is_shown_where_somebody_looks_for_an_error() -> None:
    lines = [ABSL, CUDA, *DUMP, *WARNING]
    echo = Echo(lambda _: False, everything=True)
    assert echo.chosen("worker:0", lines) == lines
