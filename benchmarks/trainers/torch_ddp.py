"""Trains with PyTorch: DistributedDataParallel over gloo."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainers import workload
from benchmarks.trainers.workload import (
    CATEGORIES,
    COUNTS,
    FILTERS,
    TABLE_ROWS,
    VOCABULARY,
    WORDS,
)


def dense(*sizes: int) -> list[nn.Module]:
    """Fully connected layers of these sizes, with a ReLU after each."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers


def cnn(filters: list[tuple[int, int]]) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for count, stride in filters:
        layers += [
            nn.Conv2d(channels, count, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(count),
            nn.ReLU(),
        ]
        channels = count
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers)


def cnn_dense(filters: list[tuple[int, int]]) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for count, stride in filters:
        layers += [nn.Conv2d(channels, count, 3, stride, padding=1), nn.ReLU()]
        channels = count
    # Strides leave 4 x 4 of 32 x 32 pixels.
    layers += [nn.Flatten(), *dense(channels * 16, 1152), nn.Linear(1152, 10)]
    return nn.Sequential(*layers)


class LSTM(nn.Module):  # type: ignore[misc] # torch need not be there
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.embedding(tokens))
        return self.head(last[0])


class Block(nn.Module):  # type: ignore[misc] # torch need not be there
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        a = self.norms[0](x)
        x = x + self.attention(a, a, a, need_weights=False)[0]
        return x + self.dense(self.norms[1](x))


class Transformer(nn.Module):  # type: ignore[misc] # torch need not be there
    def __init__(self) -> None:
        super().__init__()
        width = 128
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(Block(width), Block(width), nn.LayerNorm(width))
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(WORDS))
        return self.head(self.blocks(x).mean(dim=1))


class DLRM(nn.Module):  # type: ignore[misc] # torch need not be there
    def __init__(self) -> None:
        super().__init__()
        width, vectors = 32, CATEGORIES + 1
        self.bottom = nn.Sequential(*dense(COUNTS, 256, width))
        self.tables = nn.ModuleList(
            [nn.Embedding(TABLE_ROWS, width) for _ in range(CATEGORIES)]
        )
        pairs = vectors * (vectors - 1) // 2
        self.top = nn.Sequential(*dense(width + pairs, 256, 128), nn.Linear(128, 2))

    def forward(self, columns: Tensor) -> Tensor:
        numbers = self.bottom(torch.log1p(columns[:, :COUNTS].float()))
        categories = columns[:, COUNTS:].unbind(dim=1)
        vectors = [numbers]
        for table, column in zip(self.tables, categories, strict=True):
            vectors.append(table(column))
        pairs = itertools.combinations(vectors, 2)
        products = [(a * b).sum(dim=1, keepdim=True) for a, b in pairs]
        return self.top(torch.cat([numbers, *products], dim=1))


MODELS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(*dense(784, 2048, 2048, 2048), nn.Linear(2048, 10)),
    "cnn": lambda: cnn(FILTERS["cnn"]),
    "cnn20": lambda: cnn(FILTERS["cnn20"]),
    "cnn_dense": lambda: cnn_dense(FILTERS["cnn_dense"]),
    "lstm": LSTM,
    "transformer": Transformer,
    "dlrm": DLRM,
}


def main() -> None:
    job = workload.parse()
    rank, size = workload.place()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    rows, labels = job.rows_of_rank(rank, size)
    x, y = torch.from_numpy(rows), torch.from_numpy(labels)
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    model = MODELS[job.model]()
    if size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    if job.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loss_of = nn.CrossEntropyLoss()

    def run(steps: int) -> float:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
        return float(loss.item())

    workload.train(job, run, sum(weight.numel() for weight in model.parameters()))
    if size > 1:
        dist.destroy_process_group()


main()
