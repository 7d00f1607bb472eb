"""The commented cluster.yaml that ``tfcluster init`` prints, one for each backend."""

from __future__ import annotations

_HEAD = """\
# A TensorFlow cluster and what runs on it: `tfcluster launch cluster.yaml`.
# What each key means: docs/configuration.md, or `tfcluster schema` for your editor.

"""

_COMMAND = """\
# Split as a shell would, but no shell runs it. `python` is the interpreter below.
command: python train.py
# python: /opt/venv/bin/python   # default: the one that runs tfcluster
# workdir: .                     # default: the folder of this file
# env: {OMP_NUM_THREADS: "1"}
# secrets: {WANDB_API_KEY: {file: ~/.wandb}}
"""

_TAIL = """\

# runtime:
#   strategy: collective         # parameter_server, replicated, local_sgd, none
#   batch: global                # the script's batch is that of all workers together

# restart: {max: 2}              # restart after a failure
# progress_timeout: 10m          # end a run that makes no step for this long
"""

_BODIES = {
    "local": """\
backend: local                   # all tasks on this machine

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 2, gpus: 1}
  # ps: 1                        # parameter servers, built in
  # evaluator: 1                 # runs the command alongside the training
""",
    "ssh": """\
backend: ssh
hosts: [node1, node2]            # or "node[1-4]", or {host: node1, slots: 4, gpus: 4}
# ssh: {user: me, identity_file: ~/.ssh/id_ed25519}

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 2, gpus: 1}
  # ps: 1                        # parameter servers, built in
# ports: 40000-41000             # if a firewall opens only these
""",
    "slurm": """\
backend: slurm                   # `tfcluster launch` submits a job, or uses its own
slurm:
  nodes: 2                       # the tasks below are divided among them
  time: 1h
  # mem: 16G                     # of each node
  # cpus_per_task: 8
  # partition: gpu
  # account: x
  # options: ["--exclusive"]     # any other options of sbatch

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 8, gpus: 1}  # the job asks for these GPUs
  # ps: 1                        # parameter servers, built in
""",
    "sge": """\
backend: sge                     # `tfcluster launch` submits a job, or uses its own
sge:
  parallel_environment: mpi      # one of `qconf -spl`
  resources: {h_rt: "1:00:00"}   # quoted: YAML reads 1:00:00 as 3600
  # queue: all.q
  # options: ["-P", "x"]

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # ps: 1                        # parameter servers, built in
""",
}


def starter(backend: str) -> str:
    """A commented cluster.yaml to start from. Raises ValueError for an unknown one."""
    if backend not in _BODIES:
        raise ValueError(f"unknown backend {backend!r}: one of {', '.join(_BODIES)}")
    return _HEAD + _COMMAND + "\n" + _BODIES[backend] + _TAIL
