"""Arguments for every function of keras.ops, to trace it with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

Case: TypeAlias = tuple[Callable[..., Any], Sequence[tf.TensorSpec]]
Maker: TypeAlias = Callable[[Callable[..., Any]], Case]
"""Makes the case of a function."""

ops = keras.ops

WITHOUT_CASE: Mapping[str, str] = {
    "convert_to_numpy": "it needs a value",
    "dtype": "it makes no op",
    "is_tensor": "it makes no op",
    "ndim": "it makes no op",
    "jvp": "it needs a forward-mode tape, which does not run in a function",
    "custom_gradient": "it wraps a function and makes no op of its own",
    "vectorize": "it wraps a function and makes no op of its own",
    "lstsq": "it decomposes whole matrices, for which there is no case with rows",
    **dict.fromkeys(
        (
            *("bartlett", "corrcoef", "isin", "kron", "nanmedian", "nanpercentile"),
            *("nanquantile", "tri"),
        ),
        "Keras reads values in it, so it cannot be traced",
    ),
}


def _spec(dtype: str) -> Callable[..., tf.TensorSpec]:
    return lambda *shape: tf.TensorSpec((None, *shape), dtype)


_f, _i, _b, _c = map(_spec, ("float32", "int32", "bool", "complex64"))
_SQUARE = _f(3, 3)
_INTEGERS = (
    *("bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_not"),
    *("bitwise_or", "bitwise_right_shift", "bitwise_xor", "left_shift", "right_shift"),
    *("gcd", "lcm"),
)
_BOOLEANS = ("all", "any", "logical_and", "logical_not", "logical_or", "logical_xor")
_SQUARES = (
    *("cholesky", "cholesky_inverse", "det", "eig", "eigh", "inv", "logdet"),
    *("slogdet", "trace"),
)
_MATRICES = (
    *("diagonal", "dsplit", "fliplr", "flipud", "hsplit", "matrix_rank", "pinv"),
    *("qr", "rot90", "svd", "tril", "triu", "vsplit"),
)
_COMPLEX = (
    "angle",
    "conj",
    "conjugate",
    "fft",
    "fft2",
    "ifft2",
    "imag",
    "irfft",
    "real",
)
_WINDOWS = ("blackman", "hamming", "hanning")
_FIXED = tf.TensorSpec((6,), "float32")
_IMAGE = _f(8, 8, 4)
_KERNEL = tf.TensorSpec((3, 3, 4, 5), "float32")


def _with(*specs: tf.TensorSpec, **arguments: Any) -> Maker:
    return lambda function: ((lambda *x: function(*x, **arguments)), specs)


def _pooled(function: Callable[..., Any]) -> Case:
    return (lambda x: function(x, 2)), [_IMAGE]


def _segments(function: Callable[..., Any]) -> Case:
    return (lambda x, i: function(x, i, 5)), [_f(4), _i()]


def _reduced(function: Callable[..., Any]) -> Case:
    return (lambda x: function(x, 0.3, axis=0)), [_f(4)]


def _same(names: Sequence[str], makers: Sequence[Maker]) -> dict[str, Sequence[Maker]]:
    return dict.fromkeys(names, makers)


SPECIAL: Mapping[str, Sequence[Maker]] = {
    **_same(_BOOLEANS[:2], [_with(_b(4)), _with(_b(4), axis=-1)]),
    **_same(_SQUARES, [_with(_SQUARE)]),
    **_same(_MATRICES, [_with(_f(4, 4))]),
    **_same(("dsplit", "hsplit"), [lambda f: (lambda x: f(x, 2), [_f(4, 4)])]),
    "vsplit": [
        lambda f: (lambda x: f(x, 2), [tf.TensorSpec((4, 4), "float32")]),
    ],
    **_same(_COMPLEX, [_with(_c(4, 4)), _with(_f(4, 4))]),
    "fft": [lambda f: (lambda x, y: f((x, y)), [_f(8), _f(8)])],
    "fft2": [lambda f: (lambda x, y: f((x, y)), [_f(8, 8), _f(8, 8)])],
    "ifft2": [lambda f: (lambda x, y: f((x, y)), [_f(8, 8), _f(8, 8)])],
    "irfft": [lambda f: (lambda x, y: f((x, y)), [_f(8), _f(8)])],
    **_same(_WINDOWS, [lambda f: (lambda: f(tf.constant(8)), [])]),
    "kaiser": [lambda f: (lambda: f(8, 2.0), [])],
    **_same(("adaptive_average_pool", "adaptive_max_pool"), [_pooled]),
    **_same(("average_pool", "max_pool"), [_pooled]),
    **_same(("segment_max", "segment_min", "segment_prod", "segment_sum"), [_segments]),
    **_same(
        ("percentile", "quantile"),
        [
            _reduced,
            lambda f: (lambda x: f(x, 0.3, axis=-1, method="nearest"), [_f(4)]),
        ],
    ),
    "append": [_with(_f(4), _f(4)), _with(_f(4), _f(4), axis=0)],
    "arange": [lambda f: (lambda x: f(ops.shape(x)[0]), [_f()])],
    "argpartition": [_with(_f(4), kth=2)],
    "array_split": [lambda f: (lambda x: f(x, 2, axis=1), [_f(4)])],
    "associative_scan": [
        lambda f: (
            lambda x: f(lambda a, b: a + b, x),
            [tf.TensorSpec((6, 4), "float32")],
        )
    ],
    "batch_normalization": [
        lambda f: (
            lambda x: f(x, tf.reduce_mean(x, 0), tf.reduce_mean(x * x, 0), axis=-1),
            [_f(4)],
        )
    ],
    "bincount": [
        _with(_i(), minlength=3),
        _with(_i(4), minlength=3),
        lambda f: (lambda x, w: f(x, w), [_i(4), _f(4)]),
        _with(_i(4), minlength=3, sparse=True),
    ],
    "broadcast_to": [lambda f: (lambda x: f(x, (3, 4)), [_f(4)])],
    "cast": [_with(_f(4), dtype="float16")],
    "clip": [_with(_f(4), x_min=0.0, x_max=1.0)],
    "concatenate": [lambda f: (lambda *x: f(x), [_f(4), _f(4)])],
    "cond": [
        lambda f: (
            lambda x: f(ops.sum(x) > 0, lambda: x + 1, lambda: x - 1),
            [_f(4)],
        )
    ],
    "conv": [_with(_IMAGE, _KERNEL), _with(_IMAGE, _KERNEL, dilation_rate=2)],
    "conv_transpose": [
        _with(_IMAGE, tf.TensorSpec((3, 3, 5, 4), "float32"), strides=2)
    ],
    "depthwise_conv": [_with(_IMAGE, _KERNEL)],
    "separable_conv": [
        _with(
            _IMAGE,
            tf.TensorSpec((3, 3, 4, 1), "float32"),
            tf.TensorSpec((1, 1, 4, 5), "float32"),
        )
    ],
    "correlate": [_with(_FIXED, _FIXED)],
    "cross": [_with(_f(3), _f(3))],
    "ctc_decode": [
        _with(_f(6, 4), _i()),
        _with(_f(6, 4), _i(), strategy="beam_search", beam_width=3),
    ],
    "ctc_loss": [_with(_i(3), _f(6, 4), _i(), _i())],
    "depth_to_space": [_with(_IMAGE, block_size=2)],
    "space_to_depth": [_with(_IMAGE, block_size=2)],
    "diag": [_with(_FIXED), _with(tf.TensorSpec((3, 3), "float32"))],
    "diagflat": [_with(_FIXED)],
    "digitize": [_with(_f(4), bins=[0.0, 1.0])],
    "dot": [_with(_f(4), tf.TensorSpec((4, 3), "float32"))],
    "dot_product_attention": [_with(_f(6, 2, 4), _f(6, 2, 4), _f(6, 2, 4))],
    "dstack": [lambda f: (lambda *x: f(x), [_f(4), _f(4)])],
    "hstack": [lambda f: (lambda *x: f(x), [_f(4), _f(4)])],
    "vstack": [lambda f: (lambda *x: f(x), [_f(4), _f(4)])],
    "stack": [lambda f: (lambda *x: f(x), [_f(4), _f(4)])],
    "einsum": [
        lambda f: (lambda x, y: f("ab,ac->bc", x, y), [_f(4), _f(3)]),
        lambda f: (lambda x: f("abb->ab", x), [_SQUARE]),
    ],
    "empty": [lambda f: (lambda x: f((ops.shape(x)[0], 2)), [_f(4)])],
    "ones": [lambda f: (lambda x: f((ops.shape(x)[0], 2)), [_f(4)])],
    "zeros": [lambda f: (lambda x: f((ops.shape(x)[0], 2)), [_f(4)])],
    "full": [lambda f: (lambda x: f((ops.shape(x)[0], 2), 3.0), [_f(4)])],
    "full_like": [_with(_f(4), fill_value=3.0)],
    "expand_dims": [_with(_f(4), axis=1)],
    "extract_sequences": [_with(_f(16), sequence_length=4, sequence_stride=2)],
    "eye": [lambda f: (lambda x: f(ops.shape(x)[0]), [_f(4)])],
    "identity": [lambda f: (lambda x: f(ops.shape(x)[0]), [_f(4)])],
    "tri": [lambda f: (lambda x: f(ops.shape(x)[0]), [_f(4)])],
    "flip": [_with(_f(4)), _with(_f(4), axis=0)],
    "fold": [_with(_f(8, 9), output_size=(6, 6), kernel_size=2, stride=2)],
    "unfold": [_with(_f(6, 6, 2), kernel_size=2)],
    "fori_loop": [
        lambda f: (lambda x: f(0, ops.shape(x)[0], lambda i, s: s * 2.0, x), [_f(4)])
    ],
    "histogram": [_with(_FIXED)],
    "layer_normalization": [_with(_f(4))],
    "geomspace": [lambda f: (lambda x: f(1.0, x, num=4), [_f()])],
    "linspace": [lambda f: (lambda x: f(1.0, x, num=4), [_f()])],
    "logspace": [lambda f: (lambda x: f(1.0, x, num=4), [_f()])],
    "get_item": [
        lambda f: (lambda x: f(x, (slice(None), 1)), [_f(4)]),
        lambda f: (lambda x: f(x, x[:, 0] > 0), [_f(4)]),
    ],
    "in_top_k": [_with(_i(), _f(4), k=2)],
    "istft": [
        lambda f: (
            lambda x, y: f((x, y), 16, 8, 16),
            [_f(5, 9), _f(5, 9)],
        )
    ],
    "stft": [_with(_f(64), sequence_length=16, sequence_stride=8, fft_length=16)],
    "rfft": [_with(_f(8))],
    "ldexp": [_with(_f(4), _i(4))],
    "lu_factor": [_with(tf.TensorSpec((3, 3), "float32"))],
    "map": [lambda f: (lambda x: f(lambda row: row * 2.0, x), [_f(4)])],
    "vectorized_map": [
        lambda f: (lambda x: f(lambda row: ops.sum(row * 2.0), x), [_f(4)])
    ],
    "matmul": [_with(_f(4), tf.TensorSpec((4, 3), "float32")), _with(_SQUARE, _SQUARE)],
    "meshgrid": [_with(_f(), _f())],
    "moments": [_with(_f(4), axes=0)],
    "moveaxis": [_with(_f(4, 5), source=1, destination=2)],
    "multi_hot": [_with(_i(4), num_classes=5)],
    "one_hot": [_with(_i(4), num_classes=5), _with(_i(4), num_classes=5, sparse=True)],
    "nextafter": [_with(_f(4), _f(4))],
    "norm": [_with(_f(4), axis=-1, ord=order) for order in (1, 2, 3)]
    + [_with(_SQUARE, axis=(1, 2), ord=order) for order in ("fro", "nuc", 2)],
    "pad": [
        _with(_f(4), pad_width=((0, 0), (1, 2)), mode=mode)
        for mode in ("constant", "reflect", "symmetric")
    ],
    "polar": [_with(_f(4), _f(4))],
    "psnr": [_with(_f(4), _f(4), max_val=1.0)],
    "rearrange": [lambda f: (lambda x: f(x, "a b c -> a (c b)"), [_SQUARE])],
    "repeat": [_with(_f(4), repeats=2, axis=1), _with(_f(4), repeats=2)],
    "reshape": [_with(_f(4), newshape=(-1, 2))],
    "roll": [_with(_f(4), shift=1), _with(_f(4), shift=1, axis=1)],
    "round": [_with(_f(4)), _with(_f(4), decimals=2)],
    "saturate_cast": [_with(_f(4), dtype="uint8")],
    "scan": [
        lambda f: (
            lambda x: f(lambda c, v: (c + v, c), tf.zeros(4), x),
            [tf.TensorSpec((6, 4), "float32")],
        )
    ],
    "scatter": [_with(_i(1), _f(4), shape=(5, 4))],
    "scatter_update": [
        _with(tf.TensorSpec((5, 4), "float32"), _i(1), _f(4), reduction=reduction)
        for reduction in (None, "add", "max", "min", "mul")
    ],
    "searchsorted": [_with(_FIXED, _f())],
    "select": [
        lambda f: (lambda x, y: f([x > 0, y > 0], [x, y]), [_f(4), _f(4)]),
    ],
    "slice": [_with(_f(4), start_indices=(0, 1), shape=(2, 2))],
    "slice_update": [
        lambda f: (
            lambda x: f(x, (0, 1), tf.ones((2, 2))),
            [tf.TensorSpec((5, 4), "float32")],
        )
    ],
    "softmax": [_with(_f(4)), _with(_SQUARE, axis=(1, 2))],
    "solve": [_with(_SQUARE, _f(3, 2))],
    "solve_triangular": [_with(_SQUARE, _f(3, 2))],
    "split": [_with(_f(4), indices_or_sections=2, axis=1)],
    "squeeze": [_with(_f(1))],
    "stop_gradient": [_with(_f(4))],
    "swapaxes": [_with(_f(4), axis1=0, axis2=1)],
    "switch": [
        lambda f: (
            lambda i, x: f(i[0], [lambda v: v + 1, lambda v: v * 2], x),
            [_i(), _f(4)],
        )
    ],
    "take": [
        lambda f: (lambda i: f(tf.ones((5, 4)), i, axis=0), [_i(3)]),
        _with(_f(4), _i(), axis=1),
        _with(_f(4), _i()),
    ],
    "take_along_axis": [_with(_f(4), _i(4), axis=1), _with(_f(4), _i(4), axis=0)],
    "tensordot": [_with(_f(4), tf.TensorSpec((4, 3), "float32"), axes=1)],
    "threshold": [_with(_f(4), threshold=0.5, default_value=1.0)],
    "tile": [_with(_f(4), repeats=(1, 2))],
    "top_k": [_with(_f(4), k=2)],
    "trapezoid": [_with(_f(4)), _with(_f(4), _f(4))],
    "unique": [
        lambda f: (lambda x: f(x, return_inverse=True, return_counts=True), [_i()]),
        _with(_i(), size=5),
        _with(_i(3), axis=0),
    ],
    "unravel_index": [_with(_i(), shape=(3, 4))],
    "unstack": [_with(_f(4), axis=1)],
    "vander": [_with(_f())],
    "view": [_with(_f(4), dtype="int32")],
    "view_as_complex": [_with(_f(4, 2))],
    "view_as_real": [_with(_c(4))],
    "where": [
        lambda f: (lambda x: f(x > 0, x, 0.0), [_f(4)]),
        lambda f: (lambda x: f(x > 0), [_f(4)]),
    ],
    "while_loop": [
        lambda f: (
            lambda x: f(lambda i, s: i < 3, lambda i, s: (i + 1, s * 2.0), (0, x)),
            [_f(4)],
        )
    ],
}
_LAST_AXIS = ("glu", "sparse_categorical_crossentropy")
"""Functions that have an axis, but no other than the last."""
_PLAIN = ("x", "x1", "x2", "y", "a", "target", "output")


def cases(name: str) -> list[Case]:
    """The cases of a function; empty if it needs arguments that are not known."""
    function = getattr(ops, name)
    if name in SPECIAL:
        return [make(function) for make in SPECIAL[name]]
    parameters = inspect.signature(function).parameters
    needed = [p.name for p in parameters.values() if p.default is p.empty]
    if not needed or any(each not in _PLAIN for each in needed):
        return []
    spec = _i(4) if name in _INTEGERS else _b(4) if name in _BOOLEANS else _f(4)
    specs = [spec] * len(needed)
    if name == "sparse_categorical_crossentropy":
        specs = [_i(), _f(4)]
    found: list[Case] = [(function, specs)]
    if "axis" in parameters and name not in _LAST_AXIS:
        found += [_with(*specs, axis=axis)(function) for axis in (0, -1)]
    return found
