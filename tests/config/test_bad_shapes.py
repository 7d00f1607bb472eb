"""Unknown keys, and values of the wrong type."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import SMALLEST, Bad, check_bad

TASKS = "tasks: {worker: 2}\n"

BAD = [
    Bad("command: a\ntasks: {worker: 1, wroker: 2}\n", "2:20", "unknown key 'wrok"),
    Bad(
        "command: a\ntasks: {wroker: 2}\n",
        "2:9",
        "unknown key 'wroker' (did you mean 'worker'?)",
    ),
    Bad("command: a\ntasks: {master: 1}\n", "2:9", "unknown key 'master' (did you"),
    Bad(f"{SMALLEST}comand: b\n", "3:1", "unknown key 'comand' (did you mean 'com"),
    Bad(
        f"{SMALLEST}restart: {{times: 3}}\n",
        "3:11",
        "unknown key 'times' (one of: ",
    ),
    Bad(f"{SMALLEST}on: push\n", "3:1", "unknown key 'on'"),
    Bad("command: a\n", "1:1", "missing 'tasks' (tasks: {worker: 2})"),
    Bad(f"{SMALLEST}hosts: [{{slots: 2}}]\n", "3:9", "missing 'host' in 'hosts.0'"),
    Bad("name: a\ntasks: {worker: 2, chief: 1}\n", "1:1", "missing 'command': chief"),
    Bad(f"{SMALLEST}backend: ssh\n", "3:10", "backend ssh needs 'hosts' (hosts: ["),
    Bad(f"{SMALLEST}backend: ssh\nhosts: []\n", "4:8", "backend ssh needs 'hosts' ("),
    Bad(f"{SMALLEST}secrets: {{A: {{}}}}\n", "3:14", "secret A needs either 'file'"),
    Bad(
        f"{SMALLEST}hosts: h1\n",
        "3:8",
        "'hosts' must be a list; found h1 (write: [h1])",
    ),
    Bad(
        f"{SMALLEST}hosts: h[1-2]\n",
        "3:8",
        """'hosts' must be a list; found h[1-2] (write: ["h[1-2]"])""",
    ),
    Bad(
        f"{SMALLEST}runtime: {{chief_only: [files]}}\n",
        "3:24",
        "unknown chief_only[0] 'files' (one of: print, summary)",
    ),
    Bad(f"{TASKS}command: 5\n", "2:10", "'command' must be text or a list; found 5"),
    Bad(f"{SMALLEST}restart: 3\n", "3:10", "'restart' must be a mapping; found 3"),
    Bad(f"{SMALLEST}hosts: [5]\n", "3:9", "'hosts[0]' must be text; found 5 (quote"),
    Bad(f"{TASKS}command: []\n", "2:10", "'command' is empty"),
    Bad(f"{TASKS}command: ''\n", "2:11", "the command is empty"),
    Bad(
        "command: a\ntasks: {worker: {server: 'true'}}\n",
        "2:26",
        "'server' must be true or false; found 'true'",
    ),
    Bad(
        f"{SMALLEST}hosts: [{{host: NO}}]\n",
        "3:16",
        "'host' must be text; found NO (YAML reads NO as false; quote it: \"NO\")",
    ),
    Bad(
        f"{SMALLEST}env: {{DEBUG: on}}\n",
        "3:14",
        "'DEBUG' must be text; found on (Y",
    ),
    Bad(
        f"{SMALLEST}ports: 22:22\n",
        "3:8",
        "'ports': YAML 1.1 reads 22:22 as 1342 (quote it: \"22:22\")",
    ),
    Bad(f"{SMALLEST}slurm: {{time: 1:00:00}}\n", "3:15", "'time': YAML 1.1 reads 1:"),
    Bad(
        f"{SMALLEST}ssh: {{port: 010}}\n",
        "3:13",
        "'port': YAML reads 010 as octal (8) (write 8 or 10, or quote it)",
    ),
    Bad(
        f"{SMALLEST}ssh: {{port: 0x16}}\n",
        "3:13",
        "'port': YAML reads 0x16 as 22 (",
    ),
    Bad(f"{SMALLEST}ssh: {{port: 1_0}}\n", "3:13", "'port': YAML reads 1_0 as 10 (w"),
    Bad(
        f"{SMALLEST}env: {{TF_VERSION: 2.10}}\n",
        "3:19",
        "'TF_VERSION' must be text; found 2.10 (YAML reads 2.10 as 2.1; quote it: ",
    ),
    Bad(
        f"{SMALLEST}runtime: {{bucket_mb: 1e-3}}\n",
        "3:22",
        "'bucket_mb' must be a number; found 1e-3 (YAML reads it as text; write 1.0e",
    ),
    Bad(
        f"{SMALLEST}runtime: {{bucket_mb: .inf}}\n",
        "3:22",
        "'bucket_mb': .inf is no",
    ),
    Bad(
        f"{SMALLEST}runtime: {{bucket_mb: .nan}}\n",
        "3:22",
        "'bucket_mb': .nan is no",
    ),
    Bad(
        f"{SMALLEST}runtime: {{bucket_mb: 0}}\n",
        "3:22",
        "'bucket_mb' must be a numb",
    ),
    Bad(f"{SMALLEST}hosts:\n  - host:\n", "4:10", "'host' is empty (give it a value"),
    Bad(f"{SMALLEST}env:\n", "3:5", "'env' is empty"),
    Bad(f"{TASKS}command: ~\n", "2:10", "'command' is empty"),
    Bad(
        "command: a\ntasks: {worker: -1}\n",
        "2:17",
        "'worker' must be a whole number of at least 1; found -1",
    ),
    Bad(
        "command: a\ntasks: {ps: 0, worker: 1}\n",
        "2:13",
        "'ps' must be a whole num",
    ),
    Bad(
        "command: a\ntasks: {worker: {count: 0}}\n",
        "2:25",
        "'count' must be a whole number of at least 1; found 0 (for none, omit the key",
    ),
    Bad(
        "command: a\ntasks: {worker: 1.5}\n",
        "2:17",
        "'worker' must be a whole numbe",
    ),
    Bad(
        "command: a\ntasks: {worker: true}\n",
        "2:17",
        "'worker' must be a whole numb",
    ),
    Bad(
        "command: a\ntasks: {worker: '4'}\n",
        "2:17",
        "'worker' must be a whole numbe",
    ),
    Bad(
        f"command: a\ntasks: {{worker: {'9' * 5000}}}\n",
        "2:17",
        "'worker': has more",
    ),
    Bad(
        "command: a\ntasks: {worker: 1000000}\n",
        "2:17",
        "'worker' must be a whole n",
    ),
    Bad(
        f"{SMALLEST}ports: 0-70000\n",
        "3:8",
        "'ports' must be within 1024-65535; fou",
    ),
    Bad(
        f"{SMALLEST}ports: 80-90\n",
        "3:8",
        "'ports' must be within 1024-65535; found ",
    ),
    Bad(
        f"{SMALLEST}ports: 40000\n",
        "3:8",
        "'ports' must be auto or a range like 400",
    ),
    Bad(
        f"{SMALLEST}ssh: {{port: 70000}}\n",
        "3:13",
        "'port' must be a whole number of",
    ),
    Bad(
        f"{SMALLEST}ssh: {{port: 0}}\n",
        "3:13",
        "'port' must be a whole number of at ",
    ),
    Bad(
        f"{SMALLEST}ports: 40010-40000\n",
        "3:8",
        "range 40010-40000 is reversed (wri",
    ),
    Bad(
        f"{SMALLEST}ports: {{expose: all}}\n",
        "3:17",
        "unknown expose 'all' (one of: run, any)",
    ),
    Bad(
        f"{SMALLEST}ports: {{range: 40000}}\n",
        "3:16",
        "'range' must be auto or a range like 400",
    ),
    Bad(
        f"{SMALLEST}ports: 40000-40000\n",
        "3:8",
        "range has 1 port, 2 tasks on this",
    ),
    Bad(
        f"{SMALLEST}backend: ssh\nhosts: [{{host: a, slots: 2}}]\nports: 40000-40000\n",
        "5:8",
        "range has 1 port, 2 tasks on 1 host need more",
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.words)
def test_bad_shape(bad: Bad, tmp_path: Path) -> None:
    check_bad(bad, tmp_path)
