"""Parsing what the qmaster says about the own job, and the resulting answers."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.plan.descriptions import describe
from tfcluster.base.errors import ExitCode
from tfcluster.plan.model import Description
from tfcluster.schedulers.sge import SCHEDULER
from tfcluster.schedulers.sge.queue import JobFacts, parse_job, parse_notice

# The answer of 8.1.9, without fields that are not read.
JOB = """\
<?xml version='1.0'?>
<detailed_job_info>
  <djob_info><element>
    <JB_job_number>12</JB_job_number>
    <JB_notify>{notify}</JB_notify>
    <JB_hard_resource_list>
      <qstat_l_requests>
        <CE_name>h_rt</CE_name><CE_stringval>0:1:0</CE_stringval>
        <CE_doubleval>{limit_s}</CE_doubleval>
      </qstat_l_requests>
      <qstat_l_requests>
        <CE_name>mem_free</CE_name><CE_doubleval>1.0</CE_doubleval>
      </qstat_l_requests>
    </JB_hard_resource_list>
    <JB_ja_tasks><ulong_sublist>
      <JAT_status>{status}</JAT_status><JAT_start_time>{began}</JAT_start_time>
    </ulong_sublist></JB_ja_tasks>
  </element></djob_info>
</detailed_job_info>
"""


def said_of(
    *, began: int, notify: str = "true", status: int = 128, limit_s: float = 60.0
) -> str:
    return JOB.format(notify=notify, began=began, status=status, limit_s=limit_s)


def test_a_job_with_a_limit() -> None:
    job = parse_job(said_of(began=1000))
    assert job == JobFacts(notify=True, began_s=1000.0, limits_s={"h_rt": 60.0})
    assert not job.is_over_time(1050)
    assert job.is_over_time(1059)


@pytest.mark.parametrize("said", ["", "<x", "<unknown_jobs><ST_name>1</ST_name>"])
def test_no_answer(said: str) -> None:
    assert parse_job(said) is None


def test_a_job_without_limit_or_begin_is_never_over_time() -> None:
    assert not JobFacts(notify=True, began_s=1.0, limits_s={}).is_over_time(1e12)
    unknown = JobFacts(notify=True, began_s=0.0, limits_s={"h_rt": 60.0})
    assert not unknown.is_over_time(1e12)


@pytest.mark.parametrize(
    ("said", "notice_s"),
    [
        ("qname all.q\nnotify                00:00:60\nowner_list NONE\n", 60.0),
        ("notify 0:1:30\n", 90.0),
        ("notify 45\n", 45.0),
        ("notify 00:00:60,[node1=00:00:20],[node2=00:02:00]\n", 20.0),
        ("notify 00:00:60,[node1=00:01:20], \\\n   [node2=00:00:10]\n", 10.0),
        ("", None),
    ],
)
def test_the_queues_notice(said: str, notice_s: float | None) -> None:
    assert parse_notice(said) == notice_s


def fake(folder: Path, name: str, says: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{says}END\n")
    program.chmod(0o755)


def test_grace_is_what_the_queue_leaves_after_its_notice(tmp_path: Path) -> None:
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin", "JOB_ID": "12", "QUEUE": "all.q"}
    assert SCHEDULER.longest_grace_s(env) is None, "nobody says"
    fake(tmp_path, "qconf", "notify 00:00:60\n")
    fake(tmp_path, "qstat", said_of(began=1000))
    assert SCHEDULER.longest_grace_s(env) == 55.0
    fake(tmp_path, "qstat", said_of(notify="false", began=1000))
    assert SCHEDULER.longest_grace_s(env) is None, "it is not told at all"


def test_the_time_limit_is_distinguished_from_qdel(tmp_path: Path) -> None:
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin", "JOB_ID": "12"}
    fake(tmp_path, "qstat", said_of(began=1000))
    assert SCHEDULER.why_ending(env) is ExitCode.TIME_LIMIT
    ours = int(psutil.Process().create_time())
    fake(tmp_path, "qstat", said_of(began=ours, limit_s=time.time() - ours + 60))
    assert SCHEDULER.why_ending(env) is None


@pytest.mark.parametrize(
    ("status", "began"),
    [(0, 0), (512, 9_999_999_999), (128, 9_999_999_999)],
    ids=["waits", "begins again", "runs again"],
)
def test_a_rescheduled_job_is_distinguished_from_qdel(
    tmp_path: Path, status: int, began: int
) -> None:
    env = {"PATH": f"{tmp_path}:/bin:/usr/bin", "JOB_ID": "12"}
    fake(tmp_path, "qstat", said_of(began=began, status=status))
    assert SCHEDULER.why_ending(env) is ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("variables", "index"),
    [({"SGE_TASK_ID": "undefined"}, None), ({"SGE_TASK_ID": "3"}, "3"), ({}, None)],
)
def test_elements_of_an_array_count_from_one(
    variables: dict[str, str], index: str | None
) -> None:
    assert SCHEDULER.array_index(variables) == index


def described(**sge: Any) -> Description:
    return describe({"worker": 1}, sge=sge)


def test_usr1_is_the_word_of_a_soft_limit_or_of_a_suspension() -> None:
    suspension = frozenset({signal.SIGUSR1})
    assert SCHEDULER.harmless_signals(described()) == suspension
    hard = described(resources={"h_rt": "60"})
    assert SCHEDULER.harmless_signals(hard) == suspension
    soft = described(resources={"s_rt": "60"})
    assert SCHEDULER.harmless_signals(soft) == frozenset()
    option = described(options=("-l", "s_rt=0:1:0"))
    assert SCHEDULER.harmless_signals(option) == frozenset()
