"""Tests of steps, stalls, and which rank waits for which, with simulated time."""

from __future__ import annotations

from tests.protocol.kinds import example
from tfcluster.base.task_id import TaskId
from tfcluster.launcher.progress import Progress, blame
from tfcluster.protocol.messages import Exited, Gpu, Usage
from tfcluster.protocol.task_events import EpochPosition, Stack, Step, Waiting

CHIEF, W0, W1 = TaskId("chief", 0), TaskId("worker", 0), TaskId("worker", 1)
RANKS = {0: CHIEF, 1: W0, 2: W1}


def used(cpu_s: float) -> Usage:
    return Usage("worker:0", 0, 1, cpu_s, 1, ())


def at_step(step: int) -> Step:
    return Step(step, None, None, None, None)


def test_a_task_without_a_step_for_too_long_is_stalled() -> None:
    progress = Progress(60.0)
    progress.started(W0, 0.0, reports=True)
    progress.step(W0, at_step(1), 50.0)
    assert progress.stalled(109.0) == ()
    assert progress.stalled(111.0) == (W0,)


def test_saying_the_same_step_again_is_no_progress() -> None:
    progress = Progress(60.0)
    progress.started(W0, 0.0, reports=True)
    for now in (10.0, 40.0, 65.0):
        progress.step(W0, at_step(7), now)
    assert progress.stalled(71.0) == (W0,)


def test_a_program_that_never_reports_steps_is_not_watched() -> None:
    progress = Progress(60.0)
    progress.started(W0, 0.0, reports=False)
    assert progress.stalled(1e6) == ()
    progress.step(W0, at_step(1), 5.0)
    assert progress.stalled(66.0) == (W0,)


def test_a_program_whose_steps_nobody_counts_is_watched_by_its_cpu_time() -> None:
    progress = Progress(60.0)
    progress.started(W0, 0.0, reports=True)
    progress.uses(W0, used(40.0))
    assert progress.stalled(61.0) == ()
    progress.uses(W0, used(100.0))
    assert progress.stalled(122.0) == ()
    progress.uses(W0, used(100.2))  # of threads that wait
    assert progress.stalled(183.0) == ()  # One measurement may be too old.
    progress.uses(W0, used(100.3))
    assert progress.stalled(181.0) == ()
    assert progress.stalled(183.0) == (W0,)


def test_a_program_that_has_made_a_step_is_not_watched_by_its_cpu_time() -> None:
    progress = Progress(60.0)
    progress.started(W0, 0.0, reports=True)
    progress.step(W0, at_step(1), 50.0)
    progress.uses(W0, used(100.0))
    assert progress.stalled(111.0) == (W0,)


def test_ended_tasks_and_new_attempts_begin_anew() -> None:
    progress = Progress(60.0)
    progress.started(W0, 0.0, reports=True)
    progress.ended(W0)
    assert progress.stalled(1e6) == ()
    progress.started(W0, 1e6, reports=True)
    assert progress.stalled(1e6 + 59) == ()


def test_without_a_timeout_nothing_stalls() -> None:
    progress = Progress(None)
    progress.started(W0, 0.0, reports=True)
    assert progress.stalled(1e9) == ()


def test_what_tasks_report_and_use_is_one_record() -> None:
    progress = Progress(None)
    progress.started(W0, 0.0, reports=True, attempt=1)
    where = EpochPosition(3, 12, 17, None, {"loss": 0.5, "nan": None})
    progress.step(W0, Step(9, None, 0.25, None, where), 1.0)
    gpu = Gpu(0, "GPU-a", 0.5, None, None)
    progress.uses(W0, Usage("worker:0", 1, 70, 2.0, 4, (gpu,)))
    progress.uses(W0, used(9.0))
    exited = example(Exited, attempt=1, cpu_s=1.5, max_rss_bytes=80)
    progress.uses(W0, exited)
    assert progress.snapshot() == {
        "worker:0": {
            "step": 9,
            "epoch": 3,
            "epochs": 12,
            "epoch_step": 17,
            "wait_share": 0.25,
            "metrics": {"loss": 0.5, "nan": None},
            "rss_bytes": 70,
            "max_rss_bytes": 80,
            "cpu_s": 2.0,
            "processes": 4,
            "gpus": [{"gpu": 0, "busy": 0.5}],
        }
    }
    assert progress.attempts() == {"worker:0": 1}
    assert progress.last_step(W0) == 9


def test_blame_falls_on_whom_the_others_wait_for() -> None:
    waiting = Waiting(60, "exchange 57", (2,))
    answers = {
        CHIEF: Stack("", waiting),
        W0: Stack("", waiting),
        W1: Stack("File a\nsleep()", None),
    }
    found = blame((CHIEF, W0, W1), answers, RANKS, 60.0)
    assert found.cause == "no step for 60 s: chief:0, worker:0 wait for worker:1"
    assert found.tail == ("worker:1 is here:", "File a", "sleep()")


def test_blame_follows_a_ring_to_the_one_that_does_not_wait() -> None:
    answers = {
        CHIEF: Stack("", Waiting(1.0, "", (2,))),
        W1: Stack("", Waiting(1.0, "", (1,))),
        W0: Stack("", None),
    }
    text = blame((CHIEF, W0, W1), answers, RANKS, 60.0).cause
    assert text.endswith("chief:0, worker:1 wait for worker:0")


def test_blame_says_who_did_not_answer() -> None:
    answers = {CHIEF: Stack("", Waiting(1.0, "exchange 3"))}
    text = blame((CHIEF, W0), answers, RANKS, 5.0).cause
    assert text.startswith("no step for 5 s: chief:0 wait for worker:0")
    assert "worker:0 did not answer" in text


def test_blame_names_tasks_in_rank_order_whoever_answers_first() -> None:
    waiting = Stack("", Waiting(1.0, "", (2,)))
    answers = {W0: waiting, W1: Stack("", None), CHIEF: waiting}
    found = blame([CHIEF, W0, W1], answers, RANKS, 5.0)
    assert found.cause == "no step for 5 s: chief:0, worker:0 wait for worker:1"
