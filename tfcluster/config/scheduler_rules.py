"""Finds contradictions between the tasks and what a scheduler is asked for."""

from __future__ import annotations

from tfcluster.config.diagnostics import Findings
from tfcluster.config.tree import Path
from tfcluster.model import Description
from tfcluster.scheduler_request import contradictions


def check_request(description: Description, findings: Findings) -> None:
    """Note each contradiction at one of its places; the message has the other one."""
    for found in contradictions(description):
        there = findings.mark(_path(found.other, findings))
        note = findings.error if found.fatal else findings.warn
        note(_path(found.key, findings), f"{found.message} ({there})", found.hint)


def _path(key: str, findings: Findings) -> Path:
    words = key.split(".")
    if words[-1].isdecimal():
        return findings.item(tuple(words[:-1]), int(words[-1]))
    return tuple(words)
