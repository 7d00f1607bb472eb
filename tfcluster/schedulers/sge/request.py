"""What is asked of Grid Engine, derived from the tasks and its section. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tfcluster.model import Description
from tfcluster.schedulers.options import Mistake
from tfcluster.schedulers.sge.settings import SgeSettings

_KEYS = {"-pe": "parallel_environment", "-q": "queue"}
_RESOURCE = re.compile(r"[A-Za-z0-9_.-]+=[A-Za-z0-9._:+/@%*|!&-]+")
_GPU_RESOURCE = re.compile(r".*(?:gpu|cuda).*", re.IGNORECASE)


def sge_slots(description: Description, sge: SgeSettings) -> int:
    return sge.slots or len(description.task_ids())


def contradictions(description: Description, sge: SgeSettings) -> Iterator[Mistake]:
    """What the section says against the tasks, or twice, or cannot say."""
    tasks = len(description.task_ids())
    for name, value in sge.resources.items():
        if not _RESOURCE.fullmatch(request := f"{name}={value}"):
            message = f"{request!r} is not a resource request"
            yield Mistake(f"sge.resources.{name}", message)
    for index, word in enumerate(sge.options):
        key = _KEYS.get(word)
        if key is not None and getattr(sge, key) is not None:
            message = f"option {word} is also set by 'sge.{key}'"
            yield Mistake(
                f"sge.options.{index}", message, "keep one of them", f"sge.{key}"
            )
        number = sge.options[index + 2 :][:1]
        if word == "-pe" and number and number[0].isdecimal():
            yield from _too_few_slots(int(number[0]), tasks, f"sge.options.{index + 2}")
    if sge.slots is not None:
        yield from _too_few_slots(sge.slots, tasks, "sge.slots")
    wanting = [kind for kind, group in description.tasks.items() if group.gpus]
    if wanting and not any(
        map(_GPU_RESOURCE.fullmatch, (*sge.resources, *sge.options))
    ):
        message = "the tasks need GPUs, but the job asks for none"
        hint = "sge: {resources: {gpu: 1}}, under the site's name: `qconf -sc`"
        yield Mistake("sge", message, hint, f"tasks.{wanting[0]}.gpus", fatal=False)


def _too_few_slots(slots: int, tasks: int, key: str) -> Iterator[Mistake]:
    if slots < tasks:
        message = f"{slots} slots are too few for {tasks} tasks"
        hint = "remove it: the number follows from 'tasks'"
        yield Mistake(key, message, hint, "tasks")
