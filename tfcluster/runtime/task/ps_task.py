"""Starts the parameter service of a ps task, and reports its statistics."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from tfcluster.runtime import tf_server
from tfcluster.runtime.context import Context, rank_addresses
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.parameter_server.server_socket import ServerSocket
from tfcluster.runtime.parameter_server.service import Service
from tfcluster.runtime.telemetry.agent_channel import STEP_INTERVAL_S, Reporter
from tfcluster.runtime.tf1_types import Server

if TYPE_CHECKING:
    from tfcluster.runtime.parameter_server.update_graph import Engine


class ParameterService:
    """The service of this task, and a thread that reports its statistics."""

    def __init__(
        self, service: Service, listening: ServerSocket, reporter: Reporter
    ) -> None:
        self._service = service
        self._listening = listening
        self._reporter = reporter
        self._closed = threading.Event()
        threading.Thread(
            target=self._report_counts, name="ps counts", daemon=True
        ).start()

    def report(self) -> None:
        """Report the current statistics to the agent."""
        self._reporter.send(self._service.statistics())

    def close(self) -> None:
        """Stop listening, disconnect all clients, and end the reports."""
        self._closed.set()
        self._service.gradient_arrived.set()
        self._listening.close()

    def _report_counts(self) -> None:
        # Sleeps as long as no gradient arrives.
        while self._service.gradient_arrived.wait() and not self._closed.wait(
            STEP_INTERVAL_S
        ):
            self._service.gradient_arrived.clear()
            self.report()


class ServerOnRequest:
    """Starts TensorFlow's server once, however many tasks ask for it. Thread-safe.

    Keras needs only the parameter service. So the server, which lets anyone who can
    reach its port run code, is not started before a training task asks for it.
    """

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


def start(context: Context, reporter: Reporter) -> ParameterService:
    """Start to serve on the address of this ps, and TensorFlow's server on request.

    Raises ContextError if the environment has no address for this ps, and
    CollectiveError if it cannot listen there.
    """
    addresses = context.parameter_servers
    if context.task_index >= len(addresses):
        raise ContextError(
            f"TFCLUSTER_PARAMETER_SERVERS has no address for {context.task}"
        )
    size = len(rank_addresses(context.cluster))
    service = Service(size, _engine)
    listening = ServerSocket(
        service,
        addresses,
        context.task_index,
        size=size,
        token=context.token,
        start_server=ServerOnRequest(context, reporter).start,
    )
    return ParameterService(service, listening, reporter)


def _engine(values: Sequence[NDArray[Any]]) -> Engine:
    # Not at the top: clients can connect before TensorFlow is imported.
    from tfcluster.runtime import tf_internals
    from tfcluster.runtime.parameter_server.update_graph import Engine

    tf_internals.check()
    return Engine(values)
