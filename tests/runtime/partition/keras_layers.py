"""Small instances of every layer of Keras, and the inputs to trace them with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

Input: TypeAlias = tuple[tuple[int, ...], str]
"""The shape without the rows, and the dtype."""
Case: TypeAlias = tuple[Callable[[], Any], list[Input]]


class _Makers:
    """Makes the layers of Keras, which older versions may lack."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: getattr(keras.layers, name)(*given, **named)


layers: Any = _Makers()

VECTOR: Input = ((6,), "float32")
STEPS: Input = ((8, 6), "float32")
IMAGE: Input = ((12, 12, 3), "float32")
CUBE: Input = ((6, 6, 6, 2), "float32")
FILM: Input = ((3, 8, 8, 2), "float32")
INTEGERS: Input = ((5,), "int32")
NUMBERS: Input = ((5,), "int64")
STRINGS: Input = ((5,), "string")
CELLS: Input = ((4,), "float32")

WITHOUT_CASE: Mapping[str, str] = {
    "FlaxLayer": "it needs JAX",
    "JaxLayer": "it needs JAX",
    "TorchModuleWrapper": "it needs PyTorch",
    "TFSMLayer": "it calls a saved function, which has the ops of the program it saved",
    "Input": "it makes a symbol",
    "InputLayer": "it makes a symbol",
    "InputSpec": "it is no layer",
    "Layer": "it is abstract",
    "Wrapper": "it is abstract",
    "serialize": "it is no layer",
    "deserialize": "it is no layer",
    **dict.fromkeys(
        ("add", "average", "concatenate", "dot", "maximum", "minimum", "multiply"),
        "it calls the layer of the same name",
    ),
    "subtract": "it calls the layer of the same name",
}


def _each(inputs: list[Input], *names: str, **arguments: Any) -> dict[str, list[Case]]:
    return {
        name: [(partial(getattr(layers, name), **arguments), inputs)] for name in names
    }


def _pools() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for dims, given in ((1, STEPS), (2, IMAGE), (3, CUBE)):
        for kind in ("Avg", "Max"):
            found |= _each([given], f"Global{kind}Pool{dims}D")
            found |= _each([given], f"{kind}Pool{dims}D", pool_size=2, padding="same")
        for kind in ("Average", "Max"):
            found |= _each([given], f"Global{kind}Pooling{dims}D")
            found |= _each([given], f"{kind}Pooling{dims}D", pool_size=2)
            name = f"Adaptive{kind}Pooling{dims}D"
            found |= _each([given], name, output_size=2)
    return found


def _convolutions() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for dims, given in ((1, STEPS), (2, IMAGE), (3, CUBE)):
        for name in ("Conv", "Convolution"):
            for kind in ("", "Transpose"):
                label = f"{name}{dims}D{kind}"
                make = getattr(layers, label)
                found[label] = [
                    (partial(make, 4, 3), [given]),
                    (partial(make, 4, 3, padding="same", strides=2), [given]),
                    (partial(make, 4, 2, dilation_rate=2), [given]),
                ]
            if dims < 3:
                found |= _each(
                    [given], f"Separable{name}{dims}D", filters=4, kernel_size=3
                )
        if dims < 3:
            found |= _each([given], f"DepthwiseConv{dims}D", kernel_size=3)
        steps: Input = ((3, *given[0]), "float32")
        found |= _each([steps], f"ConvLSTM{dims}D", filters=2, kernel_size=2)
    found["Conv1D"].append((lambda: layers.Conv1D(4, 3, padding="causal"), [STEPS]))
    grouped: Input = ((12, 12, 4), "float32")
    found["Conv2D"].append((lambda: layers.Conv2D(4, 3, groups=2), [grouped]))
    return found


def _recurrent() -> dict[str, list[Case]]:
    found: dict[str, list[Case]] = {}
    for name in ("LSTM", "GRU", "SimpleRNN"):
        make = getattr(layers, name)
        found[name] = [
            (partial(make, 4), [STEPS]),
            (
                partial(make, 4, return_sequences=True, go_backwards=True, dropout=0.2),
                [STEPS],
            ),
            (partial(make, 4, unroll=True), [STEPS]),
            (
                partial(_masked, make),
                [INTEGERS],
            ),
        ]
    found |= {
        "LSTMCell": [(lambda: CellLayer(layers.LSTMCell(4)), [VECTOR, CELLS, CELLS])],
        "GRUCell": [(lambda: CellLayer(layers.GRUCell(4)), [VECTOR, CELLS])],
        "SimpleRNNCell": [
            (lambda: CellLayer(layers.SimpleRNNCell(4)), [VECTOR, CELLS])
        ],
        "RNN": [(lambda: layers.RNN(layers.GRUCell(4)), [STEPS])],
        "StackedRNNCells": [
            (
                lambda: layers.RNN(
                    layers.StackedRNNCells([layers.LSTMCell(4), layers.LSTMCell(3)])
                ),
                [STEPS],
            )
        ],
        "Bidirectional": [
            (lambda: layers.Bidirectional(layers.LSTM(4)), [STEPS]),
        ],
        "TimeDistributed": [
            (lambda: layers.TimeDistributed(layers.Dense(4)), [STEPS]),
        ],
    }
    return found


def _masked(make: Callable[[int], Any]) -> Any:
    return keras.Sequential([layers.Embedding(9, 6, mask_zero=True), make(4)])


class SeparateInputs(keras.layers.Layer):  # type: ignore[misc]
    """A layer that gets its inputs as arguments, not in a list."""


class CellLayer(SeparateInputs):
    """A cell called with its states."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell
        cell.build((None, *VECTOR[0]))

    def call(self, x: Any, *states: Any) -> Any:
        return self.cell(x, list(states))


def _images() -> dict[str, list[Case]]:
    plain = (
        *("AugMix", "AutoContrast", "ContrastLimitedAdaptiveHistogramEqualization"),
        *("Equalization", "RandAugment", "RandomElasticTransform", "RandomErasing"),
        *("RandomGaussianBlur", "RandomPerspective"),
        *("RandomFlip", "RandomInvert", "RandomGrayscale", "Solarization"),
    )
    factors = (
        *("RandomBrightness", "RandomColorDegeneration", "RandomContrast"),
        *("RandomHue", "RandomPosterization", "RandomRotation", "RandomSaturation"),
        *("RandomSharpness", "RandomShear", "RandomZoom"),
    )
    found = _each([IMAGE], *plain)
    for name in factors:
        make = getattr(layers, name)
        found[name] = [(partial(_with_factor, make), [IMAGE])]
    found |= _each([IMAGE], "CenterCrop", "RandomCrop", height=8, width=8)
    found["CenterCrop"].append((lambda: layers.CenterCrop(16, 16), [IMAGE]))
    found |= _each([IMAGE], "RandomTranslation", height_factor=0.2, width_factor=0.2)
    found["Resizing"] = [
        (
            partial(layers.Resizing, 7, 9, interpolation=method),
            [IMAGE],
        )
        for method in ("bilinear", "nearest", "bicubic", "lanczos3", "area")
    ]
    found["RandomColorJitter"] = [
        (lambda: layers.RandomColorJitter((0, 255), 0.2, 0.2, 0.2, 0.2), [IMAGE])
    ]
    found["Pipeline"] = [
        (lambda: layers.Pipeline([layers.RandomFlip(), layers.Rescaling(0.5)]), [IMAGE])
    ]
    found["CutMix"] = [(lambda: LabelledLayer(layers.CutMix()), [IMAGE, VECTOR])]
    found["MixUp"] = [(lambda: LabelledLayer(layers.MixUp()), [IMAGE, VECTOR])]
    found["MaxNumBoundingBoxes"] = [(BoxesLayer, [IMAGE, ((3, 4), "float32")])]
    return found


def _with_factor(make: Any) -> Any:
    try:
        return make(0.2)
    except ValueError:
        return make(2)


class LabelledLayer(SeparateInputs):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, images: Any, labels: Any, training: bool = False) -> Any:
        return self.layer({"images": images, "labels": labels}, training=training)


class BoxesLayer(SeparateInputs):
    def call(self, images: Any, boxes: Any, training: bool = False) -> Any:
        layer = layers.MaxNumBoundingBoxes(2, bounding_box_format="xyxy")
        labels = boxes[..., 0]
        given = {"boxes": boxes, "labels": labels}
        return layer({"images": images, "bounding_boxes": given}, training=training)


def _normalized() -> Any:
    found = layers.Normalization()
    found.adapt(np.arange(12, dtype="float32").reshape(2, 6))
    return found


def _vectorized(arguments: Mapping[str, Any]) -> Any:
    return _adapted(layers.TextVectorization(**arguments), _WORDS)


def _adapted(layer: Any, data: Any) -> Any:
    layer.adapt(data)
    return layer


class CrossingLayer(SeparateInputs):
    def call(self, first: Any, second: Any) -> Any:
        return layers.HashedCrossing(7, output_mode="one_hot")((first, second))


_WORDS = np.array(["a b", "b c", "c a b"])

_ALL: Mapping[str, list[Case]] = {
    **_pools(),
    **_convolutions(),
    **_recurrent(),
    **_images(),
    **_each([VECTOR], "ELU", "LeakyReLU", "PReLU", "ReLU", "Softmax", "Identity"),
    **_each([STEPS], "Flatten", "Masking"),
    **_each([STEPS], "SpatialDropout1D", rate=0.3),
    **_each([IMAGE], "SpatialDropout2D", rate=0.3),
    **_each([CUBE], "SpatialDropout3D", rate=0.3),
    **_each([VECTOR], "AlphaDropout", "Dropout", "GaussianDropout", rate=0.3),
    **_each([VECTOR], "GaussianNoise", stddev=0.3),
    **_each([VECTOR], "ActivityRegularization", l1=0.1, l2=0.1),
    **_each(
        [VECTOR, VECTOR],
        *("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply"),
        "Subtract",
    ),
    "Dot": [
        (lambda: layers.Dot(1), [VECTOR, VECTOR]),
        (lambda: layers.Dot(2, normalize=True), [STEPS, STEPS]),
    ],
    "Activation": [
        (partial(layers.Activation, name), [VECTOR])
        for name in (
            *("celu", "elu", "exponential", "gelu", "glu", "hard_shrink"),
            *("hard_sigmoid", "hard_silu", "hard_tanh", "leaky_relu", "linear"),
            *("log_sigmoid", "log_softmax", "mish", "relu", "relu6", "selu"),
            *("sigmoid", "silu", "soft_shrink", "softmax", "softplus", "softsign"),
            *("sparse_plus", "sparse_sigmoid", "sparsemax", "squareplus", "swish"),
            *("tanh", "tanh_shrink", "threshold"),
        )
        if name != "threshold"
    ],
    "Lambda": [(lambda: layers.Lambda(lambda x: x * 2), [VECTOR])],
    "Permute": [(lambda: layers.Permute((2, 1)), [STEPS])],
    "RepeatVector": [(lambda: layers.RepeatVector(3), [VECTOR])],
    "Reshape": [(lambda: layers.Reshape((-1, 2)), [VECTOR])],
    "Rescaling": [(lambda: layers.Rescaling(2.0, 1.0), [IMAGE])],
    "Dense": [
        (lambda: layers.Dense(3), [VECTOR]),
        (lambda: layers.Dense(3), [STEPS]),
        (lambda: _low_rank(layers.Dense(3)), [VECTOR]),
        (lambda: _quantized(layers.Dense(3), VECTOR, "int8"), [VECTOR]),
        (lambda: _quantized(layers.Dense(4), VECTOR, "int4"), [VECTOR]),
        (lambda: _quantized(layers.Dense(3), VECTOR, "float8"), [VECTOR]),
    ],
    "EinsumDense": [
        (
            lambda: layers.EinsumDense("abc,cd->abd", output_shape=(None, 4)),
            [STEPS],
        ),
        (
            lambda: _quantized(
                layers.EinsumDense("abc,cd->abd", output_shape=(None, 4)), STEPS, "int8"
            ),
            [STEPS],
        ),
    ],
    "Embedding": [
        (lambda: layers.Embedding(9, 4), [INTEGERS]),
        (lambda: layers.Embedding(9, 4, embeddings_constraint="unit_norm"), [INTEGERS]),
        (lambda: _quantized(layers.Embedding(9, 4), INTEGERS, "int8"), [INTEGERS]),
    ],
    "ReversibleEmbedding": [(lambda: layers.ReversibleEmbedding(9, 4), [INTEGERS])],
    "BatchNormalization": [
        (layers.BatchNormalization, [VECTOR]),
        (layers.BatchNormalization, [IMAGE]),
        (lambda: layers.BatchNormalization(axis=1), [IMAGE]),
        (
            lambda: keras.Sequential([layers.Masking(), layers.BatchNormalization()]),
            [STEPS],
        ),
    ],
    "LayerNormalization": [
        (layers.LayerNormalization, [STEPS]),
        (lambda: layers.LayerNormalization(axis=(1, 2)), [STEPS]),
    ],
    "RMSNormalization": [(layers.RMSNormalization, [STEPS])],
    "GroupNormalization": [(lambda: layers.GroupNormalization(3), [IMAGE])],
    "UnitNormalization": [(layers.UnitNormalization, [STEPS])],
    "Normalization": [(_normalized, [VECTOR])],
    "SpectralNormalization": [
        (lambda: layers.SpectralNormalization(layers.Dense(4)), [VECTOR])
    ],
    "Attention": [
        (layers.Attention, [STEPS, STEPS]),
        (lambda: layers.Attention(use_scale=True, dropout=0.2), [STEPS, STEPS]),
        (lambda: layers.Attention(score_mode="concat"), [STEPS, STEPS]),
    ],
    "AdditiveAttention": [(layers.AdditiveAttention, [STEPS, STEPS])],
    "MultiHeadAttention": [
        (lambda: layers.MultiHeadAttention(2, 4, dropout=0.1), [STEPS, STEPS]),
        (lambda: CausalLayer(layers.MultiHeadAttention(2, 4)), [STEPS]),
    ],
    "GroupQueryAttention": [
        (lambda: layers.GroupQueryAttention(4, 4, 2), [STEPS, STEPS])
    ],
    **_each([STEPS], "Cropping1D", "UpSampling1D", "ZeroPadding1D"),
    **_each([IMAGE], "Cropping2D", "UpSampling2D", "ZeroPadding2D"),
    **_each([CUBE], "Cropping3D", "UpSampling3D", "ZeroPadding3D"),
    "CategoryEncoding": [
        (
            partial(layers.CategoryEncoding, 9, output_mode=mode),
            [given],
        )
        for mode, given in (
            ("one_hot", ((1,), "int32")),
            ("multi_hot", INTEGERS),
            ("count", INTEGERS),
        )
    ],
    "Discretization": [
        (lambda: layers.Discretization([0.0, 1.0, 2.0]), [VECTOR]),
        (
            lambda: layers.Discretization([0.0, 1.0], output_mode="multi_hot"),
            [VECTOR],
        ),
    ],
    "Hashing": [
        (lambda: layers.Hashing(7), [NUMBERS]),
        (lambda: layers.Hashing(7), [STRINGS]),
        (lambda: layers.Hashing(7, salt=[1, 2], mask_value=""), [STRINGS]),
        (lambda: layers.Hashing(7, output_mode="multi_hot"), [STRINGS]),
    ],
    "HashedCrossing": [(CrossingLayer, [((1,), "string"), ((1,), "string")])],
    "IntegerLookup": [
        (
            partial(layers.IntegerLookup, vocabulary=[1, 4, 9], output_mode=mode),
            [NUMBERS],
        )
        for mode in ("int", "multi_hot", "count")
    ]
    + [
        (
            lambda: layers.IntegerLookup(vocabulary=[1, 4, 9], num_oov_indices=3),
            [NUMBERS],
        )
    ],
    "StringLookup": [
        (
            partial(layers.StringLookup, vocabulary=["a", "b"], output_mode=mode),
            [STRINGS],
        )
        for mode in ("int", "multi_hot", "count")
    ]
    + [
        (
            lambda: layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=3),
            [STRINGS],
        ),
        (lambda: layers.StringLookup(vocabulary=["a"], invert=True), [NUMBERS]),
        (
            lambda: _adapted(layers.StringLookup(output_mode="tf_idf"), _WORDS),
            [STRINGS],
        ),
    ],
    "TextVectorization": [
        (
            partial(_vectorized, arguments),
            [((), "string")],
        )
        for arguments in (
            {"output_sequence_length": 4},
            {"output_mode": "tf_idf", "ngrams": 2},
            {"output_mode": "multi_hot", "split": "character"},
        )
    ],
    "MelSpectrogram": [
        (lambda: layers.MelSpectrogram(fft_length=64), [((256,), "float32")])
    ],
    "STFTSpectrogram": [
        (
            lambda: layers.STFTSpectrogram(frame_length=32, frame_step=16),
            [((128, 1), "float32")],
        )
    ],
}
CASES = {name: cases for name, cases in _ALL.items() if hasattr(keras.layers, name)}


class CausalLayer(SeparateInputs):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def call(self, x: Any, training: bool = False) -> Any:
        return self.layer(x, x, use_causal_mask=True, training=training)


def _low_rank(layer: Any) -> Any:
    layer.build((None, 6))
    layer.enable_lora(2)
    return layer


def _quantized(layer: Any, given: Input, mode: str) -> Any:
    layer.build((None, *given[0]))
    layer.quantize(mode)
    return layer


def specs(inputs: list[Input], rows: int | None = None) -> list[tf.TensorSpec]:
    """The inputs' types, with a batch's rows, or rows of an unknown number."""
    return [tf.TensorSpec((rows, *shape), dtype) for shape, dtype in inputs]


def call(layer: Any, inputs: list[Any], training: bool) -> Any:
    """Call a layer, in training or not if it can tell."""
    attentions = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention
    separate = SeparateInputs, *attentions
    given = inputs if len(inputs) == 1 or isinstance(layer, separate) else [inputs]
    if tells_training(layer):
        return layer(*given, training=training)
    return layer(*given)


def tells_training(layer: Any) -> bool:
    """Whether the layer computes something else in training."""
    return "training" in inspect.signature(layer.call).parameters
