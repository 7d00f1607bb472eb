"""What is known about Horovod's tests: files that are not run, tests that must fail."""

from __future__ import annotations

NOT_RUN = {
    "mxnet": "MXNet",
    "torch": "PyTorch",
    "test_timeline": "PyTorch",
    "test_keras.py": "TensorFlow 1 only",
    "test_compute_worker": "needs horovod.tensorflow.data, which tfcluster lacks",
}
"""Why files are not run, by parts of their names."""

FAILING: dict[str, str] = {}
"""Why tests fail, by FILE::TEST, or by the beginning of that."""


def why_not_run(file: str) -> str | None:
    """The reason why a file is not run, if it is not."""
    return next((why for part, why in NOT_RUN.items() if part in file), None)


def why_failing(test: str) -> str | None:
    """The reason why ``FILE::TEST`` fails, if it must."""
    return next((why for name, why in FAILING.items() if test.startswith(name)), None)
