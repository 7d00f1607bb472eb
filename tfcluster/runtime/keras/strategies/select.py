"""Installs the hooks of the configured strategy."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Callable

import keras
import tensorflow as tf

from tfcluster.model import Runtime, Strategy
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import CollectiveError, Group
from tfcluster.runtime.collective.buckets import MEGABYTE
from tfcluster.runtime.collective.rounding import Rounding
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.collective.transports.tensorflow.transport import (
    TensorFlowTransport,
)
from tfcluster.runtime.context import Context
from tfcluster.runtime.keras.checks import loss_scaling_probe
from tfcluster.runtime.keras.checks.divergence_check import DivergenceCheck
from tfcluster.runtime.keras.data import disable_autotune
from tfcluster.runtime.keras.data.data_service_hooks import (
    DataServiceHooks,
    data_service_client,
)
from tfcluster.runtime.keras.data.per_rank_shuffle import SeedOffset
from tfcluster.runtime.keras.data.round_robin_sharding import ShardSpec
from tfcluster.runtime.keras.graph_steps import GraphSteps
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.strategies import (
    async_parameter_server,
    partitioned,
    synchronous,
)
from tfcluster.runtime.keras.strategies.async_coordination import Progress
from tfcluster.runtime.keras.strategies.async_parameter_server import AsyncSession
from tfcluster.runtime.keras.strategies.collective import CollectiveUpdate
from tfcluster.runtime.keras.strategies.local_sgd import LocalSgdUpdate
from tfcluster.runtime.keras.strategies.ps_models import ServerModels
from tfcluster.runtime.keras.strategies.served_updates import ServedUpdates
from tfcluster.runtime.keras.train import matmul_gradient
from tfcluster.runtime.keras.train.shard_steps import compute_alike
from tfcluster.runtime.keras.train.tape_gradients import TapeGradients
from tfcluster.runtime.net.handshake import Member
from tfcluster.runtime.parameter_server.client import ParameterServerClient
from tfcluster.runtime.telemetry.agent_channel import reporter
from tfcluster.runtime.telemetry.rank_claim import require_first
from tfcluster.runtime.telemetry.tracer import tracer


def begin(context: Context) -> Session:
    """Install the hooks in Keras, once per process, and return the session.

    ``context`` belongs to a task that trains. Raises CollectiveError if the strategy
    needs ps tasks and there are none, and what ``process_group.join`` raises.
    """
    disable_autotune.install()
    reporter().versions(
        {
            "Python": platform.python_version(),
            "TensorFlow": tf.__version__,
            "Keras": keras.__version__,
        }
    )
    if (
        context.strategy is Strategy.PARAMETER_SERVER
        and not context.options.synchronous
    ):
        return _asynchronous_ps(context)
    if context.strategy in _SERVED:
        return _synchronous_ps(context)
    if _is_partitioned(context):
        session = _session(context)
        _divide(context, session)
        return session
    session = _IN_STEP[context.strategy](context)
    _with_data_tasks(context, session)
    return session


def _divide(context: Context, session: Session) -> None:
    seed = int.from_bytes(hashlib.sha256(context.token).digest()[:4], "big")
    strict = os.environ.get("TFCLUSTER_PARTITION") == "strict"
    partitioned.install(session, seed=seed, strict=strict)


def _is_partitioned(context: Context) -> bool:
    return (
        os.environ.get("TFCLUSTER_PARTITION") != "0"
        and context.strategy is Strategy.COLLECTIVE
        and context.options.shards is None
        and context.options.divides
    )


def _collective(context: Context) -> Session:
    session = _session(context)
    if session.shards is not None:
        compute_alike(session)
    elif session.size > 1:
        matmul_gradient.MatmulGradient().install()
    if session.divides and (session.size > 1 or session.shards):
        session.trials = loss_scaling_probe.LossScalingProbe(session)
    transport = session.group.transport
    if session.size > 1 and isinstance(transport, TensorFlowTransport):
        session.graph_exchanges = GraphSteps(
            session.group, transport, stall_timeout_s=transport.stall_timeout_s
        )
        session.graph_exchanges.install()
    divergence_check = DivergenceCheck(session)
    session.group.last_state = divergence_check.last_state
    session.group.last_equal = divergence_check.last_equal
    tape_gradients = TapeGradients(session, divergence_check=divergence_check)
    update = CollectiveUpdate(session, tape_gradients, divergence_check)
    synchronous.install(
        session,
        update,
        tape_gradients=tape_gradients,
        divergence_check=divergence_check,
    )
    return session


def _local_sgd(context: Context) -> Session:
    session = _session(context)
    options = context.options
    every, seconds = options.sync_every, options.sync_seconds
    update = LocalSgdUpdate(
        session, DivergenceCheck(session), every=every, seconds=seconds
    )
    synchronous.install(session, update)
    return session


def _synchronous_ps(context: Context) -> Session:
    session = _session(context)
    models = ServerModels(
        session, _servers(context, session), synchronous=True, leads=session.chief
    )
    ServedUpdates(session, models).install()
    if session.divides:
        _divide(context, session)
    else:
        partitioned.install_models(session)
        _with_data_tasks(context, session)
    return session


def _asynchronous_ps(context: Context) -> Session:
    alone = HostTransport(
        Member(0, 1, context.token, context.attempt), ("localhost:0",)
    )
    session = AsyncSession(
        Group(alone, tracer=tracer()),
        reporter(),
        divides=context.options.divides,
        refuses_differences=False,
        shard=ShardSpec(context.rank, context.size),
    )
    servers = _servers(context, session)
    server_models = ServerModels(
        session, servers, synchronous=False, leads=session.chief
    )
    progress = Progress(
        servers,
        context.rank,
        context.size,
        restarted=context.attempt > 0,
        timeout_s=context.options.stall_timeout_s,
        warning_s=context.options.stall_warning_s,
        warn=session.reporter.warning,
    )
    # Before batches are sharded: batches from data tasks are already sharded.
    _with_data_tasks(context, session)
    async_parameter_server.install(session, server_models, progress)
    return session


def _with_data_tasks(context: Context, session: Session) -> None:
    if context.options.data == "seed_offset":
        SeedOffset(context.rank).install()
    if found := data_service_client(context):
        DataServiceHooks(session, *found).install()


def _session(context: Context) -> Session:
    options = context.options
    return Session(
        process_group.join(context),
        reporter(),
        divides=options.divides,
        waits_in_steps=options.strategy is not Strategy.LOCAL_SGD,
        refuses_differences=options.on_difference == "refuse"
        and options.strategy is not Strategy.LOCAL_SGD,
        normalizes_whole_batches=options.divides
        and options.batch_normalization == "global"
        and options.shards is None
        and options.strategy is not Strategy.LOCAL_SGD,
        shards=options.shards,
        bucket_bytes=int(options.bucket_mb * MEGABYTE),
        rounding=_rounding(options),
        feeds_errors_back=options.error_feedback,
    )


def _rounding(options: Runtime) -> Rounding | None:
    """How the transport rounds gradients; None if it does not, or cannot."""
    dtypes = {"fp16": "float16", "bf16": "bfloat16"}
    dtype = dtypes.get(options.compression)
    if dtype is None or options.transport not in ("auto", "host"):
        return None
    return Rounding(dtype)


def _servers(context: Context, session: Session) -> Callable[[], ParameterServerClient]:
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
        session.waited_for_servers_s = lambda: servers.waited_s
        session.bytes_with_servers = lambda: servers.exchanged_bytes
        return servers

    return connect


_IN_STEP: dict[Strategy, Callable[[Context], Session]] = {
    Strategy.COLLECTIVE: _collective,
    Strategy.LOCAL_SGD: _local_sgd,
}

_SERVED = (Strategy.PARAMETER_SERVER, Strategy.REPLICATED)
"""Strategies with ps tasks that update the variables."""
