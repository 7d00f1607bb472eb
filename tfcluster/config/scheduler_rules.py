"""Notes what schedulers find wrong with their sections of cluster.yaml."""

from __future__ import annotations

from tfcluster import schedulers
from tfcluster.config.diagnostics import Findings
from tfcluster.config.tree import Path
from tfcluster.model import Description
from tfcluster.schedulers.options import Mistake
from tfcluster.schedulers.script import option_mistakes


def check_sections(description: Description, findings: Findings) -> None:
    """Check the options in all sections, and the own section against the tasks."""
    for name in description.sections:
        for found in option_mistakes(schedulers.get(name), description):
            _note(found, findings)
    if findings.sound("tasks", "backend", description.backend):
        scheduler = schedulers.get(description.backend)
        settings = scheduler.settings_in(description)
        for found in scheduler.mistakes(description, settings):
            _note(found, findings)


def _note(found: Mistake, findings: Findings) -> None:
    """Note a mistake at one of its places; the message has the other one."""
    message = found.message
    if found.other is not None:
        message += f" ({findings.mark(_path(found.other, findings))})"
    note = findings.error if found.fatal else findings.warn
    note(_path(found.key, findings), message, found.hint)


def _path(key: str, findings: Findings) -> Path:
    words = key.split(".")
    if words[-1].isdecimal():
        return findings.item(tuple(words[:-1]), int(words[-1]))
    return tuple(words)
