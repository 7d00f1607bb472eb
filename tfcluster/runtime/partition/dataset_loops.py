"""Loops over a dataset within a function, written as loops over an iterator.

AutoGraph turns ``for batch in dataset`` into ``Dataset.scan``, ``take_while`` if the
loop may end early, and ``reduce``: ops whose bodies run somewhere else. The same bodies
within a ``While`` can be divided like those of any other loop that takes batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import Function, function_named, op_types
from tfcluster.runtime.partition.graph import Node, Value, python_value
from tfcluster.runtime.partition.rules.random import WITH_STATE
from tfcluster.runtime.partition.writer import FunctionName, OpWriter, Ref
from tfcluster.runtime.tensor_types import DType, ProtocolBuffer

REDUCTION = "ReduceDataset"


@dataclass(frozen=True, slots=True)
class ElementFunction:
    """A function that a dataset op calls for each element, after its own inputs."""

    function: Function
    state: Sequence[Value]
    """The initial state, which the function gets first; empty for ``take_while``."""
    others: Sequence[Value]
    """What the function gets last."""

    @property
    def types(self) -> list[DType]:
        """The dtypes of the function's arguments."""
        signature = self.function.definition.signature
        return [tf.as_dtype(argument.type) for argument in signature.input_arg]

    def call(self, writer: OpWriter, inputs: Sequence[Ref]) -> list[Ref]:
        outputs = self.function.definition.signature.output_arg
        return writer.op(
            "StatefulPartitionedCall",
            [inputs],
            {
                "f": FunctionName(self.function.name),
                "Tout": [tf.as_dtype(output.type) for output in outputs],
            },
        )


@dataclass(frozen=True, slots=True)
class DatasetLoop:
    """A function that does what the ops did, and its inputs."""

    function: Function
    inputs: list[Value]
    replaced: list[Node]
    """The ops before the reduction whose bodies the function has."""


def loop_of(
    attributes: Mapping[str, ProtocolBuffer], inputs: Sequence[Value]
) -> DatasetLoop | None:
    """The loop for a ``ReduceDataset`` with these attributes and inputs.

    None if a body draws random numbers from states of its ops: in a dataset, these
    begin anew with each iteration over the dataset.
    """
    reduction = _stage(attributes, "f", inputs)
    scan = condition = None
    dataset, replaced = inputs[0], []
    if dataset.node.type == "TakeWhileDataset":
        condition = _stage(dataset.node.attributes, "predicate", dataset.node.inputs)
        replaced.append(dataset.node)
        dataset = dataset.node.inputs[0]
    if dataset.node.type == "ScanDataset":
        scan = _stage(dataset.node.attributes, "f", dataset.node.inputs)
        replaced.append(dataset.node)
        dataset = dataset.node.inputs[0]
    elif condition is not None:
        return None
    stages = [stage for stage in (scan, condition, reduction) if stage is not None]
    if any(not WITH_STATE.isdisjoint(op_types(stage.function)) for stage in stages):
        return None
    name = _written(scan, condition, reduction)
    function = function_named(name)
    assert function is not None
    loop_inputs = [
        dataset,
        *(value for stage in stages for value in stage.state),
        *(value for stage in stages for value in stage.others),
    ]
    return DatasetLoop(function, loop_inputs, replaced)


def _stage(
    attributes: Mapping[str, ProtocolBuffer], name: str, inputs: Sequence[Value]
) -> ElementFunction:
    function = function_named(attributes[name].func.name)
    if function is None:
        raise NotImplementedError("a dataset's function is not registered")
    others = len(attributes["Targuments"].list.type)
    end = len(inputs) - others
    return ElementFunction(function, inputs[1:end], inputs[end:])


def _written(
    scan: ElementFunction | None,
    condition: ElementFunction | None,
    reduction: ElementFunction,
) -> str:
    """Write and register the functions; returns the name of the one to call."""
    first = reduction if scan is None else scan
    start, end = len(first.state), len(first.types) - len(first.others)
    element = first.types[start:end]
    shapes = [_shape_of(first.function, place) for place in range(start, end)]
    stages = [stage for stage in (scan, condition, reduction) if stage is not None]
    states = [value.dtype for stage in stages for value in stage.state]
    others = [value.dtype for stage in stages for value in stage.others]
    kinds: dict[str, object] = {"output_types": element, "output_shapes": shapes}
    carried = [tf.bool, tf.resource, *states, *others]

    step = OpWriter("dataset_loop_step")
    optional, *values = (step.argument(t) for t in (tf.variant, *states, *others))
    batch = step.op("OptionalGetValue", [optional], kinds)
    step_name = _finish(step, _step(step, scan, condition, reduction, batch, values))

    stop = OpWriter("dataset_loop_stop")
    _, *values = (stop.argument(t) for t in (tf.variant, *states, *others))
    ended = stop.constant(np.array(False))
    stop_name = _finish(stop, [ended, *values[: len(states)]])

    body = OpWriter("dataset_loop_body")
    _, iterator, *values = (body.argument(dtype) for dtype in carried)
    (optional,) = body.op("IteratorGetNextAsOptional", [iterator], kinds)
    (is_there,) = body.op("OptionalHasValue", [optional], {})
    goes_on, *new = body.op(
        "If",
        [is_there, [optional, *values]],
        {
            "Tout": [tf.bool, *states],
            "then_branch": FunctionName(step_name),
            "else_branch": FunctionName(stop_name),
        },
    )
    body_name = _finish(body, [goes_on, iterator, *new, *values[len(states) :]])

    check = OpWriter("dataset_loop_condition")
    goes_on, *_ = (check.argument(dtype) for dtype in carried)
    check_name = _finish(check, [goes_on])

    whole = OpWriter("dataset_loop")
    dataset, *values = (whole.argument(t) for t in (tf.variant, *states, *others))
    (iterator,) = whole.op("AnonymousIteratorV3", [], kinds)
    whole.op("MakeIterator", [dataset, iterator], {})
    with whole.after([whole.last]):
        results = whole.op(
            "While",
            [[whole.constant(np.array(True)), iterator, *values]],
            {
                "T": carried,
                "cond": FunctionName(check_name),
                "body": FunctionName(body_name),
                "parallel_iterations": 1,
            },
        )
    last = 2 + len(states)
    return _finish(whole, results[last - len(reduction.state) : last])


def _step(
    writer: OpWriter,
    scan: ElementFunction | None,
    condition: ElementFunction | None,
    reduction: ElementFunction,
    batch: Sequence[Ref],
    values: Sequence[Ref],
) -> list[Ref]:
    """Whether the loop goes on after an element, and the new states."""
    rest = list(values)
    stages = [stage for stage in (scan, condition, reduction) if stage is not None]
    states, others = (
        [[rest.pop(0) for _ in values] for values in chosen]
        for chosen in (
            [stage.state for stage in stages],
            [stage.others for stage in stages],
        )
    )
    element, new = list(batch), []
    if scan is not None:
        scanned = scan.call(writer, [*states[0], *element, *others[0]])
        new, element = scanned[: len(states[0])], scanned[len(states[0]) :]
    inputs = [*states[-1], *element, *others[-1]]
    if condition is None:
        goes_on = writer.constant(np.array(True))
        return [goes_on, *new, *reduction.call(writer, inputs)]
    (goes_on,) = condition.call(writer, [*element, *others[1]])
    unchanged = OpWriter("dataset_loop_unchanged")
    arguments = [unchanged.argument(value.dtype) for value in inputs]
    reduced = writer.op(
        "If",
        [goes_on, inputs],
        {
            "Tout": [state.dtype for state in states[-1]],
            "then_branch": FunctionName(reduction.function.name),
            "else_branch": FunctionName(
                _finish(unchanged, arguments[: len(states[-1])])
            ),
        },
    )
    return [goes_on, *new, *reduced]


def _shape_of(function: Function, place: int) -> tf.TensorShape:
    """The shape of an argument, as far as the function says it."""
    attributes = function.definition.arg_attr
    if place not in attributes:
        return tf.TensorShape(None)
    shapes = python_value(attributes[place].attr["_output_shapes"])
    return shapes[0] if shapes else tf.TensorShape(None)


def _finish(writer: OpWriter, outputs: Sequence[Ref]) -> str:
    tf_functions.register(writer.finish(outputs, []))
    return writer.name
