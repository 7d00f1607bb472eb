"""One copy of the variables, on the parameter servers; every worker reads it.

Each worker runs the model on its towers, averages their gradients and applies the mean
on the parameter servers. Then all workers wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfcluster.runtime.tensor_types import DType, Shape, Tensor, Variable
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.graph_builder import Gradients, GraphBuilder, Training
from tfcluster.runtime.tf1_types import V1Optimizer

THRESHOLD_BYTES = 64 * 1024
"""Smaller variables stay on one device, because spreading them gains nothing."""


class Caches:
    """Choose caching devices: all small variables go to one device, and each large
    variable to the device with the fewest bytes so far."""

    def __init__(
        self,
        devices: Sequence[str],
        small: str,
        threshold_bytes: int = THRESHOLD_BYTES,
    ) -> None:
        self._bytes = dict.fromkeys(devices, 0)
        self._small = small
        self._threshold_bytes = threshold_bytes

    def device_for(self, size: int) -> str:
        """Choose the device that caches a variable of ``size`` bytes."""
        if size < self._threshold_bytes:
            return self._small
        device = min(self._bytes, key=lambda name: self._bytes[name])
        self._bytes[device] += size
        return device

    def cached(
        self, getter: Callable[..., Variable], name: str, **options: Any
    ) -> Variable:
        """A ``custom_getter`` for variable scopes that caches trainable variables."""
        # None means the default, which is trainable.
        trained = options.get("trainable") is not False
        if not trained or options.get("caching_device"):
            return getter(name, **options)
        if options.get("reuse") is True:
            return getter(name, **options)
        size = _bytes_of(options.get("shape"), options.get("dtype"))
        return getter(name, **{**options, "caching_device": self.device_for(size)})


def caches(kind: str, cpu: str, towers: Sequence[str], threshold_bytes: int) -> Caches:
    """The ``Caches`` on the CPU or on the towers.

    Raises ValueError unless ``kind`` is 'cpu' or 'gpu'.
    """
    if kind not in ("cpu", "gpu"):
        raise ValueError(
            f"caching={kind!r}: variables are cached on 'cpu' or on 'gpu' (the devices "
            "of the towers)"
        )
    devices = towers if kind == "gpu" else [cpu]
    return Caches(devices, cpu, threshold_bytes)


def _bytes_of(shape: Shape | Sequence[int] | None, dtype: DType | None) -> int:
    whole_shape = tf.TensorShape(shape)
    if not whole_shape.is_fully_defined():
        return 0
    count: int = math.prod(whole_shape.as_list())
    return count * int(tf.as_dtype(dtype or tf.float32).size)


tf1 = tf.compat.v1


def parameter_server_graph(
    loss: Callable[[int], Tensor],
    optimizer: V1Optimizer,
    *,
    workers: Workers | None = None,
    towers: Sequence[str] = ("cpu:0",),
    caching: str = "cpu",
    caching_threshold_bytes: int = THRESHOLD_BYTES,
    mean: bool = False,
    barrier: bool = True,
    name: str = "training",
) -> Training:
    """Build a graph whose variables live on the parameter servers.

    ``loss(tower)`` builds the model with ``get_variable`` and returns the mean loss of
    that tower's rows, a scalar of a floating dtype. ``towers`` are devices of this
    task, such as "gpu:0". Each variable goes to the ps with the fewest bytes. A worker
    reads it once per step, into host memory (``caching='cpu'``) or into the memory of
    its towers (``'gpu'``); variables with fewer than ``caching_threshold_bytes`` bytes
    stay on one device.

    Each worker's gradient is the mean over its towers. It is applied separately, so
    that N workers make N updates per step. With ``mean=True``, the mean over all
    workers is applied as one update. ``barrier=False`` lets a worker continue without
    waiting for the others. A second graph in the same run needs another ``name``,
    because tokens of the first graph's barriers may remain on the parameter servers.

    Raises ValueError for ``mean=True`` without a barrier, for another ``caching``, and
    for malformed towers; ContextError if this task does not train or there is no ps;
    CollectiveMismatchError if a variable has a gradient in some towers only. Follows
    ``DistributedParameterServerBuilder`` of tensorpack/graph_builder/distributed.py.
    """
    if mean and not barrier:
        raise ValueError("mean=True makes workers wait for each other: barrier=True")
    graph = GraphBuilder(optimizer, workers, towers, name)
    copies = caches(caching, graph.cpu, graph.towers, caching_threshold_bytes)
    losses: list[Tensor] = []
    gradients: list[Gradients] = []
    for tower, device in enumerate(graph.towers):
        with (
            tf1.device(graph.setter(device)),
            tf1.variable_scope(
                tf1.get_variable_scope(),
                custom_getter=copies.cached,
                reuse=True if tower else None,
            ),
            tf1.name_scope(f"tower{tower}"),
        ):
            losses.append(loss(tower))
            gradients.append(
                optimizer.compute_gradients(
                    losses[-1], tf1.trainable_variables(), gate_gradients=0
                )
            )
    variables = [variable for _, variable in gradients[0]]
    with tf1.device(graph.setter(graph.cpu)):
        last, left = graph.applied(gradients, variables, mean=mean)
        if barrier:
            passed = graph.barriers.after("all_workers_sync_barrier", [last])
            last, left = passed.op, tf1.logical_or(left, passed.left)
    return graph.training(last, left, losses, variables)
