"""Parses qstat's answers about a job, as recorded from Grid Engine 8.1.9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcluster.schedulers.base import CommandAnswer, JobPhase, JobState, SchedulerError
from tfcluster.schedulers.sge.queue import how_it_ended
from tfcluster.schedulers.sge.queue import state as ask_state

ANSWERS = Path(__file__).parent / "answers"
"""Recorded with `qstat -j JOB -xml`; usage records and paths are removed."""

STATES = {
    "pending": (
        "2",
        JobPhase.PENDING,
        "waiting (qw)",
        'cannot run in PE "tf" because it only offers 10 slots',
    ),
    "held": ("6", JobPhase.PENDING, "held (hqw)", "`qrls 6` releases it"),
    "error": (
        "4",
        JobPhase.PENDING,
        "in error (Eqw)",
        'can\'t open output file "/no/such/dir/x": No such file or directory '
        "(`qmod -cj 4` lets it try again, `qdel 4` removes it)",
    ),
    "running": ("1", JobPhase.RUNNING, "running", None),
    "rescheduled": ("7", JobPhase.RUNNING, "running", None),
}


def recorded(name: str) -> CommandAnswer:
    return CommandAnswer(0, (ANSWERS / f"{name}.xml").read_text())


@pytest.mark.parametrize("name", STATES)
def test_a_recorded_answer(name: str) -> None:
    job, phase, word, reason = STATES[name]
    assert ask_state(job, lambda _: recorded(name)) == JobState(phase, word, reason)


GONE = {
    "8.1.9, as XML": CommandAnswer(
        0, "<?xml version='1.0'?>\n<unknown_jobs >\n  <ST_name>42</ST_name>\n"
    ),
    "6.2, whose XML is none": CommandAnswer(
        1, "<?xml version='1.0'?>\n<unknown_jobs  xmlns:xsd=\"x\"><>\n<ST_name>42"
    ),
    "as text": CommandAnswer(1, "", "Following jobs do not exist: \n42\n"),
    "of another job": CommandAnswer(0, (ANSWERS / "pending.xml").read_text()),
}


@pytest.mark.parametrize("name", GONE)
def test_a_job_that_is_not_known(name: str) -> None:
    assert ask_state("42", lambda _: GONE[name]).phase is JobPhase.GONE


def _entry(failed: str, exit_status: str, wallclock: str) -> str:
    rule, host = "=" * 62, "hostname     node1.cluster.test  "
    end = f"failed       {failed}\nexit_status  {exit_status}\nru_wallclock {wallclock}"
    return f"{rule}\nqname        all.q               \n{host}\n{end}\n"


TASKS = _entry("0    ", "0    ", "3s") + _entry("0", "0", "4.5")
KILLED = _entry("100 : assumedly after job", "137                  (Killed)", "12s")
ACCOUNTS = {
    "well": (_entry("0    ", "0          ", "9s"), "exit status 0"),
    "badly": (_entry("0", "143    (Terminated)", "9s"), "exit status 143 (Terminated)"),
    "killed, among its tasks": (
        TASKS + KILLED + TASKS,
        "failed 100 : assumedly after job, exit status 137 (Killed)",
    ),
    "begun again": (
        _entry("25  : rescheduling", "99", "50s") + _entry("0", "7", "3s"),
        "exit status 7",
    ),
    "not written yet": ("error: job id 42 not found\n", None),
    "cut off": (KILLED.partition("exit_status")[0], None),
}


@pytest.mark.parametrize("name", ACCOUNTS)
def test_how_a_job_ended(name: str) -> None:
    account, words = ACCOUNTS[name]
    assert how_it_ended(account) == words


def test_the_end_of_a_job_that_is_gone_is_asked_for() -> None:
    answers = {"qstat": GONE["as text"], "qacct": CommandAnswer(0, KILLED)}
    reason = "failed 100 : assumedly after job, exit status 137 (Killed)"
    expected = JobState(JobPhase.GONE, "gone", reason)
    assert ask_state("42", lambda argv: answers[argv[0]]) == expected


UNUSABLE = {
    "qmaster away": CommandAnswer(
        1,
        "",
        "error: commlib error: got select error (Connection refused)\n"
        'unable to send message to qmaster using port 6444 on host "node1": '
        "got send error\n",
    ),
    "qmaster away, as XML": CommandAnswer(
        0,
        "<?xml version='1.0'?>\n<comunication_error >\n  <AN_status>11</AN_status>\n"
        "  <AN_text>unable to contact qmaster using port 6444 on host "
        "&quot;head&quot;</AN_text>\n  <AN_quality>1</AN_quality>\n"
        "</comunication_error>\n",
        "error: commlib error: got select error (No route to host)\n",
    ),
    "cut off": CommandAnswer(0, (ANSWERS / "pending.xml").read_text()[:900]),
    "nothing": CommandAnswer(0, ""),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_no_answer_is_not_taken_for_the_jobs_end(name: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        ask_state("2", lambda _: UNUSABLE[name])
    assert caught.value.message
    assert "\n" not in caught.value.message


def test_many_reasons_are_counted_and_the_jobs_own_come_first() -> None:
    common = "".join(
        f"<element><MES_message>queue instance q{i} dropped</MES_message></element>"
        for i in range(5)
    )
    own = "<element><MES_message>cannot run in PE tf</MES_message></element>"
    text = (
        "<detailed_job_info><element><JB_job_number>2</JB_job_number></element>"
        f"<messages><SME_global_message_list>{common}</SME_global_message_list>"
        f"<SME_message_list>{own}</SME_message_list></messages></detailed_job_info>"
    )
    reason = ask_state("2", lambda _: CommandAnswer(0, text)).reason
    assert reason == (
        "cannot run in PE tf; queue instance q0 dropped; "
        "queue instance q1 dropped (and 3 more)"
    )


def test_where_reasons_are_switched_off_there_is_none() -> None:
    text = "<detailed_job_info><JB_job_number>2</JB_job_number></detailed_job_info>"
    state = ask_state("2", lambda _: CommandAnswer(0, text))
    assert state == JobState(JobPhase.PENDING, "waiting (qw)", None)
