"""Tests of list and clean, on runs that are over and one that is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.kit.cluster import Cluster
from tests.kit.json_formats import assert_format
from tests.kit.waiting import eventually


def _age(folder: Path, days: float) -> None:
    """Let a run's record look as if it had ended ``days`` ago."""
    shift_s = days * 86400
    events = folder / "events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    for line in lines:
        line["t"] -= shift_s
    events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for path in (*folder.rglob("*"), folder):
        then = path.stat().st_mtime - shift_s
        os.utime(path, (then, then))


def test_list_and_clean(cluster: Cluster) -> None:
    runs = {}
    for name, script in (("old", "exit 33"), ("new", "true")):
        running = cluster.bash(script, "--name", name)
        running.end()
        runs[name] = running.folder
    live = cluster.bash("echo up; until [ -e go ]; do sleep 0.02; done", "--name", "x")
    eventually(lambda: live.found("state", state="running"), lambda: live.err, 40)
    _age(runs["old"], 10)
    crash = cluster.state / "crash-20250101-000000-1.txt"
    crash.write_text("Traceback")
    os.utime(crash, (0, 0))
    half_removed = cluster.state / "runs" / f"{runs['old'].name}.removed"
    half_removed.mkdir()

    listed = json.loads(cluster.command("list", "--json").stdout)
    assert_format("list", listed)
    states = {row["name"]: row["state"] for row in listed["runs"]}
    assert states == {"x": "running", "new": "succeeded", "old": "failed"}
    text = cluster.command("list", "--limit", "2")
    assert [line.split()[0] for line in text.stdout.splitlines()] == [
        "run",
        live.run,
        runs["new"].name,
    ]
    assert "failed (exit code 33)" in cluster.command("list").stdout
    assert "and 1 older" in text.stderr

    said = cluster.command("clean", "--dry-run")
    assert "would remove 1 run and 1 crash file" in said.stderr
    assert runs["old"].exists()
    assert crash.exists()
    said = cluster.command("clean")
    assert said.returncode == 0, said.stderr
    assert f"{runs['old'].name}  (failed, ended 10 d 00 h ago" in said.stdout
    assert crash.name in said.stdout
    assert "removed 1 run and 1 crash file" in said.stderr
    assert not runs["old"].exists()
    assert not crash.exists()
    assert not half_removed.exists()
    said = cluster.command("clean", "--older-than", "0s")
    assert f"kept {live.run}: it is running" in said.stderr
    assert "removed 1 run" in said.stderr
    (cluster.folder / "go").touch()
    assert live.end() == 0, live.err
    assert cluster.run_ids() == [live.run]


def test_clean_wants_a_duration(cluster: Cluster) -> None:
    said = cluster.command("clean", "--older-than", "7 days")
    assert said.returncode == 2
    assert "'7 days' is not a duration (write a number with a unit" in said.stderr
