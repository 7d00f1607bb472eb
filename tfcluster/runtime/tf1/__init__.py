"""For TensorFlow 1 programs: clusters, servers, sessions, graphs. Does not need Keras.

``docs/v1.md`` has examples. Importing this package is cheap: TensorFlow is imported
when the first name that needs it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfcluster.runtime.lazy_names import attributes

if TYPE_CHECKING:
    from tfcluster.runtime.tf1.barrier import Barriers as Barriers
    from tfcluster.runtime.tf1.cluster_members import Workers as Workers
    from tfcluster.runtime.tf1.cluster_members import workers as workers
    from tfcluster.runtime.tf1.graph_builder import ByBytes as ByBytes
    from tfcluster.runtime.tf1.graph_builder import Training as Training
    from tfcluster.runtime.tf1.graph_builder import byte_size as byte_size
    from tfcluster.runtime.tf1.parameter_server import (
        parameter_server_graph as parameter_server_graph,
    )
    from tfcluster.runtime.tf1.replicated import replicated_graph as replicated_graph
    from tfcluster.runtime.tf1.session import (
        BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
    )
    from tfcluster.runtime.tf1.session import Session as Session
    from tfcluster.runtime.tf1.session import cluster_spec as cluster_spec
    from tfcluster.runtime.tf1.session import device_filters as device_filters
    from tfcluster.runtime.tf1.session import server as server
    from tfcluster.runtime.tf1.session import session_config as session_config

__getattr__ = attributes(__name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
