"""The qsub script: values never become directives by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.descriptions import describe
from tfcluster import __version__
from tfcluster.base.errors import ConfigError
from tfcluster.plan.model import Description
from tfcluster.schedulers.base import CommandAnswer, LauncherCommand, SchedulerError
from tfcluster.schedulers.script import job_script
from tfcluster.schedulers.sge import SCHEDULER

FOLDER = Path("/home/a/.local/state/tfcluster/runs/digits-20261121-101500-3f2a")
LAUNCHER = LauncherCommand(
    folder=FOLDER,
    log=FOLDER / "launcher.log",
    python="/opt/venv/bin/python",
    root=None,
)
GOLDEN = Path(__file__).parent / "answers" / "digits.qsub"


def job(name: str = "digits", **sge: Any) -> Description:
    section = {"parallel_environment": "tf", **sge}
    return describe({"chief": 1, "worker": 3}, name=name, backend="sge", sge=section)


def directives(
    description: Description, launcher: LauncherCommand = LAUNCHER
) -> list[str]:
    """The script's directives as qsub finds them: all lines that begin with ``#$``."""
    script = job_script(SCHEDULER, description, launcher)
    return [line[3:] for line in script.splitlines() if line.startswith("#$")]


def test_the_script_as_people_see_it() -> None:
    description = job(
        slots=4,
        queue="all.q,long.q",
        resources={"h_rt": "1:00:00", "gpu": "1"},
        options=("-P", "physics", "-m", "ea"),
    )
    script = job_script(SCHEDULER, description, LAUNCHER)
    assert script == GOLDEN.read_text().replace("VERSION", __version__)


def test_slots_are_the_tasks_where_none_are_given() -> None:
    assert "-pe tf 4" in directives(job())
    assert "-pe tf 8" in directives(job(slots=8))


def test_without_parallel_environment_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="single slot"):
        job_script(SCHEDULER, job(parallel_environment=None), LAUNCHER)


def test_a_job_name_does_not_begin_with_a_digit() -> None:
    assert "-N j3layers" in directives(job(name="3layers"))
    assert "-N layers3" in directives(job(name="layers3"))


HOSTILE: dict[str, Description] = {
    "queue": job(queue="all.q\n#$ -S /bin/evil"),
    "parallel environment": job(parallel_environment="tf 1\r#$ -q x"),
    "resource's value": job(resources={"h_rt": "1\n#$ -V"}),
    "resource's name": job(resources={"h_rt=1 -V": "1"}),
    "second resource": job(resources={"h_rt": "1,mem_free=1G"}),
    "option's value": job(options=("-P", "x\n#$ -V")),
    "option with spaces": job(options=("-P", "x -V")),
    "option with quotes": job(options=("-P", "'x'")),
    "line separator": job(queue="all.q\u2028#$ -V"),
    "name": job(name="a\n#$ -V"),
    "name with a space": job(name="a b"),
    "value without option": job(options=("physics",)),
    "long option": job(options=("--wrap=x",)),
    "dollar": job(options=("-wd", "/home/$USER")),
    "backtick": job(options=("-P", "`id`")),
}


@pytest.mark.parametrize("where", HOSTILE)
def test_hostile_values_are_refused(where: str) -> None:
    with pytest.raises(ConfigError):
        job_script(SCHEDULER, HOSTILE[where], LAUNCHER)


@pytest.mark.parametrize(
    "option",
    [
        "-C",
        "-@",
        "-V",
        "-v",
        "-b",
        "-t",
        "-tc",
        "-sync",
        "-terse",
        "-verify",
        "-help",
        "-S",
        "-o",
        "-e",
        "-j",
        "-i",
        "-r",
        "-now",
        "-pe",
        "-w",
        "-clear",
        "-shell",
        "-inherit",
    ],
)
def test_options_that_would_change_what_is_submitted_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        job_script(SCHEDULER, job(options=(option, "x")), LAUNCHER)


@pytest.mark.parametrize(
    "log", ["/home/$HOME/x", "/home/a b/x", "host:/x", "/x\n#$ -V", '/x"y']
)
def test_a_path_that_qsub_would_read_otherwise_is_refused(log: str) -> None:
    launcher = LauncherCommand(
        folder=FOLDER, log=Path(log), python="/opt/python", root=None
    )
    with pytest.raises(ConfigError, match="state folder"):
        job_script(SCHEDULER, job(), launcher)


def test_paths_of_the_body_are_no_directives() -> None:
    launcher = LauncherCommand(
        folder=Path("/s/#$ -V"),
        log=Path("/s/log"),
        python="/opt/#$ -V/python",
        root=Path("/opt/a'b"),
    )
    described = directives(job())
    assert len(directives(job(), launcher)) == len(described)
    last = job_script(SCHEDULER, job(), launcher).splitlines()[-1]
    assert last.startswith("exec '/opt/#$ -V/python' -m tfcluster launch")


def test_nothing_of_env_or_secrets_is_in_the_script() -> None:
    description = describe(
        {"worker": 2}, sge={"parallel_environment": "tf"}, env={"CANARY": "canary"}
    )
    assert "canary" not in job_script(SCHEDULER, description, LAUNCHER).lower()


JOB_IDS = {
    "terse": (CommandAnswer(0, "12\n"), "12"),
    "after words of a prolog": (
        CommandAnswer(0, "Welcome!\n2 new messages\n\n4711\n"),
        "4711",
    ),
    "before words of an epilog": (CommandAnswer(0, "4711\nBye, and thanks.\n"), "4711"),
    "not terse": (
        CommandAnswer(0, 'Your job 13 ("digits") has been submitted\n'),
        "13",
    ),
}


@pytest.mark.parametrize("name", JOB_IDS)
def test_the_job_id_is_found_among_other_words(name: str) -> None:
    answer, job_id = JOB_IDS[name]
    assert SCHEDULER.submit(Path("job.sh"), lambda _: answer) == job_id


# Messages of SGE 8.1.9.
REFUSALS = {
    "the requested parallel environment": (
        'Unable to run job: job rejected: the requested parallel environment "nope" '
        "does not exist\nExiting.\n",
        "qconf -spl",
    ),
    "unknown queue": (
        'Unable to run job: Job was rejected because job requests unknown queue "n".\n'
        "Exiting.\n",
        "qconf -sql",
    ),
    "unknown resource": (
        'Unable to run job: unknown resource "nope"\nExiting.\n',
        "qconf -sc",
    ),
    "cannot start with a digit": (
        'Unable to run job: denied: "1digit" is not a valid object name (cannot start '
        "with a digit)\nExiting.\n",
        None,
    ),
    "no answer": ("", None),
}


@pytest.mark.parametrize("said", REFUSALS)
def test_a_refusal_is_reported_in_its_own_words(said: str) -> None:
    words, hint = REFUSALS[said]
    with pytest.raises(SchedulerError, match=said) as caught:
        SCHEDULER.submit(Path("job.sh"), lambda _: CommandAnswer(1, "", words))
    assert "Exiting" not in caught.value.message
    assert "Unable" not in caught.value.message
    assert (hint or "") in (caught.value.hint or "")


def test_a_number_in_an_error_is_no_job_id() -> None:
    with pytest.raises(SchedulerError):
        SCHEDULER.submit(Path("job.sh"), lambda _: CommandAnswer(1, "12\n", "error"))


def test_the_commands() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(argv: tuple[str, ...]) -> CommandAnswer:
        asked.append(argv)
        return CommandAnswer(0, "12\n" if argv[0] == "qsub" else "<unknown_jobs>")

    SCHEDULER.submit(Path("/r/job.sh"), ask)
    SCHEDULER.state("12", ask)
    assert asked == [
        ("qsub", "-terse", "/r/job.sh"),
        ("qstat", "-j", "12", "-xml"),
        ("qacct", "-j", "12"),
    ]
    assert SCHEDULER.cancel_argvs("12") == (("qdel", "12"),)
    assert SCHEDULER.kill_argv("12") == ("qdel", "12")


@pytest.mark.parametrize(
    ("variables", "inside"),
    [
        ({"JOB_ID": "12", "SGE_TASK_ID": "undefined"}, True),
        ({"JOB_ID": "12", "SGE_TASK_ID": "3"}, True),
        ({"SGE_ROOT": "/opt/sge"}, False),
        ({"JOB_ID": "12"}, False),
        ({}, False),
    ],
)
def test_where_a_job_is(variables: dict[str, str], inside: bool) -> None:
    assert SCHEDULER.is_inside(variables) is inside
