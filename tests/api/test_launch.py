"""Runs that are launched from Python, with real launchers."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tfcluster
from tests.kit.cluster import DEADLINE_S, Cluster
from tests.kit.json_formats import assert_format
from tests.kit.machine import is_alive
from tests.kit.oracle import assert_nothing_runs
from tests.kit.waiting import eventually
from tfcluster.base.errors import ExitCode
from tfcluster.launcher.detach import error_from_plain, error_to_plain

PLAIN = {"runtime.strategy": "none"}
WAITS = "echo up; until [ -e go ]; do sleep 0.02; done"


def _launch(cluster: Cluster, script: str, **given: Any) -> tfcluster.Run:
    given = {"workers": 1, "settings": PLAIN, **given}
    command = ["bash", "-c", script]
    return tfcluster.launch(command=command, environ=cluster.environ, **given)


@pytest.fixture(autouse=True)
def _here(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cluster.folder)


def test_a_run_succeeds(cluster: Cluster) -> None:
    run = _launch(cluster, WAITS, workers=2, name="first")
    assert (run.name, run.id) == ("first", cluster.run_ids()[0])
    assert run.folder == cluster.state / "runs" / run.id
    with pytest.raises(TimeoutError, match="is not over after 0 s"):
        run.wait(timeout_s=0)
    follower = run.logs("worker:1", follow=True)
    assert next(follower) == "up"
    assert_format("status", run.status())
    same = tfcluster.attach("first", environ=cluster.environ)
    assert same.id == run.id
    with pytest.raises(TimeoutError):
        same.wait(timeout_s=0.01)
    assert f"{run.id}: running" in repr(run)
    with pytest.raises(tfcluster.ActiveRunError, match="already uses the name 'first'"):
        _launch(cluster, "true", name="first")
    Path("go").touch()
    outcome = run.wait(DEADLINE_S)
    assert list(follower) == []
    assert (outcome, outcome.exit_code, outcome.state) == (0, 0, "succeeded")
    assert outcome.check() is outcome
    assert outcome.cause is None
    assert same.wait(DEADLINE_S) == outcome
    assert {(line.task, line) for line in run.logs()} == {
        ("worker:0", "up"),
        ("worker:1", "up"),
    }
    assert "first-" in run._repr_html_()
    assert run.stop() == outcome  # it is over


def test_the_report_of_a_run(cluster: Cluster) -> None:
    run = _launch(cluster, "exit 9", settings=PLAIN)
    run.wait(DEADLINE_S)
    assert run.report() == Path(f"{run.id}-report.html")
    page = run.report("page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert run.id in page
    assert "exit code 9" in page
    with pytest.raises(tfcluster.TfclusterError, match="there is no folder missing"):
        run.report("missing/page.html")


def test_the_first_failure_is_in_the_outcome(cluster: Cluster) -> None:
    run = _launch(cluster, "echo $TFCLUSTER_TASK; exit 9", settings=PLAIN)
    outcome = run.wait(DEADLINE_S)
    assert outcome == 9
    assert outcome.state == "failed"
    assert outcome.first_failure is not None
    assert outcome.first_failure["task"] == "worker:0"
    assert outcome.cause == "exited with code 9"
    with pytest.raises(tfcluster.RunFailedError) as caught:
        outcome.check()
    assert caught.value.message == (
        f"{run.id} failed: worker:0 on localhost: exited with code 9\n    worker:0"
    )
    assert caught.value.exit_code == 9


def test_what_a_run_gives_can_be_copied_and_sent_to_processes(
    cluster: Cluster,
) -> None:
    """And what its task wrote cannot control the terminal."""
    run = _launch(cluster, "printf 'a\\033]0;b\\n'; exit 33")
    outcome = run.wait(DEADLINE_S)
    again = pickle.loads(pickle.dumps(outcome))
    assert (again, again.status) == (33, outcome.status)
    (line,) = run.logs()
    assert copy.deepcopy(line).task == "worker:0"
    with pytest.raises(tfcluster.RunFailedError) as caught:
        outcome.check()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.lines(), error.exit_code) == (caught.value.lines(), 33)
    assert error.message.endswith("a\\x1b]0;b")
    with pytest.raises(tfcluster.ConfigError) as wrong:
        tfcluster.launch()
    assert pickle.loads(pickle.dumps(wrong.value)).lines() == wrong.value.lines()


def test_a_run_without_its_record_can_be_shown(cluster: Cluster) -> None:
    run = _launch(cluster, "true")
    run.wait(DEADLINE_S)
    shutil.rmtree(run.folder)
    assert repr(run) == f"<tfcluster.Run {run.id}: its record was removed>"
    assert "its record was removed" in run._repr_html_()


def test_a_block_stops_its_run(cluster: Cluster) -> None:
    with _launch(cluster, WAITS) as run:
        pass
    assert_nothing_runs(cluster)
    outcome = run.wait(0)
    assert (outcome.state, int(outcome)) == ("stopped", ExitCode.TERMINATED)


def test_a_run_is_killed_at_once(cluster: Cluster) -> None:
    run = _launch(cluster, f"trap '' TERM; {WAITS}")
    next(run.logs(follow=True))
    assert run.stop(now=True).state == "stopped"


def test_a_file_is_launched_with_settings(cluster: Cluster) -> None:
    path = cluster.file(
        "name: filed\ncommand: [sh, -c, 'echo $WORD $0 $TFCLUSTER_SIZE']\n"
        "tasks: {worker: 1}\nenv: {WORD: a}\nruntime: {strategy: none}\n"
    )
    run = tfcluster.launch(
        path,
        workers=2,
        arguments=["tail"],
        settings={"env.WORD": "b c", "name": None},
        environ=cluster.environ,
    )
    assert run.wait(DEADLINE_S).check() == 0
    assert list(run.logs("worker")) == ["b c tail 2"] * 2
    assert run.name == "cluster"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["nosuch.yaml"], {"config": "nosuch.yaml"}),
        (
            ["bad.yaml", "--set", "tasks.worker=4.5"],
            {"config": "bad.yaml", "settings": {"tasks.worker": 4.5}},
        ),
        (
            ["-n", "2", "--", "nosuchprogram"],
            {"command": "nosuchprogram", "workers": 2},
        ),
        (
            ["-n", "2", "--hosts", "a:x[", "--", "true"],
            {"command": ["true"], "workers": 2, "hosts": ["a:x["]},
        ),
    ],
)
def test_errors_have_the_words_of_the_command_line(
    cluster: Cluster, words: list[str], given: dict[str, Any]
) -> None:
    cluster.file("comand: x\ntasks: {worker: 1, boss: 2}\n", "bad.yaml")
    said = cluster.command("launch", *words)
    with pytest.raises(tfcluster.TfclusterError) as caught:
        tfcluster.launch(**given, environ=cluster.environ)
    assert caught.value.lines() == said.stderr.splitlines()
    assert caught.value.exit_code == said.returncode
    assert cluster.run_ids() == []


def test_misuse_is_reported_all_at_once(cluster: Cluster) -> None:
    with pytest.raises(tfcluster.ConfigError) as caught:
        tfcluster.launch("a.yaml", hosts=["a"], settings={"env": {"A": object()}})
    assert [problem.where for problem in caught.value.problems] == [
        "hosts",
    ]
    with pytest.raises(tfcluster.ConfigError) as caught:
        tfcluster.launch(
            config=1,  # type: ignore[arg-type]  # that is the test, as below
            command="echo 'a",
            hosts=[1],  # type: ignore[list-item]
            name=7,  # type: ignore[arg-type]
            arguments="--epochs 3",
            settings={5: 1},  # type: ignore[dict-item]
            environ={"A": 5},  # type: ignore[dict-item]
        )
    assert [problem.where for problem in caught.value.problems] == [
        "launch",
        "hosts",
        "config",
        "command",
        "hosts",
        "name",
        "arguments",
        "settings",
        "environ",
    ]
    settings = {"env": {"A": object()}, "grace": "long"}
    with pytest.raises(tfcluster.ConfigError) as caught:
        tfcluster.launch(command="true", workers=-1, name="a/b", settings=settings)
    assert len(caught.value.problems) == 4
    for given in ({}, {"config": "a.yaml", "command": "true"}, {"command": "true"}):
        with pytest.raises(tfcluster.ConfigError):
            tfcluster.launch(**given)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(tfcluster.ConfigError, match="no runs yet"):
        tfcluster.attach(environ=cluster.environ)


def test_a_folder_that_is_gone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = cluster.folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(tfcluster.ConfigError, match=r"directory: .*no longer exists"):
        _launch(cluster, "true")


def test_numbers_of_numpy_are_settings(cluster: Cluster) -> None:
    settings = {**PLAIN, "tasks.worker": np.int64(2), "env": {"A": np.str_("b")}}
    run = _launch(cluster, "echo $A", settings=settings)
    run.wait(DEADLINE_S).check()
    assert list(run.logs()) == ["b", "b"]


def test_a_wrong_task_is_refused(cluster: Cluster) -> None:
    run = _launch(cluster, "true")
    with pytest.raises(tfcluster.ConfigError, match="has no such task"):
        run.logs("ps:3")
    run.wait(DEADLINE_S)


def test_warnings_of_the_configuration_are_warnings(cluster: Cluster) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = _launch(cluster, "true", settings={**PLAIN, "slurm.nodes": 3})
        run.wait(DEADLINE_S)
    for each in caught:
        assert each.filename == __file__


def test_two_runs_from_two_threads(cluster: Cluster) -> None:
    """And no signal handler is touched."""
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    found: dict[str, tfcluster.Outcome] = {}
    ready = threading.Barrier(2)

    def work(name: str, code: int) -> None:
        ready.wait(DEADLINE_S)
        with _launch(cluster, f"exit {code}", name=name) as run:
            found[name] = run.wait(DEADLINE_S)

    threads = [
        threading.Thread(target=work, args=pair) for pair in (("a", 0), ("b", 44))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"a": 0, "b": 44}
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_plain_lines_where_nothing_can_be_redrawn(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _launch(cluster, "exit 33").watch(refresh_s=0.05) == 33
    out = capsys.readouterr().out
    assert "failed (exit code 33)" in out
    assert "exited with code 33" in out
    lines = [line for line in out.splitlines() if "  starting  " in line]
    assert len(lines) <= 1


PROGRAM = """
import sys, tfcluster
run = tfcluster.launch(
    command=["bash", "-c", {script!r}],
    workers=1,
    settings={{"runtime.strategy": "none"}},
    detach={detach},
)
next(run.logs(follow=True))
print(run.id, run.status()["launcher"]["pid"], flush=True)
{end}
"""


def _program(
    cluster: Cluster, end: str, *, detach: bool = False
) -> subprocess.Popen[str]:
    """A Python program that launches a run, and tells its id once it is up."""
    text = PROGRAM.format(script=WAITS, detach=detach, end=textwrap.dedent(end))
    return subprocess.Popen(
        [sys.executable, "-c", text],
        env={**cluster.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=cluster.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _over(cluster: Cluster, run: str) -> Mapping[str, Any]:
    eventually(
        lambda: cluster.recorded(run)["ended"] is not None,
        lambda: str(cluster.recorded(run)),
        DEADLINE_S,
    )
    return cluster.recorded(run)


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_run_ends_with_its_program(cluster: Cluster, how: str) -> None:
    end = "" if how == "ends" else "run.wait()"
    with _program(cluster, end) as program:
        assert program.stdout is not None
        run, pid = program.stdout.readline().split()
        if how == "is killed":
            program.kill()
    assert _over(cluster, run)["state"] == "stopped"
    log = (cluster.state / "runs" / run / "launcher.log").read_text()
    assert "the program that launched this run has ended" in log
    eventually(lambda: not is_alive(int(pid)), lambda: pid, DEADLINE_S)


def test_a_detached_run_goes_on(cluster: Cluster) -> None:
    with _program(cluster, "run.wait()", detach=True) as program:
        assert program.stdout is not None
        name, pid = program.stdout.readline().split()
        os.killpg(program.pid, signal.SIGKILL)
    run = tfcluster.attach(name, environ=cluster.environ)
    assert is_alive(int(pid))
    (cluster.folder / "go").touch()
    assert run.wait(DEADLINE_S).state == "succeeded"


def test_ctrl_c_is_the_programs(cluster: Cluster) -> None:
    end = """
    try:
        print("waits", flush=True)
        run.wait()
    except KeyboardInterrupt:
        print(run.status()["state"])
        print(int(run.stop()))
    """
    with _program(cluster, end) as program:
        assert program.stdout is not None
        for _ in range(2):
            program.stdout.readline()
        os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=DEADLINE_S)
    assert out.split() == ["running", "143"], err  # 130: the launcher got it, too


def test_a_killed_launcher_is_lost(cluster: Cluster) -> None:
    run = _launch(cluster, WAITS)
    next(run.logs(follow=True))
    launcher = run.status()["launcher"]
    assert launcher is not None
    os.kill(launcher["pid"], signal.SIGKILL)
    outcome = run.wait(DEADLINE_S)
    assert (outcome.state, int(outcome)) == ("lost", ExitCode.CONTACT_LOST)
    assert outcome.cause == "the launcher died"


@pytest.mark.parametrize(
    "error",
    [
        tfcluster.ConfigError([tfcluster.base.errors.Problem("a:1", "b", "c", True)]),
        tfcluster.HostError("a", hint="b"),
        tfcluster.TfclusterError("a"),
    ],
)
def test_errors_survive_the_way_to_the_program(
    error: tfcluster.TfclusterError,
) -> None:
    again = error_from_plain(error_to_plain(error))
    assert type(again) is type(error)
    assert (again.lines(), again.exit_code) == (error.lines(), error.exit_code)


def test_a_program_that_ignores_and_blocks_signals_stops_its_run(
    cluster: Cluster,
) -> None:
    """As one does that was started with ``&`` in a script, or with nohup."""
    text = f"""
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    {LAUNCHES}
    next(run.logs(follow=True))
    print(run.stop().state)
    """
    assert _said(cluster, text) == ["stopped"]


def test_a_forked_process_waits_for_the_run_of_its_parent(cluster: Cluster) -> None:
    text = f"""
    import os, pathlib
    {LAUNCHES}
    next(run.logs(follow=True))
    if not os.fork():
        try:
            run.wait(timeout_s=0)
        except TimeoutError as error:
            print(error.args[0].partition(" ")[2], flush=True)
        pathlib.Path("go").touch()
        print(run.watch(refresh_s=0.05).state, run.stop().state, flush=True)
        os._exit(0)
    os.wait()
    """
    said = _said(cluster, text)
    assert said[0] == "is not over after 0 s"
    assert said[-1] == "succeeded succeeded"


def test_a_program_without_standard_streams_launches(cluster: Cluster) -> None:
    text = f"""
    import os, pathlib
    for number in range(3):
        os.close(number)
    {LAUNCHES}
    next(run.logs(follow=True))
    pathlib.Path("ended").write_text(run.stop().state)
    """
    _said(cluster, text)
    assert (cluster.folder / "ended").read_text() == "stopped"


LAUNCHES = f"""
    import tfcluster
    run = tfcluster.launch(
        command=["bash", "-c", {WAITS!r}], workers=1, settings={PLAIN!r}
    )
"""


def _said(cluster: Cluster, text: str) -> list[str]:
    """The lines that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**cluster.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=cluster.folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
