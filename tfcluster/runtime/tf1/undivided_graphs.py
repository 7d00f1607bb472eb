"""Warns about a TensorFlow 1 graph that every rank trains with all of the data.

A session outside of a cluster gets its data from the program in ways that the runtime
does not know, so nothing is divided. The result and the time are the same as on one
machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime.partition.script_lines import user_line
from tfcluster.runtime.scripts import program_kind
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.tensor_types import Operation
from tfcluster.runtime.tf1 import patches

_WHY = (
    "this graph of TensorFlow 1 is not distributed: every rank trains it with all "
    "data. The result is right, but no faster than on one machine. Scripts that train "
    "on parameter servers are distributed (launch with --ps 1; docs/v1.md), and so is "
    "model.fit"
)


@dataclass
class UndividedGraphs:
    """Reports the first optimizer in a graph, with a warning if it ``warns``."""

    warns: bool
    is_known: bool = False

    def install(self) -> None:
        """Install the hook in TensorFlow, which has been imported."""
        patches.TABLE.install({patches.OPTIMIZER_APPLY: self._apply}, always=True)

    def _apply(
        self, original: Callable[..., Operation | None], *args: Any, **kwargs: Any
    ) -> Operation | None:
        # In a tf.function, the default graph is the function's graph.
        in_session = (
            not tf.executing_eagerly()
            and not tf.compat.v1.get_default_graph().building_function
        )
        distributes = program_kind.distributes_itself()
        if in_session and not self.is_known and not distributes:
            self.is_known = True
            reporter().exchanged()
            if self.warns:
                text = f"{user_line()}: {_WHY}"
                reporter().warning(text)
                sys.stderr.write(f"tfcluster: warning: {text}\n")
        return original(*args, **kwargs)
