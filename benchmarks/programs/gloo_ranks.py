"""Makes torch's process group over gloo from tasks of torchrun or tfcluster."""

from __future__ import annotations

import json
import os

import torch.distributed as dist


def init() -> None:
    """Initialise the group, with one rank for each task."""
    if "RANK" not in os.environ:
        cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
        first = next(iter(cluster.values()))[0]
        os.environ |= {
            "RANK": os.environ["TFCLUSTER_RANK"],
            "WORLD_SIZE": os.environ["TFCLUSTER_SIZE"],
            "MASTER_ADDR": first.rpartition(":")[0],
            "MASTER_PORT": os.environ["BENCH_PORT"],
        }
    dist.init_process_group("gloo")
