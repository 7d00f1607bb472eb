"""Times all-reduces of torch tensors over gloo; started by torchrun or tfcluster."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.programs import gloo_ranks
from benchmarks.programs.reduce_times import report


def act(count: int) -> Callable[[], None]:
    tensor = torch.zeros(count)

    def run() -> None:
        dist.all_reduce(tensor)

    return run


torch.set_num_threads(1)
gloo_ranks.init()
report(dist.get_rank(), act, dist.barrier)
dist.destroy_process_group()
