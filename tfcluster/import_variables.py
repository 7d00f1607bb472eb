"""Which environment variables take effect only when Python starts or imports. Pure.

A process that is forked after the imports cannot get other values for them.
"""

from __future__ import annotations

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

JOB_NAMES = ("SLURM_JOB_ID", "JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Variables that identify the scheduler's job to which a process belongs."""

_SEARCH_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")


def is_read_early(name: str) -> bool:
    """Whether a task with another value cannot be forked from a warm interpreter."""
    early = name in READ_EARLY_NAMES or name.startswith(READ_EARLY)
    return early and name not in READ_LATE


def is_import_variable(name: str) -> bool:
    """Whether an interpreter that was started long ago must have the same value.

    True for more variables than ``is_read_early``: such an interpreter comes from
    another shell, in which everything may differ.
    """
    more = name in _MORE_NAMES or name.startswith(_MORE_PREFIXES)
    return is_read_early(name) or (more and name not in READ_LATE)


def concerns_imports(name: str, read: Container[str]) -> bool:
    """Whether an import may give another result after a program has set the variable.

    ``read`` has the names that the imported Python code has read. What libraries in
    other languages read is known only by the names' families.
    """
    if name in read:
        return name not in READ_LATE and name not in _READ_FOR_COMMANDS
    return is_import_variable(name) and not name.startswith(_READ_BY_THE_PROCESS)


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """One sentence on the first import variable that differs; None if none does.

    ``there`` is the environment with which the other interpreter was started. Values
    are not named, because they may be secret (``TF_VAR_password``).
    """
    names = {n for n in (*here, *there) if is_import_variable(n) or n in JOB_NAMES}
    for name in sorted(names):
        if name not in here:
            return f"it was started with {name}, which is not set now"
        if name not in there:
            return f"it was started without {name}, which is set now"
        if here[name] != there[name]:
            return f"it was started with another value of {name}"
    return None


def relative_folder(environ: Mapping[str, str]) -> str | None:
    """The search path variable whose meaning depends on the working folder, or None."""
    for name in _SEARCH_PATHS:
        value = environ.get(name, "")
        if value and not all(part.startswith("/") for part in value.split(":")):
            return name
    return None
