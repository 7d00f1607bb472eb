"""For TensorFlow 1 programs: clusters, servers, sessions, graphs. Does not need Keras.

``docs/v1.md`` has examples. Importing this package is cheap: TensorFlow is imported
when the first name that needs it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfcluster.runtime.tf1.barrier import Barriers
    from tfcluster.runtime.tf1.cluster import (
        cluster_spec,
        device_filters,
        server,
        session_config,
    )
    from tfcluster.runtime.tf1.cluster_members import Workers, workers
    from tfcluster.runtime.tf1.graph_builder import Training
    from tfcluster.runtime.tf1.parameter_server import parameter_server_graph
    from tfcluster.runtime.tf1.placement import ByBytes, byte_size
    from tfcluster.runtime.tf1.replicated import replicated_graph
    from tfcluster.runtime.tf1.session import BroadcastGlobalVariablesHook, Session

__all__ = [
    "Barriers",
    "BroadcastGlobalVariablesHook",
    "ByBytes",
    "Session",
    "Training",
    "Workers",
    "byte_size",
    "cluster_spec",
    "device_filters",
    "parameter_server_graph",
    "replicated_graph",
    "server",
    "session_config",
    "workers",
]

_NAMES = {
    "barrier": ("Barriers",),
    "cluster": ("cluster_spec", "device_filters", "server", "session_config"),
    "cluster_members": ("Workers", "workers"),
    "parameter_server": ("parameter_server_graph",),
    "placement": ("ByBytes", "byte_size"),
    "replicated": ("replicated_graph",),
    "session": ("BroadcastGlobalVariablesHook", "Session"),
    "graph_builder": ("Training",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
