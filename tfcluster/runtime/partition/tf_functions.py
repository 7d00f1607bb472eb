"""TensorFlow's functions and ops, by names that may change.

With ``tf_datasets``, all of TensorFlow's non-public parts that the partition uses.
``NAMES`` says for each
name which feature needs it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfcluster.runtime.contract import names

if TYPE_CHECKING:
    from tfcluster.runtime.tensor_types import (
        Array,
        DType,
        Graph,
        Operation,
        ProtocolBuffer,
        Tensor,
    )

_PARTITION = "dividing functions among the ranks"
_TABLES = "weights that are divided by rows"
_VARIABLES = "tensorflow.python.ops.resource_variable_ops"
_CONTEXT = "tensorflow.python.eager.context.Context"

NAMES = (
    *names(
        _CONTEXT,
        _PARTITION,
        "add_function_def",
        "get_function_def",
        "has_function",
        "call_function",
        "remove_function",
        "get_compiler_ir",
    ),
    *names(
        "tensorflow.python.framework.kernels",
        _PARTITION,
        "get_registered_kernels_for_op",
    ),
    *names(
        "tensorflow.python.client.pywrap_tf_session",
        _PARTITION,
        "TF_TryEvaluateConstant_wrapper",
    ),
    *names("tensorflow.python.ops.script_ops", _PARTITION, "_py_funcs"),
    *names(
        "tensorflow.python.ops.handle_data_util",
        _PARTITION,
        *("set_handle_data", "get_handle_data"),
    ),
    *names(
        "tensorflow.python.eager.polymorphic_function.concrete_function"
        ".ConcreteFunction.__init__",
        _PARTITION,
        "_higher_order_tape_functions",
    ),
    *names("tensorflow.python.eager.record", _TABLES, "record_operation"),
    *names(_VARIABLES, _TABLES, "variable_accessed"),
    *names(f"{_VARIABLES}.BaseResourceVariable.__init__", _TABLES, "_shape"),
    *names(f"{_VARIABLES}.BaseResourceVariable.__init__", _PARTITION, "_handle"),
)


def definition_of(name: str) -> ProtocolBuffer | None:
    """The FunctionDef of a registered function; None if there is no such function."""
    from tensorflow.python.eager import context

    eager = context.context()
    return eager.get_function_def(name) if eager.has_function(name) else None


def register(definition: ProtocolBuffer) -> None:
    """Register a FunctionDef. Raises ``tf.errors.OpError`` if it is wrong."""
    from tensorflow.python.eager import context

    context.context().add_function_def(definition)


def is_registered(name: str) -> bool:
    """Whether a function of this name is registered."""
    from tensorflow.python.eager import context

    return bool(context.context().has_function(name))


def debug_info(name: str) -> ProtocolBuffer | None:
    """The GraphDebugInfo of a registered function: which lines added its nodes.

    None if there is no such function, or if this TensorFlow has no such record.
    """
    from tensorflow.python.eager import context

    eager = context.context()
    info_of = getattr(eager, "get_graph_debug_info", None)
    if info_of is None or not eager.has_function(name):
        return None
    info: ProtocolBuffer = info_of(name)
    return info if hasattr(info, "name_to_trace_id") else None


def forget(name: str) -> None:
    """Remove a registered function."""
    from tensorflow.python.eager import context

    context.context().remove_function(name)


def call(name: str, inputs: Sequence[Tensor], outputs: int) -> list[Tensor]:
    """Call a registered function; raises what its ops raise."""
    from tensorflow.python.eager import context

    results = context.context().call_function(name.encode(), list(inputs), outputs)
    return list(results or ())


def op_def(op_type: str) -> ProtocolBuffer | None:
    """The OpDef of an op, or the signature of a function of that name, or None."""
    definition = _registered_op(op_type)
    if definition is None and (function := definition_of(op_type)) is not None:
        definition = function.signature
    return definition


@functools.cache
def _registered_op(op_type: str) -> ProtocolBuffer | None:
    from tensorflow.python.framework import op_def_registry

    definition: ProtocolBuffer | None = op_def_registry.get(op_type)
    return definition


@functools.cache
def dtype_of(number: int) -> DType:
    """The dtype with this number in messages."""
    import tensorflow as tf

    dtype: DType = tf.as_dtype(number)
    return dtype


def is_function(name: str) -> bool:
    """Whether this is the name of a registered function, not of an op."""
    return _registered_op(name) is None and definition_of(name) is not None


_numbers = itertools.count(1)


def living_variables(function: Any) -> list[Any]:
    """The ``tf.Variable`` objects of a ``ConcreteFunction`` that still exist.

    Its ``variables`` raises AssertionError if one of them does not, although the
    function can be called as long as the resources exist.
    """
    variables = (ref() for ref in function.graph._weak_variables)
    return [variable for variable in variables if variable is not None]


def has_higher_gradients(function: Any) -> bool:
    """Whether a ``ConcreteFunction`` ran under several tapes, or a persistent one.

    TensorFlow's gradient of it then has a gradient for every output, hidden ones, too.
    """
    return bool(function._higher_order_tape_functions)


def unique_name(stem: str) -> str:
    """A name that no other function of this process has."""
    return f"{stem}_{next(_numbers)}"


def constant_of(tensor: Tensor) -> Array | None:
    """The value of a tensor of a graph that depends on no input, as far as known."""
    from tensorflow.python.client import pywrap_tf_session

    symbolic: Any = tensor
    with symbolic.graph._c_graph.get() as graph:
        value: Array | None = pywrap_tf_session.TF_TryEvaluateConstant_wrapper(
            graph, symbolic._as_tf_output()
        )
    return value


def import_nodes(
    graph: Graph, definition: ProtocolBuffer, inputs: Mapping[str, Tensor]
) -> None:
    """Add the nodes of a GraphDef to a graph; ``inputs`` are tensors by name."""
    import tensorflow as tf

    # Without a version, a placeholder of shape () would be one of an unknown shape.
    definition.versions.producer = tf.version.GRAPH_DEF_VERSION
    with graph.as_default():
        tf.graph_util.import_graph_def(definition, input_map=inputs or None, name="")


def copy_handle_data(source: Tensor, target: Tensor) -> None:
    """Note on a tensor what another handle refers to, if that is known."""
    data = handle_data(source)
    if data is not None:
        set_handle_data(target, data)


def refer(tensor: Tensor, shape: Any) -> None:
    """Note the shape of the elements of a TensorList, whose handle has a type."""
    import tensorflow as tf
    from tensorflow.python.framework import cpp_shape_inference_pb2

    data = handle_data(tensor)
    if data is None or len(data.shape_and_type) != 1:
        return
    changed = cpp_shape_inference_pb2.CppShapeInferenceResult.HandleData()
    changed.CopyFrom(data)
    changed.shape_and_type[0].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    set_handle_data(tensor, changed)


def operation(graph: Graph, name: str) -> Operation:
    """An op of a graph."""
    return graph.get_operation_by_name(name)


def handle_data(tensor: Tensor) -> ProtocolBuffer | None:
    """What a handle refers to, as a ``HandleData`` message; None if that is unknown."""
    from tensorflow.python.ops import handle_data_util

    data: ProtocolBuffer | None = handle_data_util.get_handle_data(tensor)
    return data if data is not None and data.is_set else None


def variable_spec(tensor: Tensor) -> tuple[Any, Any] | None:
    """Dtype and shape of the variable to which a handle refers; None if it is none."""
    import tensorflow as tf

    if tensor.dtype != tf.resource:
        return None
    data = handle_data(tensor)
    if data is None or len(data.shape_and_type) != 1:
        return None
    spec = data.shape_and_type[0]
    shape = tf.TensorShape(spec.shape)
    sizes = () if shape.rank is None else tuple(shape.as_list())
    return tf.as_dtype(spec.dtype), sizes


def with_shape(data: ProtocolBuffer, shape: Sequence[int | None]) -> ProtocolBuffer:
    """The ``HandleData`` of a variable of the same dtype and another shape."""
    import tensorflow as tf

    changed = type(data)()
    changed.CopyFrom(data)
    changed.shape_and_type[0].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    return changed


def handle_of(variable: Any) -> Tensor:
    """The handle of a variable, without a use of the variable."""
    handle: Tensor | None = getattr(variable, "__dict__", {}).get("_handle")
    return variable.handle if handle is None else handle


class _NoTensor:
    """What has the attributes of a handle, and is no tensor."""

    def __init__(self, handle: Tensor) -> None:
        self._of = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def handles_of_empty(is_empty: Callable[[Tensor], bool]) -> dict[str, property]:
    """The attributes with a variable's handle, for a class of variables.

    TensorFlow's eager ops read the buffer of an argument whose ``_handle`` is a tensor,
    and convert others with the variable's methods. So for a variable whose handle
    ``is_empty``, that is no tensor in eager code.
    """
    import tensorflow as tf

    def handle(variable: Any) -> Any:
        own = handle_of(variable)
        return _NoTensor(own) if tf.executing_eagerly() and is_empty(own) else own

    return {"handle": property(handle_of), "_handle": property(handle)}


def set_handle_data(tensor: Tensor, data: ProtocolBuffer) -> None:
    """Note on a tensor what its handle refers to."""
    from tensorflow.python.ops import handle_data_util

    handle_data_util.set_handle_data(tensor, data)


def record_read(variable: Any, value: Tensor) -> None:
    """Let tapes know that this is the value of a variable."""
    from tensorflow.python.eager import record
    from tensorflow.python.ops import resource_variable_ops

    resource_variable_ops.variable_accessed(variable)
    record.record_operation(
        "ReadVariableOp", [value], [variable.handle], lambda gradient: [gradient]
    )


def set_shape(variable: Any, shape: Sequence[int]) -> None:
    """Let a ``tf.Variable`` have this shape, whatever it holds."""
    import tensorflow as tf

    variable._shape = tf.TensorShape(shape)
    data = handle_data(variable.handle)
    assert data is not None
    variable.handle._handle_data = with_shape(data, shape)


class HostFunction:
    """A Python function that an op ``PyFunc`` calls, for as long as this object lives.

    ``function`` gets arrays and returns a list of arrays.
    """

    def __init__(self, function: Callable[..., Sequence[Array]]) -> None:
        from tensorflow.python.ops import script_ops

        self._function = function
        self.token: str = script_ops._py_funcs.insert(function)


# --- XLA ------------------------------------------------------------------------------


def xla_device() -> str:
    """The device for which XLA compiles programs: the first GPU, else a CPU."""
    import tensorflow as tf

    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/device:{kind}:0"


def lower_by_xla(
    name: str, specs: Sequence[Any], variables: Sequence[Tensor], device: str
) -> None:
    """Let XLA read a registered function; raises ``tf.errors.OpError`` if it cannot.

    The function gets tensors of these ``tf.TensorSpec``, then the handles of variables.
    """
    from tensorflow.python.eager import context

    context.context().get_compiler_ir(
        device_name=device,
        platform_name=None,
        function_name=name,
        flat_args=list(specs),
        captured_inputs=list(variables),
        stage="hlo",
    )


def has_xla_kernel(node: ProtocolBuffer, device: str) -> bool:
    """Whether XLA can compile such a node for a device."""
    for constraints in _xla_kernels(node.op, device):
        for attribute, allowed in constraints.items():
            message = node.attr[attribute]
            types = list(message.list.type) or [message.type]
            if not allowed.issuperset(types):
                break
        else:
            return True
    return False


@functools.cache
def _xla_kernels(op_type: str, device: str) -> list[dict[str, frozenset[int]]]:
    """The dtypes that XLA's kernels of an op allow, by the names of attributes."""
    from tensorflow.python.framework import kernels

    _register_xla_kernels(device)
    kind = "XLA_GPU_JIT" if "GPU" in device else "XLA_CPU_JIT"
    return [
        {
            constraint.name: frozenset(constraint.allowed_values.list.type)
            for constraint in kernel.constraint
        }
        for kernel in kernels.get_registered_kernels_for_op(op_type).kernel
        if kernel.device_type == kind
    ]


@functools.cache
def _register_xla_kernels(device: str) -> None:
    """XLA registers its kernels when it reads the first function."""
    import tensorflow as tf

    empty = tf.compat.v1.GraphDef().library.function.add()
    empty.signature.name = unique_name("tfcluster_empty")
    register(empty)
    lower_by_xla(empty.signature.name, [], [], device)
