"""Arguments for the losses and metrics of Keras, to trace them with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

WITHOUT_CASE: Mapping[str, str] = {
    "Loss": "it is abstract",
    "deserialize": "it is no loss",
    "serialize": "it is no loss",
    "get": "it is no loss",
    "categorical_generalized_cross_entropy": "its class has a case",
}
METRICS_WITHOUT_CASE: Mapping[str, str] = {
    "Metric": "it is abstract",
    "MeanMetricWrapper": "other metrics derive from it",
    "deserialize": "it is no metric",
    "serialize": "it is no metric",
    "get": "it is no metric",
}
_PAIR = [tf.TensorSpec((None, 4), "float32")] * 2
_CLASSES = [tf.TensorSpec((None,), "int32"), tf.TensorSpec((None, 4), "float32")]
_SPECS = {
    "CTC": [tf.TensorSpec((None, 3), "int32"), tf.TensorSpec((None, 6, 4), "float32")],
    "ctc": [tf.TensorSpec((None, 3), "int32"), tf.TensorSpec((None, 6, 4), "float32")],
    "Mean": [tf.TensorSpec((None, 4), "float32")],
    "Sum": [tf.TensorSpec((None, 4), "float32")],
    "IoU": [tf.TensorSpec((None, 4), "int32")] * 2,
    "MeanIoU": [tf.TensorSpec((None, 4), "int32")] * 2,
    "Circle": [tf.TensorSpec((None,), "int32"), tf.TensorSpec((None, 4), "float32")],
    "circle": [tf.TensorSpec((None,), "int32"), tf.TensorSpec((None, 4), "float32")],
}
_ARGUMENTS: Mapping[str, list[Mapping[str, Any]]] = {
    "AUC": [{}, {"multi_label": True, "num_labels": 4}, {"curve": "PR"}],
    "BinaryIoU": [{}],
    "F1Score": [{}, {"average": "macro"}, {"threshold": 0.5}],
    "FBetaScore": [{}, {"average": "weighted"}],
    "IoU": [{"num_classes": 3, "target_class_ids": [0]}],
    "MeanIoU": [{"num_classes": 3}],
    "OneHotIoU": [{"num_classes": 4, "target_class_ids": [0]}],
    "OneHotMeanIoU": [{"num_classes": 4}],
    "Precision": [{}, {"top_k": 2}, {"class_id": 1}, {"thresholds": [0.2, 0.5]}],
    "PrecisionAtRecall": [{"recall": 0.5}],
    "Recall": [{}, {"top_k": 2}],
    "RecallAtPrecision": [{"precision": 0.5}],
    "SensitivityAtSpecificity": [{"specificity": 0.5}],
    "SpecificityAtSensitivity": [{"sensitivity": 0.5}],
    "R2Score": [{}, {"class_aggregation": None}],
    "TopKCategoricalAccuracy": [{"k": 2}],
    "SparseTopKCategoricalAccuracy": [{"k": 2}],
}


def specs(name: str) -> list[tf.TensorSpec]:
    """The types of the arguments of a loss or a metric."""
    if name in _SPECS:
        return _SPECS[name]
    return _CLASSES if name.lower().startswith("sparse") else _PAIR


def metric_arguments(name: str) -> list[Mapping[str, Any]]:
    """The arguments of the metrics of this class to trace."""
    return _ARGUMENTS.get(name, [{}])
