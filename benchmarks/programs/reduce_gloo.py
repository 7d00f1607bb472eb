"""Times all-reduces of torch tensors over gloo; started by torchrun or tfcluster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.programs.reduce_times import report


def act(count: int) -> Callable[[], None]:
    tensor = torch.zeros(count)

    def run() -> None:
        dist.all_reduce(tensor)

    return run


torch.set_num_threads(1)
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
report(dist.get_rank(), act, dist.barrier)
dist.destroy_process_group()
