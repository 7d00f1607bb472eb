"""Tests that a secret reaches the tasks and nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.kit import machine
from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left

CANARY = "canary-5d41402abc4b2a76b9719d911017c592"
CONFIG = """
tasks: {worker: 2}
runtime: {strategy: none}
secrets: {API_KEY: {file: key}}
"""


@pytest.fixture
def key(cluster: Cluster) -> Path:
    path = cluster.folder / "key"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, f"{CANARY}\n".encode())
    os.close(descriptor)
    return path


class Spy:
    """Collects all command lines, as another user could, until the end of the block."""

    def __enter__(self) -> Spy:
        self.seen: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            for pid in machine.pids():
                self.seen.update(machine.cmdline(pid))


def test_a_secret_is_in_no_command_line_and_no_file(
    cluster: Cluster, key: Path
) -> None:
    script = '[ "$API_KEY" = "$(cat key)" ] && echo right; sleep 0.3; exit 33'
    config = cluster.file(f"{CONFIG}command: [bash, -c, '{script}']\n")
    with Spy() as spy:
        running = cluster.start(config)
        assert running.end() == 33
    assert running.text("worker:0") == running.text("worker:1") == "right\n"
    assert any(word.startswith("tfcluster: agent") for word in spy.seen)
    assert not [word for word in spy.seen if CANARY in word]
    said = [running.out, running.err]
    for words in (["plan", config], ["plan", config, "--json"], ["status", "--json"]):
        done = cluster.command(*words)
        assert done.returncode == 0, done.stderr
        said += [done.stdout, done.stderr]
    said.append(cluster.command("launch", config, "--dry-run").stdout)
    assert not [text for text in said if CANARY in text]
    files = [path for path in cluster.state.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if CANARY in path.read_text()]
    assert_nothing_left(running)


def test_a_key_that_others_can_read_is_refused(cluster: Cluster, key: Path) -> None:
    key.chmod(0o644)
    done = cluster.command("launch", cluster.file(f"{CONFIG}command: 'true'\n"))
    assert done.returncode == 2
    assert f"chmod 600 {key}" in done.stderr
    assert "cluster.yaml:4:" in done.stderr
    assert CANARY not in done.stderr
    assert cluster.run_ids() == []


def test_a_secret_can_come_from_the_environment(cluster: Cluster) -> None:
    config = cluster.file(
        "tasks: {worker: 1}\nruntime: {strategy: none}\n"
        "secrets: {API_KEY: {env: MY_KEY}}\n"
        "command: [bash, -c, '[ $API_KEY = canary ] && echo right']\n"
    )
    missing = cluster.command("launch", config)
    assert missing.returncode == 2
    assert "$MY_KEY is not set here" in missing.stderr
    running = cluster.start(config, environ={"MY_KEY": "canary"})
    assert running.end() == 0
    assert running.text("worker:0") == "right\n"
