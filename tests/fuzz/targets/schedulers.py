"""Answers of Slurm's and Grid Engine's commands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.target import Target
from tests.fuzz.targets.text import bytes_of, text_of
from tfcluster.base import durations
from tfcluster.schedulers import sge, slurm
from tfcluster.schedulers.base import BatchScheduler, CommandAnswer, SchedulerError
from tfcluster.schedulers.sge import queue as sge_queue
from tfcluster.schedulers.slurm import controller

_TESTS = Path(__file__).parents[2] / "schedulers"


def _recorded(folder: str, ending: str = "") -> Sequence[bytes]:
    """Answers of the real programs."""
    files = sorted((_TESTS / folder).rglob(f"*{ending}"))
    return [file.read_bytes() for file in files if file.is_file()]


def _slurm(data: bytes) -> None:
    said = text_of(data)
    facts = controller.fields(said)
    controller.has_gpus(facts)
    controller.ending(facts, 0)
    wait_s = controller.kill_wait_s(said)
    assert wait_s is None or math.isfinite(wait_s)
    limit_s = durations.time_limit_s(said)
    assert limit_s is None or limit_s >= 0


def _submitted(scheduler: BatchScheduler, data: bytes) -> None:
    """All answers to a submission, and the states of a job."""
    code, _, rest = data.partition(b"\n")
    out, _, err = text_of(rest).partition("\n---\n")
    answer = CommandAnswer(0 if code == b"0" else 1, out, err)
    errors = 0
    for parse in (
        lambda: scheduler.submit(Path("job.sh"), lambda _: answer),
        lambda: scheduler.state("12", lambda _: answer),
    ):
        try:
            parse()
        except SchedulerError:
            errors += 1
    if errors == 2:
        raise SchedulerError("none of them fits")


def _qmaster(data: bytes) -> None:
    said = text_of(data)
    facts = sge_queue.parse_job(said)
    if facts is not None:
        facts.is_over_time(1e9)
        facts.is_rescheduled(1e9)
        assert math.isfinite(facts.began_s)
        assert all(map(math.isfinite, facts.limits_s.values()))
    notice_s = sge_queue.parse_notice(said)
    assert notice_s is None or math.isfinite(notice_s)


_SCONTROL = (
    "JobId=12 JobName=x UserId=a(1) JobState=RUNNING Reason=None Restarts=0 "
    "PreemptTime=None TRES=cpu=2,gres/gpu=2 TresPerNode=gres:gpu:2 NumNodes=2",
    "JobId=12 JobState=TIMEOUT Reason=TimeLimit Restarts=3",
    "Configuration data\nKillWait                = 30 sec\nX = y\n",
    "1-02:03:04",
    "2:00:00",
)
_QSTAT = """\
<?xml version='1.0'?>
<detailed_job_info><djob_info><element><JB_job_number>12</JB_job_number>
<JB_notify>true</JB_notify><JB_hard_resource_list><qstat_l_requests>
<CE_name>h_rt</CE_name><CE_doubleval>3600.0</CE_doubleval></qstat_l_requests>
</JB_hard_resource_list><JB_ja_tasks><ulong_sublist><JAT_status>128</JAT_status>
<JAT_start_time>1795169700</JAT_start_time></ulong_sublist></JB_ja_tasks>
</element></djob_info><messages><SME_global_message_list><element>
<MES_message>queue full</MES_message></element></SME_global_message_list></messages>
</detailed_job_info>
"""
_XML = (
    b"<JAT_status>",
    b"</JAT_status>",
    b"<!DOCTYPE a [",
    b"<!ENTITY a 'aaaa'>",
    b"&a;",
)

TARGETS = (
    Target(
        "slurm-answers",
        _slurm,
        lambda: bytes_of(*_SCONTROL),
        (),
        (b" Restarts=", b" JobState=", b"KillWait = ", b":", b"-"),
    ),
    Target(
        "slurm-submit",
        lambda data: _submitted(slurm.SCHEDULER, data),
        lambda: [
            *bytes_of("0\n12;cluster\n", "0\nPENDING|(Resources)\n", "1\n\n---\nno"),
            *(b"0\n" + answer for answer in _recorded("slurm/answers")),
        ],
        (SchedulerError,),
        (b"|", b"\n---\n", b"RUNNING", b"sbatch: error: "),
    ),
    Target(
        "sge-submit",
        lambda data: _submitted(sge.SCHEDULER, data),
        lambda: [
            *bytes_of("0\n" + _QSTAT, '0\nYour job 12 ("x") has been submitted\n'),
            *(b"0\n" + answer for answer in _recorded("sge/answers")),
        ],
        (SchedulerError,),
        (*_XML, b"exit_status 1\n", b"=====\n", b"failed 25\n"),
    ),
    Target(
        "qmaster",
        _qmaster,
        lambda: [
            *bytes_of(_QSTAT, "qname all.q\nnotify 00:00:60,[node1=00:01:30]\n"),
        ],
        (),
        (*_XML, b"notify ", b":", b"<CE_doubleval>", b"00:00:60"),
    ),
)
