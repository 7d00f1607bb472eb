"""An optimizer's update as a serialised graph: traced by a worker, run by a ps.

It consists of the graph of a ``tf.function`` with its function library, and a list that
maps inputs to variables. So a ps can apply every optimizer that TensorFlow can trace,
including the user's own classes, and needs neither Keras nor the user's modules.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective.transports.base import Array, Slices
from tfcluster.runtime.tensor_types import Gradient, ProtocolBuffer, Tensor, Variable
from tfcluster.runtime.tensors import array_of, tensor_of_part

Apply: TypeAlias = Callable[[list[Gradient]], object]
"""Applies gradients: a tensor, IndexedSlices or None for each piece."""

_LENGTH = struct.Struct(">Q")
_PYTHON_OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_COUNTER = itertools.count()


class UntraceableError(Exception):
    """An update that cannot be serialised."""


def serialised(
    apply: Apply,
    variables: Sequence[Variable],
    slots: Mapping[str, Variable],
    kinds: str,
) -> bytes:
    """Trace and serialise the update that ``apply`` makes.

    ``variables`` are tf.Variables with the shapes and dtypes of the pieces, in order;
    their values are not sent. ``slots`` are the optimizer's variables by path, sent
    with their initial values. ``kinds`` are the gradients' kinds: see ``client.Pack``.
    Other variables that the update uses (random seeds) are sent like slots, by name.

    Raises UntraceableError if the update needs Python, a table or an iterator to run,
    and what ``apply`` raises.
    """
    specs = _specs(kinds, variables)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def update(*flat: Tensor) -> None:
        apply(_structured(kinds, flat, variables))

    traced = update.get_concrete_function(*specs)
    definition = traced.graph.as_graph_def()
    _refuse_python(definition)
    _clear_devices(definition)
    sources = {id(v.handle): ["variable", i] for i, v in enumerate(variables)}
    by_path = dict(slots)
    sources |= {id(slot.handle): ["slot", path] for path, slot in by_path.items()}
    for used in traced.graph.variables:
        if id(used.handle) not in sources:
            by_path[used.name] = used
            sources[id(used.handle)] = ["slot", used.name]
    captures: list[list[object]] = []
    arrays = [np.asarray(slot.numpy()) for slot in by_path.values()]
    for outer, inner in traced.graph.captures:
        source = sources.get(id(outer))
        if source is None and outer.dtype == tf.resource:
            raise UntraceableError(
                f"its update uses {inner.name}, which is not a variable: tables and "
                "iterators cannot be sent to a ps"
            )
        if source is None:
            source = ["constant", len(arrays)]
            arrays.append(np.asarray(outer.numpy()))
        captures.append([inner.name, *source])
    header = {
        "kinds": kinds,
        "inputs": [tensor.name for tensor in traced.inputs[: len(specs)]],
        "captures": captures,
        "slots": list(by_path),
        "arrays": [[array.dtype.name, array.shape] for array in arrays],
        "controls": [op.name for op in traced.graph.control_outputs],
    }
    text = json.dumps(header).encode()
    graph = definition.SerializeToString()
    lengths = _LENGTH.pack(len(text)) + _LENGTH.pack(len(graph))
    parts = [lengths, text, graph, *(array.tobytes() for array in arrays)]
    return b"".join(parts)


def _refuse_python(definition: ProtocolBuffer) -> None:
    for node in nodes_of(definition):
        if node.op in _PYTHON_OPS:
            raise UntraceableError(
                f"its update calls Python while it runs ({node.name}): "
                "tf.py_function and tf.numpy_function cannot be sent to a ps"
            )


def _clear_devices(definition: ProtocolBuffer) -> None:
    """Clear device names, because a ps has other devices than the worker."""
    for node in nodes_of(definition):
        node.device = ""


def _specs(kinds: str, variables: Sequence[Variable]) -> list[tf.TypeSpec]:
    specs = []
    for kind, variable in zip(kinds, variables, strict=True):
        dtype, shape = variable.dtype, variable.shape
        if kind == "d":
            specs.append(tf.TensorSpec(shape, dtype))
        elif kind == "s":
            specs.append(tf.TensorSpec([None, *shape[1:]], dtype))
            specs.append(tf.TensorSpec([None], tf.int64))
    return specs


def _structured(
    kinds: str, flat: Sequence[Tensor], variables: Sequence[Variable]
) -> list[Gradient]:
    """The gradients of these kinds, from their tensors in the order of ``_specs``."""
    tensors = iter(flat)
    gradients: list[Gradient] = []
    for kind, variable in zip(kinds, variables, strict=True):
        if kind == "d":
            gradients.append(next(tensors))
        elif kind == "s":
            values, indices = next(tensors), next(tensors)
            shape = tf.constant(variable.shape.as_list(), tf.int64)
            gradients.append(tf.IndexedSlices(values, indices, shape))
        else:
            gradients.append(None)
    return gradients


@dataclass(frozen=True, slots=True)
class _Update:
    run: Callable[..., Sequence[Tensor]]
    """Takes the gradients' tensors; returns the values of the variables ``dense``."""
    dense: list[int]
    executor: str | None


class Engine:
    """The variables and slots of one model on one ps, and the updates known for them.

    Not thread-safe, but arrays that ``read`` has returned may be used in any thread.
    """

    def __init__(self, values: Sequence[Array]) -> None:
        with tf.device("CPU:0"):
            self._variables: list[Variable] = [
                tf.Variable(tf.constant(value)) for value in values
            ]
        self._slots: dict[str, Variable] = {}
        self._updates: dict[str, _Update] = {}
        """Updates by the gradients' kinds."""
        self._unread: dict[int, Tensor] = {}
        """Values that the last update returned and that have not been read yet."""

    @property
    def held_bytes(self) -> int:
        """The number of bytes of the variables and slots."""
        every = [*self._variables, *self._slots.values()]
        return sum(v.dtype.size * (v.shape.num_elements() or 0) for v in every)

    def knows(self, kinds: str) -> bool:
        """Whether an update for gradients of these kinds is defined."""
        return kinds in self._updates

    def define(self, data: bytes) -> None:
        """Add an update from ``serialised``; existing slots keep their values.

        Raises ValueError if it was made for other variables.
        """
        lengths = 2 * _LENGTH.size
        size, graph_size = struct.unpack_from(">QQ", data)
        header = json.loads(data[lengths : lengths + size])
        offset = lengths + size + graph_size
        graph = tf.compat.v1.GraphDef.FromString(data[lengths + size : offset])
        rename_functions(graph, f"update_{next(_COUNTER)}_")
        for function in graph.library.function:
            # Importing a graph does not register its functions with the runtime.
            tf_internals.context().add_function_def(function)
        arrays = []
        for name, shape in header["arrays"]:
            dtype = np.dtype(name)
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(data, dtype, count, offset).reshape(shape)
            arrays.append(array)
            offset += array.nbytes
        with tf.device("CPU:0"):
            for path, value in zip(header["slots"], arrays, strict=False):
                if path not in self._slots:
                    self._slots[path] = tf.Variable(tf.constant(value))
        kinds = header["kinds"]
        specs = _specs(kinds, self._variables)
        outer = [self._captured(source, arrays) for _, *source in header["captures"]]

        @tf.function(autograph=False, input_signature=specs)  # type: ignore[untyped-decorator]
        def update(*flat: Tensor) -> list[Tensor]:
            graph_here = tf.compat.v1.get_default_graph()
            inner = [graph_here.capture(tensor) for tensor in outer]
            names = [*header["inputs"], *(name for name, *_ in header["captures"])]
            done = tf.graph_util.import_graph_def(
                graph,
                input_map=dict(zip(names, [*flat, *inner], strict=True)),
                return_elements=header["controls"],
                name="",
            )
            with tf.control_dependencies(done):
                # Reading the variables here costs less than a separate read of each.
                return [self._variables[index].read_value() for index in dense]

        dense = [index for index, kind in enumerate(kinds) if kind == "d"]
        # Threads that wake each other cost more than a small update. But the
        # single-threaded executor does not support control flow.
        executor = None if graph.library.function else "SINGLE_THREADED_EXECUTOR"
        with tf.device("CPU:0"):
            traced = update.get_concrete_function()
        self._updates[kinds] = _Update(traced, dense, executor)

    def _captured(self, source: Sequence[Any], arrays: Sequence[Array]) -> Tensor:
        kind, key = source
        if kind == "variable":
            return self._variables[key].handle
        return self._slots[key].handle if kind == "slot" else tf.constant(arrays[key])

    def apply(self, gradients: Sequence[Array | Slices | None], kinds: str) -> None:
        """Run the update for gradients of these kinds; indices become int64.

        A gradient has the shape and dtype of its variable; Slices have values of shape
        (n, ...) and indices of shape (n,). Their memory must not be written to
        afterwards. Raises KeyError if no update is defined for these kinds, and the
        ``tf.errors.OpError`` of an update that fails.
        """
        flat = []
        for gradient in gradients:
            if isinstance(gradient, Slices):
                flat.append(tensor_of_part(gradient.values))
                flat.append(
                    tensor_of_part(gradient.indices.astype(np.int64, copy=False))
                )
            elif gradient is not None:
                flat.append(tensor_of_part(gradient))
        # Drop references first: TensorFlow copies a variable whose value is shared.
        self._unread.clear()
        update = self._updates[kinds]
        with tf_internals.executor_type(update.executor):
            values = update.run(*flat)
        self._unread.update(zip(update.dense, values, strict=True))

    def read(self, index: int) -> Array:
        """A variable's value; later updates do not change the returned array.

        It has the variable's shape and dtype, and must not be written to.
        """
        value = self._unread.pop(index, None)
        if value is None:
            value = self._variables[index].read_value()
        return array_of(value)

    def rows(self, index: int, indices: Array) -> Array:
        """The current values of some rows: shape (len(indices), ...).

        ``indices`` are int64 of shape (n,).
        """
        return array_of(tf.gather(self._variables[index], indices))

    def assign(self, index: int, value: Array) -> None:
        """Set a variable; raise ValueError if the value's shape or dtype differs."""
        self._unread.pop(index, None)
        self._variables[index].assign(tf.constant(value))

    def slots(self) -> dict[str, Array]:
        """The values of all slot variables, by path; they must not be written to."""
        return {path: array_of(slot.read_value()) for path, slot in self._slots.items()}

    def assign_slot(self, path: str, value: Array) -> None:
        """Set a slot variable to a value of its shape and dtype.

        Raises KeyError if no slot variable has that path.
        """
        self._slots[path].assign(tf.constant(value))

    def release(self) -> None:
        """Copy every variable to its own memory.

        An optimizer that stores a gradient unchanged (``previous.assign(gradient)``)
        makes its variable share the memory in which the gradient was received.
        """
        self._unread.clear()
        for variable in [*self._variables, *self._slots.values()]:
            variable.assign(tf.constant(array_of(variable.read_value()).copy()))


# --- functions of a graph -------------------------------------------------------------


class AttrValue(Protocol):
    """An ``AttrValue``: an attribute of a node as a protocol buffer."""

    @property
    def func(self) -> Any: ...

    @property
    def list(self) -> Any: ...

    def WhichOneof(self, group: str) -> str | None: ...


def rename_functions(definition: ProtocolBuffer, prefix: str) -> None:
    """Prefix the names of a GraphDef's functions and their references, in place.

    TensorFlow registers functions by name for the whole process, and removes one as
    soon as any graph with a function of that name is deleted. Tasks that trace the same
    code give their functions the same names.
    """
    library = definition.library
    names = {f.signature.name: prefix + f.signature.name for f in library.function}
    for function in library.function:
        function.signature.name = names[function.signature.name]
    for gradient in library.gradient:
        gradient.function_name = names.get(
            gradient.function_name, gradient.function_name
        )
        gradient.gradient_func = names.get(
            gradient.gradient_func, gradient.gradient_func
        )
    for node in nodes_of(definition):
        node.op = names.get(node.op, node.op)
        for attribute in node.attr.values():
            _rename_in(attribute, names)


def nodes_of(definition: ProtocolBuffer) -> Iterator[ProtocolBuffer]:
    """All nodes of a GraphDef and of its functions."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _rename_in(attribute: AttrValue, names: Mapping[str, str]) -> None:
    kind = attribute.WhichOneof("value")
    if kind == "func":
        functions = [attribute.func]
    elif kind == "list":
        functions = list(attribute.list.func)
    else:
        return
    for function in functions:
        function.name = names.get(function.name, function.name)
        for inner in function.attr.values():
            _rename_in(inner, names)
