"""TensorFlow's server of a ps that also runs the parameter service.

Keras needs only the service. So TensorFlow's server, which lets anyone who can reach
its port run code, is started when a training task first asks for it.
"""

from __future__ import annotations

import sys
import threading

from tfcluster.runtime import tf_server
from tfcluster.runtime.context import Context
from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.tf1_types import Server


class ServerOnRequest:
    """Starts the server once, however many tasks ask for it. Thread-safe."""

    def __init__(self, context: Context, reporter: Reporter) -> None:
        self._context = context
        self._reporter = reporter
        self._lock = threading.Lock()
        self._server: Server | None = None

    def start(self) -> bool:
        """Whether the server listens now; if not, the reason is printed."""
        with self._lock:
            if self._server is None:
                try:
                    self._server = tf_server.start(self._context)
                except Exception as error:  # TensorFlow may raise anything
                    sys.stderr.write(
                        f"tfcluster: TensorFlow's server did not start: {error}\n"
                    )
                    return False
                self._warn()
            return True

    def _warn(self) -> None:
        context = self._context
        address = context.cluster[context.task_type][context.task_index]
        self._reporter.warning(
            "the program uses TensorFlow's server of this ps, which now listens on "
            f"{address} and obeys every client that can connect (see SECURITY.md)"
        )
