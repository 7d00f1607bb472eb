"""Installs the hooks of the configured strategy."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable

import keras
import tensorflow as tf

from tfcluster.plan.model import Strategy
from tfcluster.protocol.task_events import Versions
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import CollectiveError, Group
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.context import Context
from tfcluster.runtime.data_service.client import data_service_client
from tfcluster.runtime.keras.data import per_worker
from tfcluster.runtime.keras.data.data_service_hooks import DataServiceHooks
from tfcluster.runtime.keras.data.round_robin_sharding import ShardSpec
from tfcluster.runtime.keras.strategies import partitioned
from tfcluster.runtime.keras.strategies.async_parameter_server import AsyncRank
from tfcluster.runtime.keras.strategies.local_sgd import LocalSgd
from tfcluster.runtime.keras.strategies.local_sgd_models import LocalSgdModels
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.strategies.served_updates import ServedUpdates
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving
from tfcluster.runtime.keras.training_session import TrainingSession
from tfcluster.runtime.net.rendezvous import Member
from tfcluster.runtime.parameter_server.client import ParameterServerClient
from tfcluster.runtime.parameter_server.progress import StepNotes
from tfcluster.runtime.partition import reading_ahead
from tfcluster.runtime.signals import SIGNALS
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.rank_claim import require_first
from tfcluster.runtime.telemetry.tracer import tracer


def begin(context: Context) -> TrainingSession:
    """Install the hooks in Keras, once per process, and return the session.

    ``context`` belongs to a task that trains. Raises CollectiveError if the strategy
    needs ps tasks and there are none, and what ``process_group.join`` raises.
    """
    SIGNALS.is_tracing = lambda: not tf.executing_eagerly()
    versions = {
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
    }
    reporter().send(Versions(versions))
    options = context.options
    session = TrainingSession(
        _alone(context) if context.is_independent else process_group.join(context),
        reporter(),
        chief=context.is_chief,
        divides=options.divides,
    )
    reading_ahead.install(session.warn)
    client = data_service_client(context)
    if context.strategy is Strategy.LOCAL_SGD:
        _local_sgd(context, session)
    elif context.is_independent:
        _asynchronous(context, session)
    else:
        is_served = context.strategy is not Strategy.COLLECTIVE
        if is_served:
            servers = _servers(context, session)
            models = ServerModels(session, servers, synchronous=True)
            ServedUpdates(session, models).install()
        seed, strict = _partition_options(context)
        partitioned.install(
            session,
            options,
            seed=seed,
            strict=strict,
            is_served=is_served,
            divides_loops=client is None,
        )
        if not session.divides:
            per_worker.allow_any_rows()
    if client is not None:
        DataServiceHooks(session, client).install()
    if options.data == "seed_offset":
        per_worker.shuffle_per_rank(context.rank)
    return session


def _alone(context: Context) -> Group:
    """A group of this rank alone."""
    member = Member(0, 1, context.token, context.attempt)
    return Group(HostTransport(member, ("localhost:0",)), tracer=tracer())


def _partition_options(context: Context) -> tuple[int, bool]:
    """A seed that is equal on all ranks, and whether a failure to divide is raised."""
    seed = int.from_bytes(hashlib.sha256(context.token).digest()[:4], "big")
    return seed, os.environ.get("TFCLUSTER_PARTITION") == "strict"


def _local_sgd(context: Context, session: TrainingSession) -> None:
    options = context.options
    local_sgd = LocalSgd(
        session, every=options.sync_every, seconds=options.sync_seconds
    )
    seed, strict = _partition_options(context)
    local_sgd.install(seed=seed, strict=strict)
    saving = ChiefOnlySaving(session)
    saving.install()
    LocalSgdModels(session, saving, local_sgd).install()


def _asynchronous(context: Context, session: TrainingSession) -> None:
    servers = _servers(context, session)
    progress = StepNotes(
        servers,
        context.rank,
        context.size,
        restarted=context.attempt > 0,
        timeout_s=context.options.stall_timeout_s,
        warning_s=context.options.stall_warning_s,
        warn=session.reporter.warning,
    )
    models = ServerModels(session, servers, synchronous=False)
    shard = ShardSpec(context.rank, context.size)
    AsyncRank(session, shard, models, progress).install()


def _servers(
    context: Context, session: TrainingSession
) -> Callable[[], ParameterServerClient]:
    """Return a function that connects to the ps tasks on its first call.

    Raises CollectiveError if the run has no ps tasks.
    """
    if not context.parameter_servers:
        raise CollectiveError(
            f"strategy {context.strategy} keeps the variables on ps tasks, but there "
            "are none: TFCLUSTER_PARAMETER_SERVERS is empty. tfcluster launch sets it"
        )

    @functools.cache
    def connect() -> ParameterServerClient:
        require_first(
            context.task, "the ps tasks already hold the weights of that training"
        )
        servers = ParameterServerClient(
            context.parameter_servers,
            rank=context.rank,
            size=context.size,
            token=context.token,
            stall_timeout_s=context.options.stall_timeout_s,
        )
        session.servers = servers
        return servers

    return connect
