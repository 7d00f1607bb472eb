"""Values that are well formed but invalid, alone or in combination."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.config.files import SMALLEST, Bad, check_bad, problems

TASKS = "tasks: {worker: 2}\n"

BAD = [
    Bad(
        f"{SMALLEST}hosts: [a, b, a]\n",
        "3:15",
        "'a' is already listed at 3:9 (for ",
    ),
    Bad(
        f"{SMALLEST}hosts: ['n[1-4]', n3]\n",
        "3:19",
        "'n3' is already listed at 3:9",
    ),
    Bad("command: a\ntasks: {ps: 2}\n", "2:8", "needs at least one worker or chief"),
    Bad("command: a\ntasks: {}\n", "2:8", "needs at least one worker or chief"),
    Bad("command: a\ntasks: {chief: 2}\n", "2:16", "only one chief is possible; fou"),
    Bad(
        f"{SMALLEST}runtime: {{strategy: replicated}}\n",
        "3:21",
        "strategy replicated needs ps tasks",
    ),
    Bad(
        "command: a\ntasks: {worker: 1, ps: 2}\nruntime: {strategy: collective}\n",
        "2:24",
        "ps tasks are not used under collective (remove them, or set strategy: param",
    ),
    Bad(
        f"{SMALLEST}hosts: ['-oProxyCommand=touch X']\n",
        "3:9",
        "'-oProxyCommand=tou",
    ),
    Bad(f"{SMALLEST}hosts: ['a b']\n", "3:9", "'a b' is not a host name"),
    Bad(f"{SMALLEST}hosts: ['a;b']\n", "3:9", "'a;b' is not a host name"),
    Bad(f"{SMALLEST}hosts: ['$(id)']\n", "3:9", "'$(id)' is not a host name"),
    Bad(f'{SMALLEST}hosts: ["a\\nb"]\n', "3:9", "'hosts[0]' must be one line"),
    Bad(
        f"{SMALLEST}hosts: [{'a' * 254}]\n",
        "3:9",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ),
    Bad(
        f"{SMALLEST}hosts: [me@a]\n",
        "3:9",
        "'me@a' is not a host name (write {host",
    ),
    Bad(
        f"{SMALLEST}ssh: {{user: -l}}\n",
        "3:13",
        "'user' must be a user name; found",
    ),
    Bad(
        f"{SMALLEST}hosts: [{{host: a, address: -x}}]\n",
        "3:28",
        "'-x' is not a host",
    ),
    Bad(
        f"{SMALLEST}hosts: ['[::1:22']\n",
        "3:10",
        "'[::1:22': write IPv6 as \"[::1]",
    ),
    Bad(
        f"{SMALLEST}hosts: ['::1:22']\n",
        "3:10",
        "'::1:22': write IPv6 as \"[::1]\"",
    ),
    Bad(f"{SMALLEST}hosts: ['node[1-3']\n", "3:14", "'node[1-3': ']' is missing"),
    Bad(f"{SMALLEST}hosts: ['n[3-1]']\n", "3:12", "'n[3-1]': range 3-1 is reversed"),
    Bad(
        f"{SMALLEST}hosts: ['n[1-1000000000]']\n",
        "3:10",
        "'n[1-1000000000]': expand",
    ),
    Bad(f"{SMALLEST}env: {{TF_CONFIG: x}}\n", "3:7", "TF_CONFIG is set by tfcluster"),
    Bad(f"{SMALLEST}env: {{TFCLUSTER_RANK: x}}\n", "3:7", "TFCLUSTER_RANK is set by"),
    Bad(f"{SMALLEST}env: {{1A: x}}\n", "3:7", "'1A' is not the name of a variable ("),
    Bad(f'{SMALLEST}env: {{A: "x\\ny"}}\n', "3:10", "a variable's value must be one"),
    Bad(
        "command: a\ntasks: {worker: {env: {CUDA_VISIBLE_DEVICES: '0'}}}\n",
        "2:24",
        "CUDA_VISIBLE_DEVICES is set by tfcluster (set the number with 'gpus' under",
    ),
    Bad(
        f"{SMALLEST}env: {{A: {'x' * 140000}}}\n",
        "3:10",
        "a variable is longer than",
    ),
    Bad(
        f"{SMALLEST}env: {{A: b}}\nsecrets: {{A: {{env: HOME}}}}\n",
        "4:14",
        "A is set under 'env:' too",
    ),
    Bad(
        f"{SMALLEST}env: {{A: 'x/${{NOPE}}'}}\n",
        "3:13",
        "$NOPE is not set here (use ${NOPE:-default}",
    ),
    Bad(
        f"{SMALLEST}env: {{A: $DATA}}\n",
        "3:10",
        "$DATA is not expanded: only ${DATA",
    ),
    Bad(
        f"{SMALLEST}env: {{A: '${{A B}}'}}\n",
        "3:11",
        "${A B} is not a supported reference",
    ),
    Bad(
        f"{SMALLEST}secrets: {{A: {{env: NOPE}}}}\n",
        "3:20",
        "$NOPE is not set here",
    ),
    Bad(f"{TASKS}command: a ${{NOPE}}\n", "2:12", "$NOPE is not set here"),
    Bad(
        f"{SMALLEST}workdir: /no/such/folder\n",
        "3:10",
        "'/no/such/folder' does not",
    ),
    Bad(f"{SMALLEST}workdir: /etc/passwd\n", "3:10", "'/etc/passwd' is not a folder"),
    Bad(
        f"{SMALLEST}workdir: {{path: /no/such, sync: x}}\nbackend: ssh\nhosts: [a]\n",
        "3:17",
        "'/no/such' does not exist",
    ),
    Bad(
        f"{SMALLEST}workdir: {{sync: '~'}}\n",
        "3:17",
        "'~' is not a separate folder on the hosts",
    ),
    Bad(
        "command: a\ntasks: {worker: {count: 2, min: 3}}\nrestart: {max: 1}\n",
        "2:33",
        "min is 3, but there are 2",
    ),
    Bad(
        "command: a\ntasks: {worker: {count: 2, min: 1}}\n",
        "2:33",
        "'min' has no effect without restarts",
    ),
    Bad(
        f"{SMALLEST}restart: {{within: 1h}}\n",
        "3:19",
        "'within' has no effect without 'max'",
    ),
    Bad(
        f"{SMALLEST}restart: {{backoff: 5s}}\n",
        "3:20",
        "'backoff' has no effect without 'max'",
    ),
    Bad(
        f"{SMALLEST}restart: {{max: 1, on_time_limit: requeue}}\n",
        "3:34",
        "'requeue' is not for backend local: it has no time limit",
    ),
    Bad(
        f"{SMALLEST}backend: ssh\nhosts: [a]\n"
        "restart: {max: 1, on_time_limit: requeue}\n",
        "5:34",
        "'requeue' is not for backend ssh: it has no time limit",
    ),
    Bad(
        f"{SMALLEST}backend: sge\nrestart: {{max: 1, on_time_limit: requeue}}\n",
        "4:34",
        "'requeue' is not for backend sge: Grid Engine does not start a job on several",
    ),
    Bad(
        f"{SMALLEST}backend: slurm\nrestart: {{on_time_limit: requeue}}\n",
        "4:26",
        "'requeue' needs 'max': a requeued job counts as a restart",
    ),
    Bad(
        f"{SMALLEST}backend: slurm\nslurm: {{options: [--no-requeue]}}\n"
        "restart: {max: 1, on_time_limit: requeue}\n",
        "4:19",
        "'--no-requeue' forbids what 'restart.on_time_limit' asks for",
    ),
    Bad(
        "command: a\ntasks: {worker: 1, chief: {min: 1}}\nrestart: {max: 1}\n",
        "2:33",
        "'min' is for worker, not for chief",
    ),
    Bad(
        "command: a\ntasks: {worker: {count: 2, min: 1}}\nrestart: {max: 1}\n"
        "runtime: {strategy: none}\n",
        "2:33",
        "'min' is for strategy collective, not for none",
    ),
    Bad(
        f"{SMALLEST}runtime: {{strategy: local_sgd, shards: 8}}\n",
        "3:40",
        "'shards' is for strategy collective, not for local_sgd",
    ),
    Bad(
        f"{SMALLEST}runtime: {{shards: 8, transport: tensorflow}}\n",
        "3:33",
        "'shards' is not for transport tensorflow",
    ),
    Bad(
        f"{SMALLEST}runtime: {{shards: 8, batch: per_worker}}\n",
        "3:29",
        "'shards' needs batch: global",
    ),
    Bad(
        f"{SMALLEST}runtime: {{shards: 8, compression: fp16}}\n",
        "3:35",
        "'shards' needs compression: none",
    ),
    Bad(
        "command: a\ntasks: {worker: 2, chief: 1}\nruntime: {shards: 2}\n",
        "3:19",
        "2 shards are too few for 3 ranks",
    ),
    Bad(
        f"{SMALLEST}runtime: {{strategy: local_sgd, shard_optimizer: true}}\n",
        "3:49",
        "'shard_optimizer' is for strategy collective, not for local_sgd",
    ),
    Bad(
        f"{SMALLEST}runtime: {{shards: 8, shard_optimizer: true}}\n",
        "3:39",
        "'shard_optimizer' is not for 'shards'",
    ),
    Bad(f"{SMALLEST}workdir: {{sync: /}}\n", "3:17", "'/' is not a separate folder"),
    Bad(
        f"{SMALLEST}workdir: {{sync: ../x}}\n",
        "3:17",
        "'../x' is not a separate folder",
    ),
    Bad(
        f"{SMALLEST}workdir: {{sync: ~b/x}}\n",
        "3:17",
        "'~b/x' is not a separate folder",
    ),
    Bad(f"{SMALLEST}workdir: {{exclude: [a]}}\n", "3:20", "'exclude' is for 'sync'"),
    Bad(f"{SMALLEST}workdir: ~b/x\n", "3:10", "'~user' is not expanded"),
    Bad(
        f"{SMALLEST}grace: 10\n",
        "3:8",
        "'grace' must be a duration; found 10 (write",
    ),
    Bad(
        f"{SMALLEST}start_timeout: 5 min\n",
        "3:16",
        "'start_timeout' must be a duration; found 5 min (write 5m)",
    ),
    Bad(f"{SMALLEST}grace: -1s\n", "3:8", "'grace' must be a duration; found -1s"),
    Bad(f"{SMALLEST}grace: 1e9h\n", "3:8", "'grace' must be a duration; found 1e9h"),
    Bad(
        f"{SMALLEST}grace: 999999h\n",
        "3:8",
        "'grace' must be at most 366d; found 9",
    ),
    Bad(f"{SMALLEST}grace: off\n", "3:8", "'grace' must be a duration; found off"),
    Bad(
        f"{SMALLEST}start_timeout: 0s\n",
        "3:16",
        "'start_timeout' must be longer th",
    ),
    Bad(
        f"{SMALLEST}progress_timeout: on\n",
        "3:19",
        "'progress_timeout' must be a du",
    ),
    Bad(
        f"{SMALLEST}backend: slrum\n",
        "3:10",
        "unknown backend 'slrum' (did you mean",
    ),
    Bad(f"{SMALLEST}partition: gpu\n", "3:1", "'partition' belongs under 'slurm:'"),
    Bad(f"{SMALLEST}gpus: 2\n", "3:1", "unknown key 'gpus' (tasks: {worker: {count"),
    Bad(f"{SMALLEST}run: a\n", "3:1", "unknown key 'run' (did you mean 'command'?)"),
    Bad(
        "command: a\ntasks: 3\n",
        "2:8",
        "'tasks' must be a mapping; found 3 (tasks: {worker: 3})",
    ),
    *[
        Bad(
            f"{SMALLEST}{section}: {{{key}: 1}}\n",
            f"3:{len(section) + 4}",
            f"unknown key '{key}' ({hint}",
        )
        for section, key, hint in (
            ("sge", "pe", "did you mean 'parallel_environment'?)"),
            ("sge", "walltime", 'resources: {h_rt: "4:00:00"})'),
            ("slurm", "queue", "did you mean 'partition'?)"),
            ("slurm", "mem_gb", "did you mean 'mem'?)"),
            ("slurm", "timeout_min", "did you mean 'time'?)"),
            ("slurm", "cores", "did you mean 'cpus_per_task'?)"),
            ("slurm", "cpus-per-task", "did you mean 'cpus_per_task'?)"),
            ("slurm", "slurm_qos", "did you mean 'qos'?)"),
            ("slurm", "gpus", "tasks: {worker: {count: 2, gpus: 1}})"),
            ("slurm", "mail_user", "one of: nodes, tasks_per_node, "),
        )
    ],
    *[
        Bad(
            f"backend: slurm\ncommand: a\ntasks: {tasks}\nslurm: {slurm}\n", at, message
        )
        for tasks, slurm, at, message in (
            (
                "{worker: 7}",
                "{nodes: 2, tasks_per_node: 2}",
                "4:35",
                "2 nodes with 2 tasks each: 4, too few for 7 tasks (",
            ),
            ("{worker: 2}", "{nodes: 4}", "4:16", "4 nodes are too many for 2 tasks ("),
            (
                "{worker: 4}",
                "{options: [--ntasks=2]}",
                "4:19",
                "option --ntasks is not a",
            ),
            (
                "{worker: 4}",
                "{mem: 1G, options: [--mem=2G]}",
                "4:28",
                "option --mem is also set by 'slurm.mem' (",
            ),
            (
                "{worker: {count: 4, gpus: 1}}",
                "{nodes: 2, gpus_per_node: 1}",
                "4:34",
                "1 GPUs per node are too few: the tasks of a node need 2 (",
            ),
            ("{worker: {gpus: 1}, ps: 1}", "{}", "4:8", "the GPUs of a node are unkn"),
        )
    ],
    Bad(
        "backend: sge\ncommand: a\ntasks: {worker: 3}\nsge: {slots: 2}\n",
        "4:14",
        "2 slots are too few for 3 tasks (",
    ),
    Bad(
        f"{SMALLEST}slurm: {{command: a}}\n",
        "3:9",
        "'command' belongs at the top le",
    ),
    Bad(f"{SMALLEST}name: a/b\n", "3:7", "'name' must be at most 64 letters, digits"),
    Bad(f"{SMALLEST}name: ..\n", "3:7", "'name' must be at most 64 letters"),
    Bad(f'{SMALLEST}name: "a\\nb"\n', "3:7", "'name' must be at most 64 letters"),
    Bad(f"{SMALLEST}name: '#SBATCH'\n", "3:7", "'name' must be at most 64 letters"),
    Bad(f"{SMALLEST}name: {'a' * 65}\n", "3:7", "'name' must be at most 64 letters"),
    Bad(f"{TASKS}command: a 'b c\n", "2:12", "a quote is not closed"),
    Bad(
        f"{TASKS}command: a | b\n",
        "2:12",
        "'|' needs a shell (no shell runs the co",
    ),
    Bad(f"{TASKS}command: cd a && b\n", "2:15", "'&&' needs a shell"),
    Bad(f"{TASKS}command: a $X\n", "2:12", "$X is not expanded (write ${X}, or"),
    Bad(
        f"{TASKS}command: A=1 b\n",
        "2:10",
        "A=... before a command needs a shell (wr",
    ),
    Bad(f"{TASKS}command: a ~/b\n", "2:12", "'~' is not expanded (write ${HOME})"),
    Bad(
        "command: a\ntasks: {worker: 1, ps: {command: b}}\n",
        "2:34",
        "ps tasks run a",
    ),
    Bad(
        "command: a\ntasks: {worker: 1, ps: {gpus: 1}}\n",
        "2:31",
        "ps tasks take no G",
    ),
    Bad(
        "command: a\ntasks: {worker: 1, evaluator: {server: true}}\n",
        "2:40",
        "'server' is for chief and worker, not for evaluator",
    ),
    Bad(
        "command: a\ntasks: {worker: {server: true, command: b}}\n",
        "2:41",
        "a server runs no command",
    ),
    Bad(
        f"{SMALLEST}slurm: {{options: [x]}}\n",
        "3:19",
        "'x' is not an option: it does",
    ),
    Bad(
        f"{SMALLEST}slurm: {{options: [--wrap=x]}}\n",
        "3:19",
        "option --wrap is not a",
    ),
    Bad(
        f"{SMALLEST}slurm: {{options: [--array=1-3]}}\n",
        "3:19",
        "option --array is not allowed",
    ),
    Bad(
        f"{SMALLEST}slurm: {{options: [-a1-3]}}\n",
        "3:19",
        "option --array is not allowed",
    ),
    Bad(
        f"{SMALLEST}sge: {{options: [-t, 1-3]}}\n",
        "3:17",
        "option -t is not allowed",
    ),
    Bad(
        f"{SMALLEST}sge: {{options: [-P, 'a b']}}\n",
        "3:21",
        "'a b' cannot be used in a directive of qsub",
    ),
    Bad(
        f"{SMALLEST}pbs: {{options: [-J, 1-3]}}\n",
        "3:17",
        "option -J is not allowed",
    ),
    Bad(
        f"{SMALLEST}lsf: {{options: [-K]}}\n",
        "3:17",
        "option -K is not allowed",
    ),
    Bad(
        f'{SMALLEST}slurm: {{options: ["--a=\\nb"]}}\n',
        "3:19",
        "'options[0]' must be",
    ),
    Bad(
        f'{SMALLEST}slurm: {{partition: "a\\nb"}}\n',
        "3:20",
        "'partition' must be wor",
    ),
    Bad(f"{SMALLEST}sge: {{options: [-V]}}\n", "3:17", "option -V is not allowed"),
    Bad(f"{SMALLEST}sge: {{queue: -x}}\n", "3:14", "'queue' must be words of letters"),
    Bad(
        f"{SMALLEST}sge: {{resources: {{h_rt: 'a,b'}}}}\n",
        "3:25",
        "'h_rt' must be one",
    ),
    Bad(
        f"{SMALLEST}sge: {{resources: {{'a b': x}}}}\n",
        "3:19",
        "'a b' must be one word",
    ),
    Bad(
        f"{SMALLEST}restart: {{scope: task}}\n",
        "3:18",
        "under collective a single task",
    ),
    Bad(
        f"{SMALLEST}runtime: {{strategy: local_sgd, sync_every: 5, sync_seconds: 2}}\n",
        "3:61",
        "'sync_every' and 'sync_seconds' are both set",
    ),
    Bad(
        f"{SMALLEST}backend: ssh\nhosts: [a]\nssh: {{identity_file: /no/such}}\n",
        "5:22",
        "'/no/such' does not exist",
    ),
    Bad(
        f"{SMALLEST}hosts: [{{host: 'a[1-2]', address: x}}]\n",
        "3:35",
        "one address for",
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.words)
def test_bad_meaning(bad: Bad, tmp_path: Path) -> None:
    check_bad(bad, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_workdir_that_someone_else_put_into_a_shared_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "x").mkdir()
    os.chown(shared / "x", 12345, -1)
    (problem,) = problems(tmp_path, f"{SMALLEST}workdir: shared/x\n")
    assert problem.where == "cluster.yaml:3:10"
    assert "belongs to uid 12345" in problem.message


# Warnings.


def test_one_machine_under_two_names(tmp_path: Path) -> None:
    hosts = "hosts: [{host: a, address: 10.9.0.1}, 10.9.0.1]\n"
    (problem,) = problems(tmp_path, f"{SMALLEST}{hosts}backend: ssh\n")
    assert problem.warning
    assert problem.where == "cluster.yaml:3:39"
    assert problem.message == "a and 10.9.0.1 are the same machine: 10.9.0.1"


def test_hosts_without_a_backend_are_said_to_be_unused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, f"{SMALLEST}hosts: [a, b]\n")
    assert problem.warning
    assert problem.where == "cluster.yaml:3:8"
    assert "'hosts' is not used" in problem.message
    assert problems(tmp_path, f"{SMALLEST}hosts: [a]\nbackend: local\n") == []


@pytest.mark.parametrize(
    "secrets",
    [
        "{KEY: hunter22hunter22}",
        "{KEY: [hunter22]}",
        "{KEY: {file: [hunter22]}}",
        "{KEY: {file: hunter22}}",
        "{KEY: {env: hunter-22}}",
        "{KEY: {env: hunter22}}",
        "{KEY: {value: hunter22}}",
        "[hunter22]",
        "hunter22",
    ],
)
def test_no_problem_shows_what_may_be_a_secret(secrets: str, tmp_path: Path) -> None:
    reported = problems(tmp_path, f"{SMALLEST}secrets: {secrets}\n")
    assert [problem.where.rpartition(":")[0] for problem in reported] == [
        "cluster.yaml:3"
    ]
    assert "hunter" not in str(reported[0])


@pytest.mark.parametrize("key", ["secrets.KEY", "secrets.KEY.env", "secrets"])
def test_no_problem_of_a_flag_shows_what_may_be_a_secret(
    key: str, tmp_path: Path
) -> None:
    reported = problems(tmp_path, SMALLEST, overrides=[f"{key}=hunter-22"])
    assert [problem.where for problem in reported] == [f"--set {key}=..."]
    assert "hunter" not in str(reported[0])


def test_one_broken_item_hides_no_problem_of_its_neighbours(tmp_path: Path) -> None:
    content = (
        "command: a\n"
        "tasks: {worker: {count: x}, ps: {command: b}}\n"
        "hosts: ['bad one', 5, {host: n1, gpu: 3}, 'n[5-1]', {slots: 2}, 'b c']\n"
        "slurm: {nodes: 0, options: [x, 5, --wrap=a]}\n"
    )
    assert [problem.where for problem in problems(tmp_path, content)] == [
        "cluster.yaml:2:25",
        "cluster.yaml:2:43",
        "cluster.yaml:3:9",
        "cluster.yaml:3:20",
        "cluster.yaml:3:34",
        "cluster.yaml:3:46",
        "cluster.yaml:3:53",
        "cluster.yaml:3:65",
        "cluster.yaml:4:16",
        "cluster.yaml:4:29",
        "cluster.yaml:4:32",
        "cluster.yaml:4:35",
    ]


def test_a_secret_under_env(tmp_path: Path) -> None:
    content = f"{SMALLEST}env: {{WANDB_API_KEY: abc, KEYBOARD: us}}\n"
    (problem,) = problems(tmp_path, content)
    assert problem.warning
    assert problem.where == "cluster.yaml:3:22"
    assert problem.message == (
        "WANDB_API_KEY looks like a secret, and values under 'env:' are shown"
    )
    assert "abc" not in str(problem)


@pytest.mark.parametrize("key", ["sync_every: 5", "synchronous: true"])
def test_what_does_nothing_under_the_strategy(key: str, tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, f"{SMALLEST}runtime: {{{key}}}\n")
    assert problem.warning
    assert "has no effect under collective" in problem.message


def test_without_the_runtime_nothing_is_traced(tmp_path: Path) -> None:
    content = f"{SMALLEST}runtime: {{strategy: none, trace: true}}\n"
    (problem,) = problems(tmp_path, content)
    assert problem.warning
    assert problem.message == "'trace' records no steps under none"


@pytest.mark.parametrize("strategy", ["parameter_server", "replicated"])
def test_what_goes_to_a_ps_is_not_compressed(strategy: str, tmp_path: Path) -> None:
    content = (
        "command: a\ntasks: {worker: 2, ps: 1}\n"
        f"runtime: {{strategy: {strategy}, compression: fp16}}\n"
    )
    (problem,) = problems(tmp_path, content)
    assert problem.warning
    assert problem.message == (
        f"'compression' has no effect under {strategy}: it is for collective"
    )


def test_weights_are_not_compressed(tmp_path: Path) -> None:
    runtime = "runtime: {strategy: local_sgd, compression: fp16}\n"
    (problem,) = problems(tmp_path, SMALLEST + runtime)
    assert problem.warning
    assert "weights are sent as is" in problem.message


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("error_feedback: true", "needs 'compression'"),
        (
            "error_feedback: true, compression: bf16, strategy: local_sgd",
            "is for strategy collective, not for local_sgd",
        ),
        (
            "error_feedback: true, compression: fp16, transport: mpi",
            "needs transport host, not mpi",
        ),
    ],
)
def test_error_feedback_where_nothing_feeds_back(
    runtime: str, words: str, tmp_path: Path
) -> None:
    reported = problems(tmp_path, f"{SMALLEST}runtime: {{{runtime}}}\n")
    (problem,) = [problem for problem in reported if not problem.warning]
    assert words in problem.message


def test_error_feedback_with_compression(tmp_path: Path) -> None:
    runtime = "runtime: {error_feedback: true, compression: bf16}\n"
    assert problems(tmp_path, SMALLEST + runtime) == []


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("shard_tables: 100MB, strategy: local_sgd", "is for strategy collective"),
        ("shard_tables: 100MB, shards: 4", "is not for 'shards'"),
        ("shard_tables: 1GB, batch: per_worker", "needs batch: global"),
        ("shard_tables: 100", "a size, or off"),
        ("shard_tables: 0MB", "a size, or off"),
    ],
)
def test_divided_tables_where_they_make_no_sense(
    runtime: str, words: str, tmp_path: Path
) -> None:
    reported = problems(tmp_path, f"{SMALLEST}runtime: {{{runtime}}}\n")
    (problem,) = [problem for problem in reported if not problem.warning]
    assert words in problem.message


@pytest.mark.parametrize("size", ["off", "1.5GB", "64MiB"])
def test_divided_tables(size: str, tmp_path: Path) -> None:
    runtime = f"runtime: {{shard_tables: {size}}}\n"
    assert problems(tmp_path, SMALLEST + runtime) == []


# Secrets.


def test_a_secret_file_must_be_closed_to_others(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o644)
    content = f"{SMALLEST}secrets: {{A: {{file: secret}}}}\n"
    (problem,) = problems(tmp_path, content)
    assert problem.where == "cluster.yaml:3:21"
    assert problem.message == f"'{secret}' is open to others (0644)"
    assert problem.hint == f"chmod 600 {secret}"
    secret.chmod(0o600)
    assert problems(tmp_path, content) == []


def test_a_secret_file_that_is_not_here_is_warned_of(tmp_path: Path) -> None:
    content = f"{SMALLEST}secrets: {{A: {{file: ~/none}}}}\n"
    (problem,) = problems(tmp_path, content)
    assert problem.warning
    assert problem.message == "'/home/a/none' does not exist here"


def test_a_secret_is_never_opened(tmp_path: Path) -> None:
    """The secret is a named pipe: a program that opened it would hang."""
    os.mkfifo(tmp_path / "secret", 0o600)
    assert stat.S_ISFIFO((tmp_path / "secret").stat().st_mode)
    content = f"{SMALLEST}secrets: {{A: {{file: secret}}}}\n"
    (problem,) = problems(tmp_path, content)
    assert "is not a plain file" in problem.message


def test_mistakes_of_several_kinds_in_a_list_keep_their_places(tmp_path: Path) -> None:
    content = f'{SMALLEST}backend: ssh\nhosts: [5, {{slots: 2}}, "-x", {{host: [1]}}]\n'
    places = [problem.where for problem in problems(tmp_path, content)]
    assert places == [f"cluster.yaml:4:{column}" for column in (9, 12, 24, 37)]
