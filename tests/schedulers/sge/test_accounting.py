"""Parses qacct's answers about jobs that have ended, as of Grid Engine 8.1.9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcluster.record.paths import RunPaths
from tfcluster.schedulers.base import CommandAnswer, JobPhase
from tfcluster.schedulers.sge.queue import verdict
from tfcluster.submit.job import QueuedJob
from tfcluster.submit.job_status import ask_state, ended

RULE = "=" * 62


def record(failed: str, exit_status: str, wallclock: str, host: str = "node1") -> str:
    return (
        f"{RULE}\n"
        "qname        all.q               \n"
        f"hostname     {host}.cluster.test  \n"
        "taskid       undefined\n"
        "start_time   Sat Nov 21 04:24:36 2026\n"
        "granted_pe   tf                  \n"
        f"failed       {failed}\n"
        f"exit_status  {exit_status}\n"
        f"ru_wallclock {wallclock}\n"
        "arid         undefined\n"
        "category     -pe tf 6\n"
    )


ACCOUNTS = {
    "well": (record("0    ", "0                   ", "9s"), "exit status 0"),
    "badly": (
        record("0    ", "143                  (Terminated)", "9s"),
        "exit status 143 (Terminated)",
    ),
    "killed": (
        record("100 : assumedly after job", "137                  (Killed)", "2s"),
        "failed 100 : assumedly after job, exit status 137 (Killed)",
    ),
    "not begun": (
        record("26  : opening input/output file", "0", "0s"),
        "failed 26 : opening input/output file, exit status 0",
    ),
    "the job among its tasks": (
        record("0", "0", "3s", "node2")
        + record("100 : assumedly after job", "137 (Killed)", "12s")
        + record("0", "0", "4.5s", "node3"),
        "failed 100 : assumedly after job, exit status 137 (Killed)",
    ),
    "begun again": (
        record("25  : rescheduling", "99", "50s") + record("0", "7", "3s"),
        "exit status 7",
    ),
    "begun again and not yet over": (
        record("25  : rescheduling", "99", "50s"),
        "failed 25 : rescheduling, exit status 99",
    ),
    "without units": (
        record("0", "1", "2") + record("0", "0", "10.25"),
        "exit status 0",
    ),
    "nothing written": ("error: job id 42 not found\n", None),
    "no accounting": ("", None),
    "cut off": (record("0", "0", "1s").split("exit_status")[0], None),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_the_jobs_own_end(name: str) -> None:
    text, expected = ACCOUNTS[name]
    assert verdict(text) == expected


@pytest.mark.parametrize(
    ("accounting", "shown"),
    [
        (ACCOUNTS["killed"][0], " (failed 100 : assumedly after job, exit status 137 "),
        ("error: job id 12 not found\n", " before the launcher recorded"),
    ],
)
def test_a_job_that_is_gone_is_looked_up(accounting: str, shown: str) -> None:
    asked: list[str] = []

    def ask(argv: tuple[str, ...]) -> CommandAnswer:
        asked.append(argv[0])
        known = {"qstat": "<unknown_jobs ><ST_name>12</ST_name>", "qacct": accounting}
        return CommandAnswer(0, known[argv[0]])

    job = QueuedJob("12", "sge", RunPaths(Path("/nowhere/run")))
    state = ask_state(job, ask)
    assert asked == ["qstat", "qacct"]
    assert state.phase is JobPhase.GONE
    assert f"job 12 is gone{shown}" in ended(job, state)
