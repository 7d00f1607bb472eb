"""Trains the models of ``train_keras.py`` in torch with DDP over gloo.

``argv[1]`` is the global batch size; ``argv`` may contain ``cnn`` and ``steps=N``.
Started by torchrun or tfcluster.
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

from benchmarks.programs import gloo_ranks

EPOCHS = 4

steps = next((int(w[6:]) for w in sys.argv if w.startswith("steps=")), 30)
torch.set_num_threads(1)
gloo_ranks.init()
batch = int(sys.argv[1]) // dist.get_world_size()
torch.manual_seed(0)
y = torch.randint(0, 10, (batch * steps,))
layers: list[nn.Module] = []
if "cnn" in sys.argv:
    x = torch.randn(batch * steps, 3, 32, 32)
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.ReLU()]
    layers += [nn.Flatten(), nn.Linear(4096, 1152), nn.ReLU(), nn.Linear(1152, 10)]
else:
    x = torch.randn(batch * steps, 784)
    for inputs, outputs in itertools.pairwise([784, 2048, 2048, 2048]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    layers += [nn.Linear(2048, 10)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loss_of = nn.CrossEntropyLoss()
times = []
for _ in range(EPOCHS):
    begin = time.perf_counter()
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        loss_of(model(x[rows]), y[rows]).backward()
        optimizer.step()
    times.append((time.perf_counter() - begin) / steps)
if dist.get_rank() == 0:
    print("TIMES", json.dumps({"step": statistics.median(times[1:])}), flush=True)
dist.destroy_process_group()
