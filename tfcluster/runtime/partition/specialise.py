"""Specialises a function for inputs of known shapes; it still holds the whole batch.

Calls are inlined, and the batch is an input instead of what an iterator returns.
TensorFlow infers the shapes, and evaluates whatever depends on no input: shape
arithmetic among it, since the batch size is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.dataset_loops import REDUCTION, loop_of
from tfcluster.runtime.partition.functions import (
    BRANCHES,
    LOOPS,
    MUST_COMPILE,
    Function,
    Input,
    SourceNode,
    called_function,
    function_named,
)
from tfcluster.runtime.partition.graph import Node, OpGraph, Value
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.partition.ragged_rows import TO_DENSE, ragged_rows
from tfcluster.runtime.partition.shape_graph import (
    ELEMENT_SHAPE_INPUT,
    Argument,
    Path,
    ShapeGraph,
    common_shape,
    is_same,
    joined,
    small_constant,
)
from tfcluster.runtime.partition.taken_batches import (
    SplitFunction,
    Taken,
    all_are,
    first_size,
    has_unknown_rows,
    note,
    of_fixed_size,
    split,
    types_of,
)
from tfcluster.runtime.tensor_types import ProtocolBuffer

_DROPPED = frozenset(
    (
        *("_output_shapes", "_class", MUST_COMPILE, "_XlaCompile", "_XlaScope"),
        *("_XlaSeparateCompiledGradients", "_gradient_op_type", "_noinline"),
        *("_read_only_resource_inputs", "_construction_context"),
    )
)
"""Attributes that have no meaning after specialisation."""
_LOOKUPS = ("LookupTableFind", "LookupTableFindV2")
_MOST_ROUNDS = 16
"""Of a fixed point; each makes a shape less specific."""


def specialise(
    function: Function,
    arguments: Sequence[Argument],
    fetched: Mapping[Path, Sequence[Argument]] | None = None,
    taken: Taken | None = None,
) -> OpGraph:
    """The graph of ``function`` for these arguments.

    ``fetched`` has the outputs of nodes that are inputs now, by the nodes' paths: the
    names of the calls around them and their own. These inputs follow the others, in the
    order of ``fetched``. Raises NotImplementedError for a function that cannot be
    specialised, and what TensorFlow raises for shapes that do not fit.
    """
    whole = _Specialiser(taken)
    values = whole.arguments(arguments)
    peeled = {
        path: whole.arguments(outputs) for path, outputs in (fetched or {}).items()
    }
    outputs, _ = whole.inline(function, values, (), (), peeled)
    return whole.finished(outputs)


class _Specialiser(ShapeGraph):
    """Makes one graph; bodies of loops and branches are graphs of their own."""

    def __init__(self, taken: Taken | None, *, for_xla: bool = False) -> None:
        super().__init__()
        self._taken = taken
        self.for_xla = for_xla
        self.fixed: dict[Value, int] = {}
        """See ``OpGraph.taken``."""
        self.of_any_size = False
        """See ``OpGraph.of_any_size``."""

    # --- nodes ------------------------------------------------------------------------

    def inline(
        self,
        function: Function,
        arguments: Sequence[Value],
        path: Path,
        waits: Sequence[Node],
        fetched: Mapping[Path, Sequence[Value]],
    ) -> tuple[list[Value], list[Node]]:
        """Add a function's nodes, whose effects come after ``waits``.

        Returns the outputs, and the nodes that what comes after the call waits for.
        """
        before, attributes = self.for_xla, function.definition.attr
        self.for_xla |= MUST_COMPILE in attributes and attributes[MUST_COMPILE].b
        values = {
            name: [value]
            for name, value in zip(function.arguments, arguments, strict=True)
        }
        after: dict[str, list[Node]] = {name: [] for name in values}
        for name, source in function.nodes.items():
            inputs = [values[node][output] for node, output in source.inputs]
            controls = [node for control in source.controls for node in after[control]]
            here = (*path, name)
            if source.is_stateful:
                controls += waits
            if here in fetched:
                values[name], after[name] = list(fetched[here]), controls
                continue
            values[name], after[name] = self._node(
                source, inputs, controls, here, fetched
            )
        # What comes after the call waits for what it reads, too.
        last = dict.fromkeys(function.must_run)
        last |= {n: None for n, source in function.nodes.items() if source.is_stateful}
        tails = [node for name in last for node in after[name]]
        if not any(source.is_stateful for source in function.nodes.values()):
            tails += waits
        self.for_xla = before
        outputs = [values[node][output] for node, output in function.outputs]
        return outputs, tails

    def _node(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
        fetched: Mapping[Path, Sequence[Value]],
    ) -> tuple[list[Value], list[Node]]:
        definition = source.definition
        called = called_function(definition)
        if called is not None and (function := function_named(called)) is not None:
            return self.inline(function, inputs, path, controls, fetched)
        if definition.op == REDUCTION:
            self.flush()
            loop = loop_of(definition.attr, inputs)
            if loop is not None:
                waits = [node for node in controls if node not in loop.replaced]
                waits += (wait for node in loop.replaced for wait in node.controls)
                return self.inline(loop.function, loop.inputs, path, waits, {})
        if definition.op in LOOPS:
            return self._loop(source, inputs, controls, path)
        if definition.op in BRANCHES:
            return self._branch(source, inputs, controls, path, fetched)
        if definition.op == "ShapeN":
            return self._shapes(source, inputs, controls, path)
        if definition.op in _LOOKUPS:
            return self._look_up(source, inputs, controls, path)
        if definition.op in TO_DENSE:
            self.flush()
            rows = ragged_rows(definition.op, definition.attr, inputs)
            if rows is not None:
                nodes = rows.added_to(self, source.output_types, controls, path)
                return nodes[-1].outputs, nodes
        if definition.op == "IdentityN" and not controls:
            # Keras passes all gradients through one: the first would wait for the last.
            return inputs, [value.node for value in inputs]
        element = self._element_of_list(definition.op, inputs)
        attributes = {k: v for k, v in definition.attr.items() if k not in _DROPPED}
        node = self._source_node(source, inputs, controls, attributes, path)
        outputs = list(node.outputs)
        if element is not None:
            outputs[-1] = element
        return outputs, [node]

    def _look_up(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
    ) -> tuple[list[Value], list[Node]]:
        """A lookup in a table, of which TensorFlow infers no shape.

        It has a value of the default's shape for each key.
        """
        self.flush()
        keys, default = inputs[1].shape, inputs[2].shape
        attributes = source.definition.attr
        node = self._source_node(source, inputs, controls, attributes, path)
        value = node.outputs[0]
        if keys is None or default is None:
            return [value], [node]
        checked = self.ensure_shape(value, (*keys, *default), path[-1])
        return checked.outputs, [node, checked]

    def _shapes(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
    ) -> tuple[list[Value], list[Node]]:
        """A ``Shape`` for each input: TensorFlow evaluates no ``ShapeN``."""
        dtypes = [tf_functions.dtype_of(number) for number in source.output_types]
        nodes = []
        for value, dtype in zip(inputs, dtypes, strict=True):
            attributes = {
                "T": tf.compat.v1.AttrValue(type=value.dtype.as_datatype_enum),
                "out_type": tf.compat.v1.AttrValue(type=dtype.as_datatype_enum),
            }
            nodes.append(
                self.add("Shape", [value], controls, attributes, [dtype], path[-1])
            )
        return [node.outputs[0] for node in nodes], nodes

    def _source_node(
        self,
        source: SourceNode,
        inputs: Sequence[Value],
        controls: Sequence[Node],
        attributes: Mapping[str, ProtocolBuffer],
        path: Path,
    ) -> Node:
        return self.add(
            source.definition.op,
            inputs,
            controls,
            attributes,
            [tf_functions.dtype_of(number) for number in source.output_types],
            path[-1],
            device=source.definition.device,
            stateful=source.is_stateful,
            origin=path,
        )

    def _element_of_list(self, op_type: str, inputs: list[Value]) -> Value | None:
        """The element that an op reads from a list, if it is known.

        If only its shape is known, the op gets it as its input.
        """
        place = ELEMENT_SHAPE_INPUT.get(op_type)
        if place is None:
            return None
        if inputs[0].list is None:
            self.flush()
        list_type = inputs[0].list
        if list_type is None or not list_type.begun or list_type.dtype is None:
            return None
        if list_type.constant is not None and op_type == "TensorListPopBack":
            return self.constant(list_type.constant, list_type.dtype)
        if list_type.shape is not None:
            sizes = [-1 if size is None else size for size in list_type.shape]
            array = tf.make_ndarray(tf.make_tensor_proto(sizes, tf.int32))
            if inputs[place].dtype == tf.int32:
                inputs[place] = self.constant(array.reshape(-1), tf.int32)
        return None

    # --- loops and branches -----------------------------------------------------------

    def _loop(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
    ) -> tuple[list[Value], list[Node]]:
        self.flush()
        attributes = source.definition.attr
        condition, body = (
            _require(attributes[name].func.name) for name in ("cond", "body")
        )
        stays = [
            output == Input(name, 0)
            for output, name in zip(body.outputs, body.arguments, strict=True)
        ]
        arguments = [
            self._argument_of(value, with_constant=same)
            for value, same in zip(inputs, stays, strict=True)
        ]
        for _ in range(_MOST_ROUNDS):
            graph = self._body(body, arguments, (*path, "body"))
            wider = [
                argument if same else _wider(argument, output)
                for argument, output, same in zip(
                    arguments, graph.outputs, stays, strict=True
                )
            ]
            if all(map(_is_same, wider, arguments)):
                break
            arguments = wider
        else:
            raise NotImplementedError(f"the shapes of {source.definition.name} vary")
        kept = _with_shapes(
            {k: v for k, v in attributes.items() if k not in _DROPPED}, arguments
        )
        node = self._source_node(source, inputs, controls, kept, path)
        # Ops of the same name in both have random states of their own.
        within = (*path, "condition")
        node.bodies = (self._body(condition, arguments, within), graph)
        self.flush()
        for value, argument, first in zip(node.outputs, arguments, inputs, strict=True):
            value.list = argument.list
            if argument.constant is not None:
                value.constant = argument.constant
            if first.is_handle:
                tf_functions.copy_handle_data(self.tensors[first], self.tensors[value])
            if argument.list is not None and argument.list.begun:
                tf_functions.refer(self.tensors[value], argument.list.shape)
        return list(node.outputs), [node]

    def _branch(
        self,
        source: SourceNode,
        inputs: list[Value],
        controls: list[Node],
        path: Path,
        fetched: Mapping[Path, Sequence[Value]],
    ) -> tuple[list[Value], list[Node]]:
        self.flush()
        attributes = source.definition.attr
        if "branches" in attributes:
            names = [function.name for function in attributes["branches"].list.func]
        else:
            # A case chooses by number, and 0 stands for "else" here.
            names = [
                attributes[name].func.name for name in ("else_branch", "then_branch")
            ]
        chosen, *rest = inputs
        index = chosen.constant if chosen.shape == () else None
        if index is not None and chosen.dtype != tf.string:
            number = int(index) if "branches" in attributes else int(bool(index))
            number = number if 0 <= number < len(names) else len(names) - 1
            within = (*path, str(number))
            return self.inline(_require(names[number]), rest, within, controls, fetched)
        arguments = [self._argument_of(value) for value in rest]
        bodies = [
            self._body(_require(name), arguments, (*path, str(number)))
            for number, name in enumerate(names)
        ]
        kept = {k: v for k, v in attributes.items() if k not in _DROPPED}
        return self._branch_node(
            source.definition.op, inputs, controls, bodies, kept, path
        )

    def _branch_node(
        self,
        op_type: str,
        inputs: Sequence[Value],
        controls: Sequence[Node],
        bodies: Sequence[OpGraph],
        attributes: Mapping[str, ProtocolBuffer],
        path: Path,
    ) -> tuple[list[Value], list[Node]]:
        outputs = [
            Argument(
                first.dtype,
                _common(output.shape for output in (first, *others)),
                None,
                joined(output.list for output in (first, *others)),
            )
            for first, *others in zip(*(body.outputs for body in bodies), strict=True)
        ]
        node = self.add(
            op_type,
            inputs,
            controls,
            _with_shapes(attributes, outputs),
            [output.dtype for output in outputs],
            path[-1],
            stateful=True,
            origin=path,
        )
        node.bodies = tuple(bodies)
        self.flush()
        for value, output in zip(node.outputs, outputs, strict=True):
            value.list = output.list
        return list(node.outputs), [node]

    # --- batches that loops take ------------------------------------------------------

    def _body(
        self, function: Function, arguments: Sequence[Argument], path: Path
    ) -> OpGraph:
        graph = _Specialiser(self._taken, for_xla=self.for_xla)
        values = graph.arguments(arguments)
        taken = self._taken
        parts = None if taken is None else split(function, taken.takes)
        if parts is None:
            outputs, _ = graph.inline(function, values, path, (), {})
        else:
            outputs = graph.taking(parts, values, path)
        finished = graph.finished(outputs)
        finished.taken, finished.of_any_size = graph.fixed, graph.of_any_size
        return finished

    def taking(
        self, parts: SplitFunction, arguments: Sequence[Value], path: Path
    ) -> list[Value]:
        """Add a function that takes a batch, of whose size the rest depends."""
        assert self._taken is not None
        first_outputs, tails = self.inline(parts.first, arguments, path, (), {})
        self.flush()
        batch = [value for value in first_outputs if has_unknown_rows(value)]
        values = [*arguments, *first_outputs]
        if not batch:
            self.fixed = of_fixed_size(first_outputs, self._taken.least)
            return self.inline(parts.rest, values, path, tails, {})[0]
        sizes = [first_size(self, value) for value in batch]
        note(self, self._taken, sizes[0], path)
        rows = self._taken.rows
        if rows is None:
            self.of_any_size = True
            return self.inline(parts.rest, values, path, tails, {})[0]
        is_known = all_are(self, sizes, rows)
        self.flush()
        unsized = [self._argument_of(value) for value in values]
        sized = [
            replace(argument, shape=(rows, *value.shape[1:]))
            if value in batch and value.shape is not None
            else argument
            for argument, value in zip(unsized, values, strict=True)
        ]
        # A random op has the same path as where the rest is inlined, and one sequence.
        bodies = [self._body(parts.rest, inputs, path) for inputs in (unsized, sized)]
        bodies[0].of_any_size = True
        bodies[1].rows = {i for i, value in enumerate(values) if value in batch}
        # The bodies get their names when they are written.
        unnamed, lowers = tf.compat.v1.AttrValue(), tf.compat.v1.AttrValue(b=True)
        unnamed.func.name = "unnamed"
        attributes = {
            "then_branch": unnamed,
            "else_branch": unnamed,
            "_lower_using_switch_merge": lowers,
            "Tcond": types_of([tf.bool], single=True),
            "Tin": types_of([value.dtype for value in values]),
            "Tout": types_of([value.dtype for value in bodies[0].outputs]),
        }
        outputs, _ = self._branch_node(
            "If", [is_known, *values], tails, bodies, attributes, path
        )
        return outputs

    def _argument_of(self, value: Value, *, with_constant: bool = True) -> Argument:
        like = self.tensors[value] if value.is_handle else None
        constant = small_constant(value) if with_constant else None
        return Argument(value.dtype, value.shape, like, value.list, constant)


def _require(name: str) -> Function:
    function = function_named(name)
    if function is None:
        raise NotImplementedError(f"there is no function {name}")
    return function


def _wider(argument: Argument, output: Value) -> Argument:
    if output.is_handle:
        return replace(argument, list=joined((argument.list, output.list)))
    return replace(argument, shape=common_shape(argument.shape, output.shape))


def _is_same(first: Argument, second: Argument) -> bool:
    return first.shape == second.shape and is_same(first.list, second.list)


def _common(shapes: Iterable[Shape | None]) -> Shape | None:
    first, *rest = shapes
    for shape in rest:
        first = common_shape(first, shape)
    return first


def _with_shapes(
    attributes: Mapping[str, ProtocolBuffer], outputs: Sequence[Argument]
) -> Mapping[str, ProtocolBuffer]:
    """The attributes of a loop or branch, with the shapes of its outputs."""
    shapes = tf.compat.v1.AttrValue()
    shapes.list.SetInParent()
    for output in outputs:
        shapes.list.shape.add().CopyFrom(tf.TensorShape(output.shape).as_proto())
    return {**attributes, "output_shapes": shapes}
