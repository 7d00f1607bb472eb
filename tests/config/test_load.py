"""The descriptions that valid configurations are loaded as."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.config.files import ENVIRON, SMALLEST, loaded, write
from tfcluster.base.errors import ConfigError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.config import load
from tfcluster.plan.model import (
    Host,
    PortRange,
    Restart,
    Runtime,
    Secret,
    Ssh,
    Strategy,
    Sync,
    TaskGroup,
)
from tfcluster.schedulers.sge import SCHEDULER as SGE
from tfcluster.schedulers.sge import SgeSettings
from tfcluster.schedulers.slurm import SCHEDULER as SLURM
from tfcluster.schedulers.slurm.request import SlurmSettings

CONTRACT = """\
name: digits
backend: local
command: python train.py --epochs 3
workdir: .
python: /opt/venv/bin/python
env: {OMP_NUM_THREADS: "1"}
secrets: {WANDB_API_KEY: {file: ~/.wandb}, TOKEN: {env: DATA}}
tasks:
  chief: 1
  worker: {count: 3, gpus: 1, env: {A: b}, command: python w.py, server: false}
  ps: 1
  evaluator: 1
  data: 1
runtime:
  strategy: parameter_server
  transport: auto
  bucket_mb: 25
  compression: none
  error_feedback: false
  shard_optimizer: false
  batch: global
  synchronous: false
  warm_start: true
hosts: ["node[1-4]", "gpu7", {host: gpu8, slots: 4, gpus: 4, address: 10.0.0.7, user: a,
        port: 22, python: python3}]
ssh: {user: a, port: 22, identity_file: id, config_file: ~/.ssh/config,
      known_hosts: /k, connect_timeout: 10s}
slurm: {nodes: 2, tasks_per_node: 4, partition: gpu, time: "1:00:00", gpus_per_node: 4,
        options: ["--account=x"]}
sge: {parallel_environment: tf, slots: 8, queue: all.q, resources: {h_rt: "1:00:00"},
      options: ["-P", "x"]}
launcher: auto
ports: 40000-41000
restart: {max: 2, scope: auto}
start_timeout: 300s
progress_timeout: off
grace: 500ms
"""


def test_every_key_of_the_contract(tmp_path: Path) -> None:
    description = loaded(tmp_path, CONTRACT).description
    assert description.name == "digits"
    assert description.named
    assert description.backend == "local"
    assert description.command == ("python", "train.py", "--epochs", "3")
    assert description.workdir == tmp_path
    assert description.python == ("/opt/venv/bin/python",)
    assert description.env == {"OMP_NUM_THREADS": "1"}
    assert description.secrets == {
        "WANDB_API_KEY": Secret(file=Path("/home/a/.wandb")),
        "TOKEN": Secret(env="DATA"),
    }
    assert list(description.tasks) == ["chief", "worker", "ps", "evaluator", "data"]
    assert description.tasks["worker"] == TaskGroup(
        count=3, gpus=1, env={"A": "b"}, command=("python", "w.py")
    )
    assert description.tasks["ps"] == TaskGroup(count=1)
    assert description.runtime == Runtime(strategy=Strategy.PARAMETER_SERVER)
    assert [host.name for host in description.hosts] == [
        *("node1", "node2", "node3", "node4", "gpu7", "gpu8")
    ]
    assert description.hosts[-1] == Host(
        name="gpu8",
        slots=4,
        gpus=("0", "1", "2", "3"),
        address="10.0.0.7",
        user="a",
        port=22,
        python=("python3",),
    )
    assert description.ssh == Ssh(
        user="a",
        port=22,
        identity_file=tmp_path / "id",
        config_file=Path("/home/a/.ssh/config"),
        known_hosts=Path("/k"),
        connect_timeout_s=10.0,
    )
    assert SLURM.settings_in(description) == SlurmSettings(
        nodes=2,
        tasks_per_node=4,
        partition="gpu",
        time="1:00:00",
        gpus_per_node=4,
        options=("--account=x",),
    )
    assert SGE.settings_in(description) == SgeSettings(
        parallel_environment="tf",
        slots=8,
        queue="all.q",
        resources={"h_rt": "1:00:00"},
        options=("-P", "x"),
    )
    assert description.launcher == "auto"
    assert description.ports == PortRange(40000, 41000)
    assert description.expose == "run"
    assert description.restart == Restart(max=2)
    assert description.start_timeout_s == 300.0
    assert description.progress_timeout_s is None
    assert description.grace_s == 0.5
    assert description.source == str(tmp_path / "cluster.yaml")
    assert len(description.task_ids()) == 7


def test_defaults(tmp_path: Path) -> None:
    result = load(write(tmp_path, SMALLEST), environ={}, python="/usr/bin/python3")
    description = result.description
    assert result.warnings == ()
    assert (description.name, description.named) == ("cluster", False)
    assert description.backend == "local"
    assert description.workdir == tmp_path
    assert description.python == ("/usr/bin/python3",)
    assert description.runtime == Runtime()
    assert description.hosts == ()
    assert description.ssh == Ssh()
    assert description.sections == {}
    assert description.launcher == "auto"
    assert description.ports is None
    assert description.restart == Restart(max=0, scope="auto")
    assert description.start_timeout_s == 300.0
    assert description.progress_timeout_s is None
    assert description.grace_s == 10.0


@pytest.mark.parametrize(
    ("tasks", "runtime", "strategy"),
    [
        ("{worker: 1}", "{}", Strategy.COLLECTIVE),
        ("{chief: 1}", "{}", Strategy.COLLECTIVE),
        ("{worker: 1, ps: 1}", "{}", Strategy.PARAMETER_SERVER),
        ("{worker: 1, ps: 1}", "{strategy: replicated}", Strategy.REPLICATED),
        ("{worker: 1, ps: 1}", "{strategy: none}", Strategy.NONE),
        ("{worker: 1}", "{strategy: local_sgd}", Strategy.LOCAL_SGD),
    ],
)
def test_strategy(tasks: str, runtime: str, strategy: Strategy, tmp_path: Path) -> None:
    content = f"command: a\ntasks: {tasks}\nruntime: {runtime}\n"
    assert loaded(tmp_path, content).description.runtime.strategy is strategy


def test_the_command_may_be_left_out_where_no_task_needs_it(tmp_path: Path) -> None:
    worker = "worker: {count: 2, server: true}"
    content = f"tasks: {{chief: {{command: python a.py}}, {worker}, ps: 1}}"
    description = loaded(tmp_path, content).description
    assert description.command == ()
    assert description.tasks["chief"].command == ("python", "a.py")
    assert description.tasks["worker"].server


@pytest.mark.parametrize(
    ("written", "trace", "steps"),
    [
        ("", False, None),
        ("trace: false", False, None),
        ("trace: true", True, None),
        ("trace: {steps: 200}", True, 200),
        ("trace: {enabled: false, steps: 200}", False, 200),
    ],
)
def test_what_is_traced(
    written: str, trace: bool, steps: int | None, tmp_path: Path
) -> None:
    content = f"{SMALLEST}runtime: {{{written}}}\n"
    runtime = loaded(tmp_path, content).description.runtime
    assert (runtime.trace, runtime.trace_steps) == (trace, steps)


@pytest.mark.parametrize("written", ["yes please", "{steps: 0}", "{step: 1}", "5"])
def test_what_is_wrong_about_a_trace(written: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'trace'|'step"):
        loaded(tmp_path, f"{SMALLEST}runtime: {{trace: {written}}}\n")


def test_sections_of_other_backends_are_ignored(tmp_path: Path) -> None:
    content = f"{SMALLEST}ssh: {{identity_file: /no/such}}\nslurm: {{nodes: 2}}\n"
    assert loaded(tmp_path, content).warnings == ()


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("digits", "digits"),
        ("two words", "two-words"),
        (".hidden", "hidden"),
        ("a" * 100, "a" * 64),
        ("käse", "k-se"),
        ("ж", "run"),
    ],
)
def test_the_name_is_the_stem_where_none_is_given(
    stem: str, name: str, tmp_path: Path
) -> None:
    path = write(tmp_path, SMALLEST, f"{stem}.yaml")
    description = load(path, environ={}).description
    assert (description.name, description.named) == (name, False)


# Commands.


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("python a.py --x 1", ["python", "a.py", "--x", "1"]),
        ("python a.py 'b c' d\\ e", ["python", "a.py", "b c", "d e"]),
        ('\'python a.py "b | c" ""\'', ["python", "a.py", "b | c", ""]),
        ("[python, --lr, 0.1, --n, 3]", ["python", "--lr", "0.1", "--n", "3"]),
        ("python a.py ${DATA}/x", ["python", "a.py", "/data/digits/x"]),
        ("python a.py ${SPACED}", ["python", "a.py", "b c"]),
        ("python a.py ${NONE:-x}$$", ["python", "a.py", "x$"]),
        (
            '[bash, -c, "echo $HOME ${DATA} $$x"]',
            ["bash", "-c", "echo $HOME /data/digits $x"],
        ),
        ("python a.py '$x'", ["python", "a.py", "$x"]),
        (">\n  python a.py\n  --x 1\n", ["python", "a.py", "--x", "1"]),
        ("|\n  python a.py \\\n    --x 1\n", ["python", "a.py", "--x", "1"]),
    ],
)
def test_command(command: str, argv: list[str], tmp_path: Path) -> None:
    content = f"tasks: {{worker: 1}}\ncommand: {command}\n"
    environ = {**ENVIRON, "SPACED": "b c"}
    assert list(loaded(tmp_path, content, environ=environ).description.command) == argv


def test_arguments_are_appended_to_every_command(tmp_path: Path) -> None:
    content = "command: a\ntasks: {worker: {command: b x}, chief: 1, ps: 1}\n"
    arguments = ["--epochs", "$3", "ab\udc80"]
    description = loaded(tmp_path, content, arguments=arguments).description
    assert description.command == ("a", *arguments)
    assert description.tasks["worker"].command == ("b", "x", *arguments)
    assert description.tasks["chief"].command is None


# References and paths.


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${DATA}", "/data/digits"),
        ("a${DATA}b${DATA}", "a/data/digitsb/data/digits"),
        ("${NONE:-x y}", "x y"),
        ("${DATA:-x}", "/data/digits"),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY}", ""),
        ("${NONE:-}", ""),
        ("$${DATA}", "${DATA}"),
        ("$$DATA", "$DATA"),
        ("5$", "5$"),
        ("$5", "$5"),
    ],
)
def test_references_in_env(written: str, value: str, tmp_path: Path) -> None:
    content = f"{SMALLEST}env: {{A: '{written}'}}\n"
    assert loaded(tmp_path, content).description.env == {"A": value}


def test_numbers_may_stand_for_text_where_nothing_is_lost(tmp_path: Path) -> None:
    content = f"{SMALLEST}env: {{A: 1, B: -3, C: 0.5, D: '010', E: 1e-3}}\n"
    expected = {"A": "1", "B": "-3", "C": "0.5", "D": "010", "E": "1e-3"}
    assert loaded(tmp_path, content).description.env == expected


@pytest.mark.parametrize(
    ("written", "path"),
    [(".", "."), ("sub/../sub", "sub"), ("${SUB}", "sub"), ("/", "/"), ("~", "~")],
)
def test_workdir(written: str, path: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    environ = {"SUB": "sub", "HOME": str(tmp_path)}
    content = f"{SMALLEST}workdir: '{written}'\n"
    expected = tmp_path if path == "~" else tmp_path / path
    assert loaded(tmp_path, content, environ=environ).description.workdir == expected


def test_a_workdir_on_other_hosts_need_not_be_here(tmp_path: Path) -> None:
    content = f"{SMALLEST}backend: ssh\nhosts: [a]\nworkdir: /no/such\n"
    assert loaded(tmp_path, content).description.workdir == Path("/no/such")


@pytest.mark.parametrize(
    ("written", "folder"),
    [
        ("digits", "~/digits"),
        ("~/digits/", "~/digits"),
        ("~/a/${SUB}", "~/a/sub"),
        ("/scratch/me", "/scratch/me"),
    ],
)
def test_where_files_are_copied_to(written: str, folder: str, tmp_path: Path) -> None:
    content = f"{SMALLEST}workdir: {{sync: '{written}', exclude: ['*.ckpt']}}\n"
    description = loaded(tmp_path, content, environ={"SUB": "sub"}).description
    assert description.workdir == tmp_path
    assert description.sync == Sync(folder, ("*.ckpt",))


@pytest.mark.parametrize(
    ("written", "python"),
    [
        ("python3", "python3"),
        ("venv/bin/python", "{folder}/venv/bin/python"),
        ("~/venv/bin/python", "/home/a/venv/bin/python"),
        ("${DATA}/python", "/data/digits/python"),
    ],
)
def test_python(written: str, python: str, tmp_path: Path) -> None:
    description = loaded(tmp_path, f"{SMALLEST}python: {written}\n").description
    assert description.python == (python.format(folder=tmp_path),)


def test_the_path_is_shown_as_given_and_its_folder_is_the_workdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, SMALLEST)
    monkeypatch.chdir(tmp_path)
    description = load("cluster.yaml", environ={}).description
    assert description.workdir == tmp_path
    assert description.source == "cluster.yaml"
    assert description.origins["tasks.worker"] == "cluster.yaml:2:17"


# YAML.


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    content = (
        "command: a\n"
        "tasks:\n"
        "  chief: &base {env: {A: b}, gpus: 1}\n"
        "  worker: {<<: *base, count: 2, gpus: 0}\n"
    )
    tasks = loaded(tmp_path, content).description.tasks
    assert tasks["chief"] == TaskGroup(count=1, gpus=1, env={"A": "b"})
    assert tasks["worker"] == TaskGroup(count=2, gpus=0, env={"A": "b"})


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + SMALLEST.replace("\n", "\r\n").encode()
    description = loaded(tmp_path, content).description
    assert description.command == ("python", "train.py")
    assert description.origins["command"].endswith(":1:10")


def test_keys_are_read_as_written(tmp_path: Path) -> None:
    content = f"{SMALLEST}env: {{ON: a, NO: b}}\n"
    assert loaded(tmp_path, content).description.env == {"ON": "a", "NO": "b"}


@pytest.mark.parametrize("same", [500, 1000])
def test_durations(same: int, tmp_path: Path) -> None:
    content = f"{SMALLEST}grace: {same}ms\nstart_timeout: {same / 1000}s\n"
    description = loaded(tmp_path, content).description
    assert description.grace_s == description.start_timeout_s == same / 1000


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("10s", 10.0), ("5m", 300.0), ("1.5h", 5400.0), ("2d", 172800.0), ("off", None)],
)
def test_progress_timeout(written: str, seconds: float | None, tmp_path: Path) -> None:
    content = f"{SMALLEST}progress_timeout: {written}\n"
    assert loaded(tmp_path, content).description.progress_timeout_s == seconds


# Imports and speed.


def test_importing_the_package_is_cheap() -> None:
    code = (
        "import sys; import tfcluster.config; "
        "sys.exit(bool({'yaml', 'click'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE_ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("item", ["node{}", "{{host: node{}, slots: 4, gpus: 1}}"])
def test_the_time_grows_with_the_hosts_and_no_faster(item: str, tmp_path: Path) -> None:
    def least_s(count: int) -> float:
        """The lowest CPU time of three trials, which other load affects least."""
        hosts = "".join(f"  - {item.format(index)}\n" for index in range(count))
        path = write(tmp_path, f"{SMALLEST}backend: ssh\nhosts:\n{hosts}")
        took_s = []
        for _ in range(3):
            began = time.process_time()
            description = load(path, environ={}).description
            took_s.append(time.process_time() - began)
        assert len(description.hosts) == count
        assert description.hosts[-1].name == f"node{count - 1}"
        return min(took_s)

    load(write(tmp_path, SMALLEST, "first.yaml"), environ={})
    # The ratio is 10 if the time is linear in the hosts, and 100 if it is quadratic.
    assert least_s(10_000) < 40 * least_s(1000)


@pytest.mark.parametrize("flag", [False, True])
def test_keys_that_are_no_longer_needed_are_left_out(
    *, flag: bool, tmp_path: Path
) -> None:
    keys = {"on_difference": "warn", "batch_normalization": "local"}
    inner = "".join(f", {key}: {value}" for key, value in keys.items())
    content = f"{SMALLEST}runtime: {{batch: global{'' if flag else inner}}}\n"
    overrides = [f"runtime.{key}={value}" for key, value in keys.items()]
    result = loaded(tmp_path, content, overrides=overrides if flag else [])
    assert result.description.runtime == loaded(tmp_path).description.runtime
    for key in keys:
        (problem,) = [
            warning for warning in result.warnings if repr(key) in warning.message
        ]
        assert "no longer needed" in problem.message
        assert not any(key in place for place in result.description.origins)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("4h", "4:00:00"),
        ("90s", "0:01:30"),
        ("1.5d", "1-12:00:00"),
        ("30", "30"),
        ('"1:00:00"', "1:00:00"),
        ("UNLIMITED", "UNLIMITED"),
    ],
)
def test_the_time_of_a_job_may_be_a_duration(
    tmp_path: Path, written: str, expected: str
) -> None:
    text = f"{SMALLEST}slurm: {{time: {written}, mem: 16GB}}\n"
    slurm = SlurmSettings(**loaded(tmp_path, text).description.sections["slurm"])
    assert (slurm.time, slurm.mem) == (expected, "16G")


def test_hosts_with_one_name_are_told_apart_by_their_ports(tmp_path: Path) -> None:
    hosts = "[{host: a, port: 7}, {host: a, port: 8}, {host: b, port: 9}]"
    path = write(tmp_path, f"{SMALLEST}backend: ssh\nhosts: {hosts}\n")
    described = load(path, environ={}).description.hosts
    assert [(host.name, host.own_name) for host in described] == [
        ("a:7", "a"),
        ("a:8", "a"),
        ("b", "b"),
    ]
