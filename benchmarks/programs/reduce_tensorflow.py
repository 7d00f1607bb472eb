"""Runs ``reduce_tfcluster.py`` over TensorFlow's ops, with settings other than ours.

``argv[2]`` is a JSON object of these settings. Started with ``transport: tensorflow``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tfcluster.runtime.collective.transports.tensorflow import lazy_server, ops

settings: dict[str, int] = json.loads(sys.argv[2])
# Set module constants: only this benchmark needs other values.
found: Any = lazy_server
found._CHUNK_BYTES = settings.get("recv_buf_max_chunk", lazy_server._CHUNK_BYTES)
found._CHANNELS = settings.get("num_channels_per_target", lazy_server._CHANNELS)
found = ops
found.SUBDIVISIONS = settings.get("max_subdivs_per_device", ops.SUBDIVISIONS)

import benchmarks.programs.reduce_tfcluster  # noqa: E402, F401  # runs the benchmark
