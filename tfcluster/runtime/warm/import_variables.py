"""Which environment variables take effect only when Python starts or imports. Pure.

A process that is forked after the imports cannot get other values for them. If the
program's source sets some, the task gets a fresh interpreter before the program has
done anything. Variables that it sets in other ways are noticed when they are set.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

READ_EARLY = (
    "PYTHON",
    "LD_",
    "GLIBC_",
    "MALLOC_",
    "LC_",
    "LANG",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "KERAS_",
    "TF_",
)
"""Prefixes of the variables that are read only at the start."""

READ_EARLY_NAMES = frozenset({"TZ", "TMPDIR", "HOME"})

READ_LATE = frozenset(
    {
        "TF_CONFIG",
        "TF_GRPC_REUSE_PORT",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "TF_NUM_INTRAOP_THREADS",
        "TF_NUM_INTEROP_THREADS",
        "CUDA_VISIBLE_DEVICES",
    }
)
"""Variables of these families that TensorFlow reads when it is first used."""

_MORE_PREFIXES = (
    "ABSL_",
    "ACC_",
    "BLIS_",
    "CONDA_",
    "CUDA_",
    "CUDNN_",
    "DNNL_",
    "FREETYPE_",
    "GCS_",
    "GFORTRAN_",
    "GLOG_",
    "GOTO_",
    "GRPC_",
    "HDF5_",
    "HIP_",
    "JAX_",
    "LLVM_",
    "MIOPEN_",
    "MKLDNN_",
    "NCCL_",
    "NPY_",
    "NUMEXPR_",
    "NUMPY_",
    "NVIDIA_",
    "ONEDNN_",
    "OPENSSL_",
    "PROTOCOL_BUFFERS_",
    "ROCM_",
    "TCMALLOC_",
    "TENSORFLOW_",
    "TORCH_",
    "TPU_",
    "TSL_",
    "XLA_",
)
_MORE_NAMES = frozenset(
    {"DISABLE_HOST_SEND_RECV_REGISTRATION", "TEMP", "TMP", "VIRTUAL_ENV"}
)

_READ_BY_THE_PROCESS = ("GLIBC_", "LD_", "MALLOC_", "PYTHON")
"""Prefixes of variables that take effect only when a process starts."""

_READ_FOR_COMMANDS = frozenset({"PATH"})
"""Variables that imports read only to find a command of the system."""


def is_read_early(name: str) -> bool:
    """Whether a task with another value cannot be forked from a warm interpreter."""
    early = name in READ_EARLY_NAMES or name.startswith(READ_EARLY)
    return early and name not in READ_LATE


def concerns_imports(name: str, read: Container[str]) -> bool:
    """Whether an import may give another result after a program has set the variable.

    ``read`` has the names that the imported Python code has read. What libraries in
    other languages read is known only by the names' families.
    """
    if name in read:
        return name not in READ_LATE and name not in _READ_FOR_COMMANDS
    if name.startswith(_READ_BY_THE_PROCESS) or name in READ_LATE:
        return False
    more = name in _MORE_NAMES or name.startswith(_MORE_PREFIXES)
    return more or is_read_early(name)


_IMPORT = re.compile(r"^(?:import|from) (?:tensorflow|keras|tf_keras)\b", re.MULTILINE)
_SETTING = re.compile(
    r"^[^#\n]*(?:environ(?P<always>\[)|environ\.setdefault\(|putenv\()"
    r"""\s*["'](?P<name>\w+)["']\s*(?:\]\s*=(?!=)|,)\s*(?:["'](?P<value>.*?)["'])?""",
    re.MULTILINE,
)


def variables_set(source: str, environ: Mapping[str, str]) -> dict[str, str | None]:
    """The variables that ``source`` may set before its first import of TensorFlow.

    A value is None if it is not a literal. Variables that ``environ`` has count only if
    they are certainly set.
    """
    end = _IMPORT.search(source)
    head = source[: end.start()] if end else source
    return {
        setting["name"]: setting["value"]
        for setting in _SETTING.finditer(head)
        if setting["always"] or setting["name"] not in environ
    }
