"""This task's own TensorFlow server.

Its port can be opened only once. Either the script creates the server, or a session
without another target does; later requests return the same server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_server
from tfcluster.runtime.context import Context
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.tf1 import patches
from tfcluster.runtime.tf1.cluster_formats import OLD_NAMES
from tfcluster.runtime.tf1.cluster_members import cluster_of
from tfcluster.runtime.tf1.ps_reachability import wait_until_closed
from tfcluster.runtime.tf1_types import ConfigProto

tf1 = tf.compat.v1


ServerDefinition: TypeAlias = (
    "tf.train.ServerDef | tf.train.ClusterSpec | tf.train.ClusterDef | "
    "Mapping[str, Sequence[str]]"
)
"""The types that the constructor of ``tf.distribute.Server`` accepts."""


class SharedServer:
    """Replaces the constructor and ``join`` of ``tf.distribute.Server``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._address = context.cluster[context.task_type][context.task_index]
        self._server: tf_internals.TF1Server | None = None

    def start(self) -> tf_internals.TF1Server:
        """The server, which the first call starts."""
        if self._server is None:
            tf_server.start(self._context)
        assert self._server is not None  # The patched constructor has set it.
        return self._server

    def is_target(self, target: str) -> bool:
        """Whether a session with this target runs on our server."""
        if target == f"grpc://{self._address}":
            self.start()
            return True
        return self._server is not None and target == self._server.target

    def install(self) -> None:
        """Install the patches of ``tf.distribute.Server`` in this process."""
        patches.TABLE.install(
            {patches.SERVER_INIT: self.create, patches.SERVER_JOIN: self.join},
            HandlerPlace.LAST,
            always=True,
        )

    def create(
        self,
        original: Callable[..., None],
        server: tf_internals.TF1Server,
        definition: ServerDefinition,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: ConfigProto | None = None,
        start: bool = True,  # TensorFlow's own signature
    ) -> None:
        """Replaces ``Server.__init__``: all objects for our address share a server."""
        if address_of(definition, job_name, task_index) != self._address:
            original(server, definition, job_name, task_index, protocol, config, start)
        elif self._server is None:
            options = self.config(config)
            original(server, definition, job_name, task_index, protocol, options)
            tf_server.report(self._address)
            self._server = server
        else:
            # Clients use only these two attributes.
            tf_internals.share_server(server, self._server)

    def join(
        self, original: Callable[..., None], server: tf_internals.TF1Server
    ) -> None:
        """Replaces ``Server.join``: except on the chief, waits until the chief ends."""
        ours = self._server is not None and tf_internals.is_same_server(
            server, self._server
        )
        if ours and not self._context.is_chief:
            # Serve as long as the chief needs the server: a TensorFlow server never
            # ends by itself.
            wait_until_closed(self._context.addresses[0])
        else:
            original(server)

    def config(self, config: ConfigProto | None) -> ConfigProto:
        """A copy of ``config`` with this task's device filters, unless it has some."""
        options: ConfigProto = tf1.ConfigProto()
        if config is not None:
            options.CopyFrom(config)
        if not options.device_filters:
            options.device_filters.extend(tf_server.filters_of(self._context))
        return options


def address_of(
    definition: ServerDefinition, job_name: str | None, task_index: int | None
) -> str | None:
    """The address that a server with this definition would use; None if it is unclear.

    ``definition`` is a ``ServerDef``, or a cluster in one of its forms.
    """
    if isinstance(definition, tf1.train.ServerDef):
        cluster = cluster_of(definition)
        job = job_name or definition.job_name
        index = definition.task_index if task_index is None else task_index
    else:
        cluster = cluster_of(definition)
        job = job_name or (next(iter(cluster)) if len(cluster) == 1 else "")
        index = task_index or 0
    addresses = cluster.get(OLD_NAMES.get(job, job), ())
    return addresses[index] if index < len(addresses) else None
