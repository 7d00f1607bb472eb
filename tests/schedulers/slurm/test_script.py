"""The sbatch script: values never become directives by accident."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.plan.descriptions import describe
from tfcluster import __version__
from tfcluster.base.durations import time_limit_s
from tfcluster.base.errors import ConfigError
from tfcluster.plan.model import Description, Restart, Results, TaskGroup
from tfcluster.schedulers.base import LauncherCommand
from tfcluster.schedulers.script import job_script
from tfcluster.schedulers.slurm import SCHEDULER

FOLDER = Path("/home/a/.local/state/tfcluster/runs/digits-20261121-101500-3f2a")
LAUNCHER = LauncherCommand(
    folder=FOLDER,
    log=FOLDER / "launcher.log",
    python="/opt/venv/bin/python",
    root=None,
)
GOLDEN = Path(__file__).parent / "answers" / "digits.sbatch"


def job(name: str = "digits", **slurm: Any) -> Description:
    return describe({"chief": 1, "worker": 3}, name=name, backend="slurm", slurm=slurm)


def directives(
    description: Description, launcher: LauncherCommand = LAUNCHER
) -> list[str]:
    script = job_script(SCHEDULER, description, launcher)
    return [
        line.removeprefix("#SBATCH ")
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    ]


def test_the_script_as_people_see_it() -> None:
    description = job(
        nodes=4,
        tasks_per_node=1,
        gpus_per_node=2,
        partition="gpu,long",
        time="1:00:00",
        options=("--account=physics", "--comment=two words", "-qhigh"),
    )
    script = job_script(SCHEDULER, description, LAUNCHER)
    assert script == GOLDEN.read_text().replace("VERSION", __version__)


def sized(**slurm: Any) -> list[str]:
    found = directives(job(**slurm))
    return [each for each in found if each.startswith(("--n", "--gpus", "-N"))]


def test_the_size_of_a_job_follows_from_the_tasks() -> None:
    assert sized() == ["--ntasks=4"]
    two_nodes = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    assert sized(tasks_per_node=2) == two_nodes
    assert sized(nodes=2) == two_nodes
    by_option = sized(options=("-N2",))
    assert by_option == ["--ntasks=4", "--ntasks-per-node=2", "-N2"]


@pytest.mark.parametrize(
    ("tasks", "slurm", "expected"),
    [
        ({"worker": 4}, {}, ["--gpus-per-task=2"]),
        ({"worker": 4}, {"nodes": 2}, ["--gpus-per-node=4"]),
        ({"worker": 4}, {"gpus_per_node": 4}, ["--nodes=2", "--gpus-per-node=4"]),
        ({"worker": 4}, {"nodes": 4}, ["--ntasks-per-node=1", "--gpus-per-node=2"]),
        ({"worker": 4, "ps": 2}, {"tasks_per_node": 3}, ["--gpus-per-node=6"]),
        ({"worker": 4}, {"nodes": 2, "options": ("--gres=gpu:8",)}, ["--nodes=2"]),
    ],
)
def test_the_gpus_of_a_job_follow_from_the_tasks(
    tasks: dict[str, int], slurm: dict[str, Any], expected: list[str]
) -> None:
    groups: dict[str, int | TaskGroup] = {**tasks}
    groups["worker"] = TaskGroup(count=tasks["worker"], gpus=2)
    description = describe(groups, backend="slurm", slurm=slurm)
    found = directives(description)
    assert set(expected) <= set(found)
    gpus = [each for each in expected if "gpus" in each]
    assert [each for each in found if "--gpus" in each] == gpus


def test_keys_become_directives() -> None:
    given: dict[str, Any] = {
        "mem": "16G",
        "account": "a",
        "qos": "high",
        "cpus_per_task": 4,
    }
    found = directives(job(**given, constraint="a100&ib"))
    wanted = {"--mem=16G", "--account=a", "--qos=high", "--cpus-per-task=4"}
    assert {*wanted, '--constraint="a100&ib"'} <= set(found)


def test_a_job_that_goes_on_after_its_limit_may_be_requeued() -> None:
    restart = Restart(max=3, on_time_limit="requeue")
    asked = replace(job(), restart=restart)
    assert set(directives(asked)) - set(directives(job())) == {"--requeue"}
    fetching = replace(asked, results=Results(("*.keras",)))
    assert "--signal=B:USR1@120" in directives(fetching), "time to fetch results"


@pytest.mark.parametrize(
    ("option", "ours"),
    [
        ("--export=ALL", "--export=NONE"),
        ("--signal=B:USR1@300", "--signal=B:USR1@60"),
        ("--output=mine.txt", f"--output={FOLDER}/launcher.log"),
        ("-omine.txt", f"--output={FOLDER}/launcher.log"),
    ],
)
def test_a_given_option_takes_the_place_of_ours(option: str, ours: str) -> None:
    assert ours in directives(job())
    found = directives(job(options=(option,)))
    assert option in found
    assert ours not in found


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("90", 5400),
        ("0:30", 30),
        ("1:00:00", 3600),
        ("2-0", 172_800),
        ("1-02:30", 95_400),
        ("1-02:30:15", 95_415),
        ("UNLIMITED", None),
    ],
)
def test_times_as_slurm_takes_them(time: str, expected: int | None) -> None:
    assert time_limit_s(time) == expected


@pytest.mark.parametrize(
    ("time", "grace_s", "warning_s"),
    [
        (None, 10.0, 60),
        ("UNLIMITED", 10.0, 60),
        ("1:00:00", 10.0, 60),
        ("1:00:00", 119.5, 140),
        ("2", 10.0, 30),
        ("0:20", 10.0, 10),
    ],
)
def test_the_warning_leaves_time_for_the_grace_and_most_of_it_for_the_job(
    time: str | None, grace_s: float, warning_s: int
) -> None:
    description = replace(job(time=time), grace_s=grace_s)
    assert f"--signal=B:USR1@{warning_s}" in directives(description)


def test_a_checkout_is_where_the_interpreter_finds_the_package() -> None:
    launcher = replace(LAUNCHER, root=Path("/src/my tfcluster"))
    script = job_script(SCHEDULER, job(), launcher)
    assert "\ncd '/src/my tfcluster' || exit 4\n" in script


def test_paths_are_quoted_and_percent_signs_are_no_patterns() -> None:
    launcher = replace(LAUNCHER, log=Path("/home/a b/100%j/launcher.log"))
    assert '--output="/home/a b/100%%j/launcher.log"' in directives(job(), launcher)


HOSTILE = [
    "x\n#SBATCH --uid=0",
    "x\r#SBATCH --uid=0",
    "x\u2028#SBATCH --uid=0",
    "x\x00",
    "x\x1b[2J",
    'x" --uid=0 "',
    "x\\",
]


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["name", "partition", "time", "options", "log"])
def test_hostile_values_are_refused(key: str, value: str) -> None:
    """The configuration refuses most of them; the script must not rely on that."""
    launcher, description = LAUNCHER, job()
    if key == "name":
        description = job(name=value)
    elif key == "log":
        launcher = replace(LAUNCHER, log=Path("/home/a") / value)
    elif key == "options":
        description = job(options=(f"--comment={value}",))
    else:
        description = job(**{key: value})
    with pytest.raises(ConfigError):
        job_script(SCHEDULER, description, launcher)


@pytest.mark.parametrize("value", ["x --uid=0", "x # y", "x;y", "$(id)", "`id`", "é"])
def test_other_odd_values_stay_one_word(value: str) -> None:
    assert f'--comment="{value}"' in directives(job(options=(f"--comment={value}",)))


@pytest.mark.parametrize(
    "option",
    [
        "--ntasks=9",
        "-n9",
        "--wrap=id",
        "--wra=id",
        "--uid=0",
        "--ui=0",
        "--gid=0",
        "--parsable",
        "--wait",
        "-W",
        "--test-only",
        "--array=0-3",
        "-a0-3",
        "--clusters=all",
        "-Mall",
        "--chdir=/",
        "-D/",
        "--help",
        "-V",
    ],
)
def test_options_that_change_what_is_submitted_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        job_script(SCHEDULER, job(options=(option,)), LAUNCHER)


@pytest.mark.parametrize("option", ["physics", "", "-", "--", "--=x", "--Account=x"])
def test_what_is_no_option_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="not an option"):
        job_script(SCHEDULER, job(options=(option,)), LAUNCHER)


def test_a_refused_option_is_found_by_its_place() -> None:
    description = replace(
        job(options=("--wrap=id",)), origins={"slurm.options": "c.yaml:4:12"}
    )
    with pytest.raises(ConfigError, match=r"^c\.yaml:4:12: error: option --wrap"):
        job_script(SCHEDULER, description, LAUNCHER)
