"""Writes a FunctionDef, op by op."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import output_types
from tfcluster.runtime.partition.graph import Node, elements_of
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.tensor_types import Array, DType, ProtocolBuffer


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor in a FunctionDef; ``text`` is how inputs name it."""

    text: str
    dtype: DType

    @property
    def node(self) -> str:
        """The node's name; empty for an argument."""
        name, colon, _ = self.text.partition(":")
        return name if colon else ""


class OpWriter:
    """A function's definition in the making."""

    def __init__(self, stem: str) -> None:
        self.name = tf_functions.unique_name(stem)
        self.definition = tf.compat.v1.GraphDef().library.function.add()
        self.definition.signature.name = self.name
        self._names: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Ref] = {}
        self._waits: list[str] = []
        self.last = ""
        """The name of the node that was written last."""
        self.source: Node | None = None
        """The node for which nodes are written now."""
        self.compiles = False
        """Whether XLA is to compile them."""
        self.for_xla: dict[str, Node | None] = {}
        """The nodes that XLA is to compile, by name, and for what they are written."""

    # --- the signature ----------------------------------------------------------------

    def argument(
        self,
        dtype: DType,
        shape: Shape | None = None,
        handle: ProtocolBuffer | None = None,
    ) -> Ref:
        """A new argument; ``handle`` says what a handle refers to."""
        signature = self.definition.signature
        index = len(signature.input_arg)
        argument = signature.input_arg.add()
        argument.name = self._unique("input")
        argument.type = dtype.as_datatype_enum
        if handle is not None:
            for element in handle.shape_and_type:
                added = argument.handle_data.add()
                added.dtype = element.dtype
                added.shape.CopyFrom(element.shape)
        elif dtype not in (tf.resource, tf.variant) and shape is not None:
            attribute = self.definition.arg_attr[index].attr["_output_shapes"]
            attribute.list.shape.add().CopyFrom(tf.TensorShape(shape).as_proto())
        return Ref(argument.name, dtype)

    def finish(self, outputs: Sequence[Ref], effects: Iterable[str]) -> ProtocolBuffer:
        """The definition, with these outputs and nodes that must run."""
        signature = self.definition.signature
        for index, ref in enumerate(outputs):
            argument = signature.output_arg.add()
            argument.name = f"output_{index}"
            argument.type = ref.dtype.as_datatype_enum
            self.definition.ret[argument.name] = ref.text
        for index, name in enumerate(dict.fromkeys(effects)):
            label = f"effect_{index}"
            signature.control_output.append(label)
            self.definition.control_ret[label] = name
            signature.is_stateful = True
        return self.definition

    # --- nodes ------------------------------------------------------------------------

    @contextmanager
    def after(self, names: Iterable[str]) -> Iterator[None]:
        """Nodes that are written within run after the nodes of these names."""
        before = self._waits
        self._waits = [*before, *(name for name in names if name)]
        try:
            yield
        finally:
            self._waits = before

    def constant(self, array: Array) -> Ref:
        """A constant; equal ones are written once."""
        array = np.asarray(array)
        key = (array.dtype.str, array.shape, array.tobytes())
        ref = self._constants.get(key)
        if ref is None:
            waits, self._waits, last = self._waits, [], self.last
            dtype = tf.as_dtype(array.dtype)
            tensor = tf.make_tensor_proto(array, dtype, array.shape)
            ref = self.node("Const", [], {"value": tensor, "dtype": dtype}, "const")[0]
            # What waits for the node that this is written for must not wait for it.
            self._waits, self.last = waits, last
            self._constants[key] = ref
        return ref

    def ensure_shape(self, ref: Ref, shape: Shape | None) -> Ref:
        """The same tensor with this shape, if the shape is fully known."""
        if elements_of(shape) is None:
            return ref
        return self.op("EnsureShape", [ref], {"shape": tf.TensorShape(shape)})[0]

    def repeat(
        self, node: Node, inputs: Sequence[Ref], attributes: Mapping[str, object]
    ) -> list[Ref]:
        """The same op for other inputs, with some other attributes."""
        merged: dict[str, object] = {**node.attributes, **attributes}
        return self.node(node.type, inputs, merged, node.name, node.device)

    def op(
        self,
        op_type: str,
        inputs: Sequence[Ref | Sequence[Ref]],
        attributes: Mapping[str, object],
        name: str = "",
    ) -> list[Ref]:
        """An op; dtypes and counts of inputs among its attributes are inferred."""
        definition = tf_functions.op_def(op_type)
        assert definition is not None, op_type
        inferred: dict[str, object] = dict(attributes)
        flat: list[Ref] = []
        for argument, operand in zip(definition.input_arg, inputs, strict=True):
            refs = [operand] if isinstance(operand, Ref) else list(operand)
            flat += refs
            if argument.number_attr:
                inferred[argument.number_attr] = len(refs)
            if argument.type_list_attr:
                inferred[argument.type_list_attr] = [ref.dtype for ref in refs]
            elif argument.type_attr and refs:
                inferred.setdefault(argument.type_attr, refs[0].dtype)
        return self.node(op_type, flat, inferred, name or op_type)

    def node(
        self,
        op_type: str,
        inputs: Sequence[Ref],
        attributes: Mapping[str, object],
        name: str,
        device: str = "",
    ) -> list[Ref]:
        """A node with all attributes given: ``AttrValue`` messages or Python values."""
        definition = tf_functions.op_def(op_type)
        assert definition is not None, op_type
        message = self.definition.node_def.add()
        message.name = self.last = self._unique(name)
        message.op, message.device = op_type, device
        if self.compiles:
            self.for_xla[message.name] = self.source
        message.input.extend(ref.text for ref in inputs)
        message.input.extend(f"^{wait}" for wait in dict.fromkeys(self._waits))
        for key, value in attributes.items():
            set_attribute(message.attr[key], value)
        return [
            Ref(f"{message.name}:{output}:{index}", tf_functions.dtype_of(dtype))
            for output, types in output_types(definition, message.attr)
            for index, dtype in enumerate(types)
        ]

    def _unique(self, name: str) -> str:
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        if not number:
            return name
        return self._unique(f"{name}__{number}")


def set_attribute(message: ProtocolBuffer, value: Any) -> None:
    """Write an attribute: an ``AttrValue``, or a Python value."""
    if hasattr(value, "WhichOneof") and hasattr(value, "placeholder"):
        message.CopyFrom(value)
    elif isinstance(value, bool | np.bool_):
        message.b = bool(value)
    elif isinstance(value, int | np.integer):
        message.i = int(value)
    elif isinstance(value, float):
        message.f = value
    elif isinstance(value, str | bytes):
        message.s = value.encode() if isinstance(value, str) else value
    elif isinstance(value, tf.DType):
        message.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        message.shape.CopyFrom(value.as_proto())
    elif isinstance(value, FunctionName):
        message.func.name = value.name
    elif isinstance(value, list | tuple):
        _set_list(message.list, value)
    else:
        message.tensor.CopyFrom(value)


@dataclass(frozen=True, slots=True)
class FunctionName:
    """An attribute that names a function."""

    name: str


def _set_list(message: ProtocolBuffer, values: Sequence[Any]) -> None:
    message.SetInParent()
    for value in values:
        if isinstance(value, tf.DType):
            message.type.append(value.as_datatype_enum)
        elif isinstance(value, tf.TensorShape):
            message.shape.add().CopyFrom(value.as_proto())
        elif isinstance(value, FunctionName):
            message.func.add().name = value.name
        elif isinstance(value, bool):
            message.b.append(value)
        elif isinstance(value, int | np.integer):
            message.i.append(int(value))
        elif isinstance(value, float):
            message.f.append(value)
        else:
            message.s.append(value.encode() if isinstance(value, str) else value)
