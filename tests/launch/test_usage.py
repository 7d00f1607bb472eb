"""Tests of command-line mistakes: they are reported, and nothing is changed."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import machine
from tests.kit.cluster import COMMAND, Cluster, console_script, plain

MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "a script for a file": (
        ["launch", "train.py"],
        ["train.py", "tfcluster launch -n 2 -- python train.py"],
    ),
    "a command for a file": (
        ["launch", "python", "train.py"],
        ["tfcluster launch -n 2 -- python train.py"],
    ),
    "no such file": (["launch", "missing.yaml"], ["missing.yaml", "No such file"]),
    "a folder": (["launch", "."], ["Is a directory"]),
    "nothing to launch": (["launch"], ["nothing to launch"]),
    "nothing to run": (["launch", "-n", "2"], ["nothing to launch"]),
    "nothing after --": (["launch", "-n", "2", "--"], ["nothing to launch"]),
    "no workers": (["launch", "-n", "0", "--", "true"], ["-n"]),
    "less than no workers": (["launch", "-n", "-1", "--", "true"], ["-n"]),
    "no number": (["launch", "-n", "two", "--", "true"], ["-n", "two"]),
    "no task type": (
        ["launch", "-n", "2", "--set", "worker=3", "--", "true"],
        ["--set worker=3", "'worker' belongs under 'tasks:'"],
    ),
    "no value": (
        ["launch", "-n", "2", "--set", "grace", "--", "true"],
        ["--set grace"],
    ),
    "no unit": (["launch", "-n", "2", "--set", "grace=5", "--", "true"], ["5s"]),
    "no such key": (
        ["launch", "-n", "2", "--set", "grcae=5s", "--", "true"],
        ["grcae", "grace"],
    ),
    "no such strategy": (
        ["launch", "-n", "2", "--set", "runtime.strategy=ps", "--", "true"],
        ["runtime.strategy", "parameter_server"],
    ),
    "no name": (["launch", "-n", "1", "--name", "../x", "--", "true"], ["../x"]),
    "no such command": (["lanch"], ["lanch"]),
    "a command of other software": (["run", "train.py"], ["'run'", "'launch'"]),
    "GPUs of a file": (
        ["launch", "one.yaml", "--gpus", "1"],
        ["--gpus", "tasks.worker.gpus=N"],
    ),
    "less than no GPUs": (
        ["launch", "-n", "2", "--gpus", "-1", "--", "true"],
        ["--gpus: error:"],
    ),
    "no such flag": (["launch", "--worker", "3", "--", "true"], ["--worker"]),
    "no such flag of status": (["status", "--jsn"], ["--jsn"]),
    "no such run": (["status", "nobody"], ["no runs yet"]),
    "logs of no run": (["logs"], ["no runs yet"]),
    "no such file to plan": (["plan", "missing.yaml"], ["missing.yaml"]),
    "no file to plan": (["plan"], ["nothing to plan", "cluster.yaml"]),
    "two files": (
        ["launch", "one.yaml", "two.yaml"],
        ["two.yaml", "tfcluster launch one.yaml -- two.yaml"],
    ),
    "a file and -n": (
        ["launch", "one.yaml", "-n", "3"],
        ["one.yaml", "tfcluster launch one.yaml --set tasks.worker=3"],
    ),
    "less than no lines": (["logs", "-n", "-3"], ["-3"]),
    "no such backend": (["init", "--backend", "condor"], ["condor"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported(cluster: Cluster, mistake: str) -> None:
    words, expected = MISTAKES[mistake]
    (cluster.folder / "train.py").write_text("print('hi')\n")
    cluster.file("command: python train.py\ntasks: {worker: 2}\n", "one.yaml")
    done = cluster.command(*words)
    assert done.returncode == 2, done.stderr
    for word in expected:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 6
    assert done.stdout == ""
    assert cluster.run_ids() == []


def test_another_backend_of_keras_is_reported_before_anything_starts(
    cluster: Cluster,
) -> None:
    (cluster.folder / "train.py").write_text("import keras")
    script = ("--", "python", "train.py")
    for options, environ in (
        (("--set", "env.KERAS_BACKEND=jax"), {}),
        ((), {"KERAS_BACKEND": "jax"}),
    ):
        running = cluster.start("-n", "2", *options, *script, environ=environ)
        assert running.end() == 4
        assert "KERAS_BACKEND is 'jax'" in running.err
        assert "strategy: none" in running.err
    assert cluster.run_ids() == []


def test_a_forgotten_separator_is_forgiven_where_it_is_clear(cluster: Cluster) -> None:
    (cluster.folder / "hello.py").write_text("print('hi')\n")
    plain = ("--set", "runtime.strategy=none")
    running = cluster.start("-n", "2", *plain, "python", "hello.py")
    assert running.end() == 0, running.err
    assert {line.partition("| ")[2] for line in running.out.splitlines()} == {"hi"}
    assert [running.text(f"worker:{n}") for n in (0, 1)] == ["hi\n"] * 2


def test_options_of_the_command_after_no_separator_are_reported(
    cluster: Cluster,
) -> None:
    done = cluster.command("launch", "-n", "2", "python", "train.py", "--epochs", "3")
    assert done.returncode == 2
    assert "if --epochs belongs to your own command, write `--`" in done.stderr


def test_no_arguments_show_the_help(cluster: Cluster) -> None:
    done = cluster.command()
    assert (done.returncode, done.stdout) == (2, "")
    assert "tfcluster launch cluster.yaml" in done.stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["launch", "-h"], ["status", "--help"], ["--version"]]
)
def test_help_goes_to_stdout(cluster: Cluster, words: list[str]) -> None:
    done = cluster.command(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_dry_run_starts_nothing(cluster: Cluster) -> None:
    done = cluster.command("launch", "-n", "2", "--dry-run", "--", "echo", "hi")
    assert done.returncode == 0, done.stderr
    assert "worker:1" in done.stdout
    assert "echo" in done.stdout
    assert not cluster.state.exists()


def test_arguments_after_a_file_are_the_commands(cluster: Cluster) -> None:
    config = cluster.file(
        "tasks: {worker: 1}\nruntime: {strategy: none}\ncommand: echo one\n"
    )
    running = cluster.start(config, "--", "two words", "--three", "$HOME", "*")
    assert running.end() == 0
    assert running.text("worker:0") == "one two words --three $HOME *\n"


def test_the_command_works_from_any_folder(cluster: Cluster) -> None:
    """No module is imported from the working directory, whatever its name."""
    script = console_script()
    if script is None:
        pytest.skip("the command is not installed here")
    for name in ("json", "yaml", "click", "tfcluster", "sitecustomize"):
        (cluster.folder / f"{name}.py").write_text("raise SystemExit('picked up')\n")
    done = subprocess.run(
        [str(script), "launch", "-n", "1", "--", "echo", "hi"],
        cwd=cluster.folder,
        env=cluster.environ,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert "picked up" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_written_is_an_error_and_no_crash(cluster: Cluster) -> None:
    (cluster.folder / "train.py").touch()
    path = cluster.file("command: python train.py\ntasks: {worker: 2}\n")
    for words in (["plan", path], ["schema"], ["init"]):
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [*COMMAND, *words],
                cwd=cluster.folder,
                env=cluster.environ,
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert done.returncode == 8
        assert b"cannot write the answer to standard output: No space" in done.stderr
        assert b"internal error" not in done.stderr
    closed = cluster.bash_line(f"{shlex.join([*COMMAND, 'plan', path])} >&-")
    assert closed.returncode == 8
    assert "standard output is closed" in closed.stderr
    for words in (["plan", path], ["schema"]):
        command = (
            f"{shlex.join([*COMMAND, *words])} | head -c1; exit ${{PIPESTATUS[0]}}"
        )
        piped = cluster.bash_line(command)
        assert (piped.returncode, piped.stderr) == (0, "")


def test_a_plan_warns_of_what_a_launch_would_not_find(cluster: Cluster) -> None:
    (cluster.folder / "train.py").touch()
    script = cluster.file("command: python trian.py\ntasks: {worker: 2}\n")
    for words in (["plan", script], ["launch", "--dry-run", script]):
        done = cluster.command(*words)
        assert done.returncode == 0
        assert done.stderr == (
            f"warning: worker:0: there is no trian.py in {cluster.folder} "
            "(did you mean 'train.py'?)\n"
        )
    for backend, hosts in (("ssh", "hosts: [h1]\n"), ("slurm", "")):
        elsewhere = f"backend: {backend}\n{hosts}"
        text = f"{elsewhere}command: python trian.py\ntasks: {{worker: 2}}\n"
        assert "trian.py" in cluster.command("plan", cluster.file(text)).stderr
    program = cluster.file("command: ./trian.sh\ntasks: {worker: 2}\n")
    assert (
        "'./trian.sh' is not an executable program"
        in cluster.command("plan", program).stderr
    )
    well = cluster.file("command: python train.py\ntasks: {worker: 2}\n")
    assert cluster.command("plan", well).stderr == ""


@pytest.mark.parametrize("free_pages", [0, 1])
def test_a_disk_that_is_full_from_the_start_leaves_no_run(
    cluster: Cluster, free_pages: int
) -> None:
    """With one free page there is room for the lock, but not for the plan."""
    with machine.nearly_full(cluster.state, free_pages):
        running = cluster.start(*plain(count=1), "--", "touch", "started")
        assert running.end() == 8
        assert "No space left on device" in running.err
        assert f"{cluster.state}/runs/touch-" in running.err
        assert "TFCLUSTER_STATE_DIR" in running.err
        assert "internal error" not in running.err
        assert cluster.run_ids() == []
    assert not (cluster.folder / "started").exists()


def test_too_low_a_limit_of_open_files_is_reported_before_anything_starts(
    cluster: Cluster,
) -> None:
    words = shlex.join([*COMMAND, "launch", *plain(count=40), "--", "true"])
    done = cluster.bash_line(f"ulimit -n 64; {words}")
    assert done.returncode == 8
    assert re.search(
        r"40 tasks on this machine need about \d+ open files, but the limit is 64",
        done.stderr,
    )
    assert "`ulimit -n " in done.stderr
    assert cluster.run_ids() == []


def test_what_the_limit_of_open_files_is_said_to_be_is_enough(cluster: Cluster) -> None:
    words = shlex.join([*COMMAND, "launch", *plain(count=40), "--", "true"])
    refused = cluster.bash_line(f"ulimit -n 64; {words}")
    enough = refused.stderr.partition("`ulimit -n ")[2].partition("`")[0]
    done = cluster.bash_line(f"ulimit -n {enough}; {words}")
    assert done.returncode == 0, done.stderr


def test_a_terminal_without_unicode_shows_escapes(cluster: Cluster) -> None:
    folder = cluster.folder / "größe"
    folder.mkdir()
    path = folder / "cluster.yaml"
    path.write_text("command: python train.py\ntasks: {worker: 2}\n")
    path.chmod(0o600)
    cluster.environ["PYTHONIOENCODING"] = "ascii"
    done = cluster.command("plan", str(path))
    assert done.returncode == 0, done.stderr
    assert "gr\\xf6\\xdfe" in done.stdout


def test_a_folder_that_was_deleted_is_said_to_be(cluster: Cluster) -> None:
    (cluster.folder / "gone").mkdir()
    command = shlex.join([*COMMAND, "launch", "-n", "1", "--", "true"])
    done = cluster.bash_line(f"cd gone && rmdir ../gone && {command}")
    assert done.returncode == 2
    assert "the current directory no longer exists" in done.stderr


def test_ctrl_c_within_the_imports_ends_without_a_traceback(cluster: Cluster) -> None:
    # The signal comes while the command's own modules are being imported.
    code = (
        "import builtins, os, signal, sys\n"
        "real = builtins.__import__\n"
        "def spy(name, *rest, **keys):\n"
        "    if name == 'click':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest, **keys)\n"
        "builtins.__import__ = spy\n"
        "import tfcluster.cli\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=30
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
