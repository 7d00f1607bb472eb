"""Trains the MLP of ``train_keras.py`` in torch with DDP over gloo.

``argv[1]`` is the global batch size. Started by torchrun.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, EPOCHS = 30, 4

torch.set_num_threads(1)
dist.init_process_group("gloo")
batch = int(sys.argv[1]) // dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(batch * STEPS, 784)
y = torch.randint(0, 10, (batch * STEPS,))
sizes = [784, 2048, 2048, 2048]
layers: list[nn.Module] = []
for before, after in itertools.pairwise(sizes):
    layers += [nn.Linear(before, after), nn.ReLU()]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(2048, 10)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loss_of = nn.CrossEntropyLoss()
times = []
for _ in range(EPOCHS):
    begin = time.perf_counter()
    for step in range(STEPS):
        rows = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        loss_of(model(x[rows]), y[rows]).backward()
        optimizer.step()
    times.append((time.perf_counter() - begin) / STEPS)
if dist.get_rank() == 0:
    print("TIMES", json.dumps({"step": statistics.median(times[1:])}), flush=True)
dist.destroy_process_group()
