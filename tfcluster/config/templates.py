"""The commented cluster.yaml that ``tfcluster init`` prints, one for each backend."""

from __future__ import annotations

from tfcluster import schedulers

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


def starter(backend: str) -> str:
    """A commented cluster.yaml to start from. Raises ConfigError for an unknown one."""
    return _HEAD + _COMMAND + "\n" + schedulers.get(backend).example + _TAIL
