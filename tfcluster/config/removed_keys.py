"""Keys that earlier versions needed: they get a warning, and are left out."""

from __future__ import annotations

from tfcluster.config.diagnostics import Report
from tfcluster.config.tree import Map

_REMOVED = {
    "batch_normalization": "BatchNormalization does what it does on one machine",
    "on_difference": "every script gets the result of one machine",
}
"""Key of ``runtime`` -> why it is no longer needed."""


def without_removed(root: Map, report: Report) -> Map:
    """The tree without these keys; each has a warning."""
    runtime = root.entries.get("runtime")
    if runtime is None or not isinstance(runtime.node, Map):
        return root
    entries = dict(runtime.node.entries)
    for name, why in _REMOVED.items():
        if entry := entries.pop(name, None):
            message = f"{name!r} is no longer needed: {why}"
            report.warn(entry.key.mark, message, "remove it")
    kept = runtime._replace(node=runtime.node._replace(entries=entries))
    return root._replace(entries={**root.entries, "runtime": kept})
