"""The shape of cluster.yaml together with the sections of schedulers; its JSON Schema.

A scheduler names the kind of each of its keys; here, these become kinds of values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from tfcluster import __version__, schedulers
from tfcluster.base.light_dataclasses import replace
from tfcluster.config import field_types as kinds
from tfcluster.config.models import ClusterSection
from tfcluster.config.shape import (
    Key,
    Kind,
    ListShape,
    MapOf,
    Nested,
    Section,
    section_json,
)
from tfcluster.schedulers.base import Scheduler

KINDS: dict[str, Kind] = {
    "count": kinds.COUNT,
    "gpus": kinds.GPUS,
    "memory": kinds.MEMORY,
    "time": kinds.TIME,
    "word": kinds.WORD,
    "words": kinds.WORD_LIST,
    "line": kinds.LINE,
    "resources": MapOf(kinds.WORD, kinds.RESOURCE),
    "options": ListShape(kinds.LINE),
}
"""Kind of a key, as in ``setting(kind, ...)`` -> what values it takes."""


def relevant(names: Iterable[str]) -> tuple[Scheduler, ...]:
    others = {*names} - {*schedulers.names()}
    return (*schedulers.built_in(), *mentioned(others))


def mentioned(names: Iterable[str]) -> tuple[Scheduler, ...]:
    """The schedulers among these words; keys that every file can have are none."""
    words = sorted({*names} - {*ClusterSection.keys})
    return tuple(filter(None, map(schedulers.find, words)))


@functools.cache
def cluster_model(possible: tuple[Scheduler, ...]) -> type[ClusterSection]:
    """``ClusterSection`` with a section for each scheduler that has settings."""
    launchers = [scheduler.launcher for scheduler in possible if scheduler.launcher]
    keys = {
        name: replace(ClusterSection.keys[name], kind=kinds.words(*words))
        for name, words in (
            ("backend", [scheduler.name for scheduler in possible]),
            ("launcher", ["auto", *launchers]),
        )
    }
    for scheduler in possible:
        if scheduler.settings is not None:
            about = f"Backend {scheduler.name}: {scheduler.title}."
            keys[scheduler.name] = Key(Nested(_section(scheduler.settings)), about, {})
    return type(
        "ClusterSection", (ClusterSection,), {**keys, "__doc__": ClusterSection.__doc__}
    )


def _section(settings: type[Any]) -> type[Section]:
    keys = {}
    for field in dataclasses.fields(settings):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = list(default) if isinstance(default, tuple) else default
        kind, about = KINDS[field.metadata["kind"]], field.metadata["about"]
        keys[field.name] = Key(kind, about, default)
    name = settings.__name__.removesuffix("Settings")
    return type(name, (Section,), {**keys, "__doc__": settings.__doc__})


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ID = f"https://tfcluster.example/schema/{__version__}/cluster.schema.json"


def schema() -> dict[str, Any]:
    """A schema that refuses unknown keys; loading checks what a schema cannot say."""
    shapes: dict[str, Any] = {}
    whole = section_json(cluster_model(relevant(())), shapes)
    head = {"$schema": _DIALECT, "$id": _ID, "title": "cluster.yaml"}
    return {**head, "$defs": shapes, **whole}


_HEAD = """\
# A TensorFlow cluster and what runs on it: `tfcluster launch cluster.yaml`.
# What each key means: docs/configuration.md, or `tfcluster schema` for your editor.

# Split as a shell would, but no shell runs it. `python` is the interpreter below.
command: python train.py
# python: /opt/venv/bin/python   # default: the one that runs tfcluster
# workdir: .                     # default: the folder of this file
# env: {OMP_NUM_THREADS: "1"}
# secrets: {WANDB_API_KEY: {file: ~/.wandb}}

"""

_TAIL = """\

tasks:
  worker: 2                      # rank 0 is worker 0, or a chief
  # worker: {count: 8, gpus: 1}  # GPUs for each task
  # ps: 1                        # parameter servers, built in
  # evaluator: 1                 # runs the command alongside the training

# runtime:
#   strategy: collective         # parameter_server, replicated, local_sgd, none
#   batch: global                # the script's batch is that of all workers together

# restart: {max: 2}              # restart after a failure
# progress_timeout: 10m          # end a run that makes no step for this long
"""


def starter(backend: str) -> str:
    """A commented cluster.yaml to start from. Raises ConfigError for an unknown one."""
    return _HEAD + schedulers.get(backend).example + _TAIL
