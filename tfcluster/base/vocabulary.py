"""The words for tasks and documents that all other modules share.

Separate from ``model``, because ``--help`` and ``status`` need nothing else from it.
"""

from __future__ import annotations

from typing import Final

RANKED_TYPES = ("chief", "worker")
"""Task types that train together, in rank order: chief, then worker 0, 1, ..."""

TASK_TYPES = (*RANKED_TYPES, "ps", "evaluator", "data")
"""Every task type, in the order in which tasks are listed."""

BUILT_IN_SERVERS = ("ps", "data")
"""Task types that run one of tfcluster's servers instead of the command."""

FORMAT_VERSION: Final = 1
"""The value of ``schema`` in every JSON document that tfcluster prints or writes.

It changes only if a key is removed or changes its meaning; ``documents`` has the
types of the documents.
"""

RECORDING = "TFCLUSTER_RECORDING"
"""The variable that makes a task record the steps of its training, for ``verify``."""
