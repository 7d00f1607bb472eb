"""Tests of on_end and rerun, with real commands."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import replace

from tests.kit.cluster import Cluster
from tests.kit.json_formats import assert_format
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually
from tfcluster.launcher.run_end import run_end_command
from tfcluster.record.launched import launched
from tfcluster.record.paths import RunPaths

FILE = """\
name: once
command: ["sh", "-c", "echo up $WORD; {script}"]
tasks: {{worker: 1}}
env: {{WORD: first}}
runtime: {{strategy: none}}
on_end: [./hook.py, $literal]
"""
HOOK = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys
outcome = json.load(sys.stdin)
again = pathlib.Path("again")
if outcome["state"] == "failed" and not again.exists():
    again.touch()
    # The name is free: the same configuration can be launched.
    subprocess.run([sys.executable, "-m", "tfcluster", "rerun", outcome["run"]])
with open("outcomes", "a") as file:
    file.write(json.dumps([sys.argv[1:], os.getcwd(), outcome]) + "\\n")
print("hooked")
sys.exit(5 if outcome["state"] == "stopped" else 0)
"""


def _project(cluster: Cluster, script: str) -> str:
    hook = cluster.folder / "hook.py"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    return cluster.file(FILE.format(script=script))


def test_a_failed_run_tells_its_outcome_and_is_run_again(cluster: Cluster) -> None:
    path = _project(cluster, "exit 33")
    running = cluster.start(path)
    assert running.end() == 33, running.err
    assert "on_end" not in running.err
    lines = (cluster.folder / "outcomes").read_text().splitlines()
    # The hook of the second run comes first: the first hook has launched that run.
    (_, _, second), (argv, folder, first) = map(json.loads, lines)
    assert argv == ["$literal"]
    assert folder == str(cluster.folder)
    assert first["run"] == running.run
    for outcome in (first, second):
        assert_format("outcome", outcome)
    assert first["folder"] == str(running.folder)
    assert first["first_failure"]["exit_code"] == 33
    assert second["run"] != first["run"]
    assert second["name"] == "once"
    assert "hooked" in (running.folder / "on-end.log").read_text()


def test_rerun_uses_the_configuration_of_then(cluster: Cluster) -> None:
    path = _project(cluster, "true")
    running = cluster.start(path)
    assert running.end() == 0, running.err
    cluster.file("broken")
    done = cluster.command("rerun", "once", "--name", "twice")
    assert done.returncode == 0, done.stderr
    assert "up first" in done.stdout
    assert f"launching {running.run} again" in done.stderr
    again = next(run for run in cluster.run_ids() if run.startswith("twice-"))
    described = launched(RunPaths(cluster.state / "runs" / again))
    assert (described.name, described.named) == ("twice", True)
    refused = cluster.command("rerun", "once", "--name", "a/b")
    assert refused.returncode == 2
    assert "'a/b' is not a name" in refused.stderr


def test_a_stopped_run_warns_that_its_command_failed(cluster: Cluster) -> None:
    running = cluster.start(_project(cluster, "exec sleep 60"))
    eventually(lambda: "up" in running.text("worker:0"), lambda: running.err, 40)
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 130, running.err
    log = running.folder / "on-end.log"
    assert f"warning: on_end: exit code 5: hooked (see {log})" in running.err


def test_a_command_that_takes_too_long_is_ended(cluster: Cluster) -> None:
    running = cluster.bash("true")
    running.end()
    paths = RunPaths(running.folder)
    described = launched(paths)
    began = time.monotonic()
    for argv, why in (
        (("sleep", "60"), "it took longer than 0.2 s and was ended"),
        (("no-such-program",), "no-such-program cannot be run: No such file or dir"),
    ):
        said = run_end_command(
            replace(described, on_end=argv),
            paths,
            {},
            cluster.environ,
            is_interrupted=lambda: False,
            limit_s=0.2,
        )
        assert said is not None
        assert said.startswith(why)
    assert time.monotonic() - began < allow_s(10)
