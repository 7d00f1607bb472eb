"""``fetch`` where there is nothing to fetch from elsewhere."""

from __future__ import annotations

from pathlib import Path

from tests.kit.cluster import Cluster


def test_a_local_run_has_its_files_here(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    run = cluster.bash("echo x > a.keras", "--set", 'workdir.results=["*.keras"]')
    assert run.end() == 0, run.err
    assert not run.found("results")
    done = cluster.command("fetch")
    assert done.returncode == 0, done.stderr
    assert f"all tasks ran on this machine, in {tmp_path}" in done.stderr


def test_a_run_without_results_needs_patterns(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    run = cluster.bash("true")
    assert run.end() == 0, run.err
    done = cluster.command("fetch", run.run)
    assert done.returncode == 2
    assert "it has no 'results' (name patterns" in done.stderr
    assert cluster.command("fetch", "*.keras").returncode == 0
    file = cluster.command("fetch", "model.keras")
    assert file.returncode == 2
    assert f"a file: `tfcluster fetch {run.run} model.keras`" in file.stderr
