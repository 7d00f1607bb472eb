"""Which environment variables take effect only when Python starts or imports. Pure.

A process that is forked after the imports cannot get other values for them. If the
program's source sets some, the task gets a fresh interpreter before the program has
done anything. Variables that it sets in other ways are noticed when they are set.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import pairwise

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


_LIBRARIES = ("tensorflow", "keras", "tf_keras")
_NAME = re.compile(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*")
"""Names like those of variables. Where such a text is among others, or a key, it may be
the name of one that the program is going to set."""
_READING = ("get", "getenv", "pop")
"""Functions that only read a variable, or forget it."""

Settings = dict[str, str | None]
"""Names of variables, and their values; None if a value is not a literal."""


def variables_set(
    source: str,
    environ: Mapping[str, str],
    module_source: Callable[[str], str | None] = lambda name: None,
) -> Settings:
    """The variables that ``source`` may set before its first import of TensorFlow.

    Variables that ``environ`` has count only if they are certainly set.
    ``module_source`` returns the source of a module of the program, by its full name;
    None for all others.
    """
    head = _Head(environ, module_source)
    head.read(source)
    return head.found


class _Head:
    """What a program does before its first import of TensorFlow."""

    def __init__(
        self,
        environ: Mapping[str, str],
        module_source: Callable[[str], str | None],
    ) -> None:
        self.found: Settings = {}
        self._environ = environ
        self._module_source = module_source
        self._modules: set[str] = set()

    def read(self, source: str) -> bool:
        """Read a module; returns whether it imports TensorFlow.

        A source that cannot be parsed says nothing.
        """
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        for statement in statements:
            imports = [*_imported(statement)]
            if any(name.partition(".")[0] in _LIBRARIES for name in imports):
                return True
            if any(self._read_module(name) for name in imports):
                return True
            for node in ast.walk(statement):
                self._read_node(node)
                if node is not statement:
                    for name in _imported(node):
                        self._read_module(name)
        return False

    def _read_module(self, name: str) -> bool:
        if name in self._modules:
            return False
        self._modules.add(name)
        source = self._module_source(name)
        return source is not None and self.read(source)

    def _read_node(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    self._set(target.slice, node.value)
        elif isinstance(node, ast.Call):
            self._read_call(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                self._may_set(key, value)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            for element in node.elts:
                self._may_set(element, None)

    def _read_call(self, call: ast.Call) -> None:
        """``setdefault``, ``putenv``, and functions that get names of variables."""
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        of_environ = _is_environ(getattr(function, "value", None))
        if name == "putenv" and len(call.args) > 1:
            self._set(call.args[0], call.args[1])
        elif name not in _READING:
            for first, value in pairwise((*call.args, None)):
                is_name = of_environ and name == "setdefault" and first is call.args[0]
                self._may_set(first, value, is_name=is_name)
            for keyword in call.keywords:
                is_name = of_environ and name == "update"
                if keyword.arg is not None:
                    key = ast.Constant(keyword.arg)
                    self._may_set(key, keyword.value, is_name=is_name)

    def _set(self, name: ast.expr, value: ast.expr) -> None:
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            self.found[name.value] = _text(value)

    def _may_set(
        self, name: ast.expr | None, value: ast.expr | None, *, is_name: bool = False
    ) -> None:
        text = _text(name)
        if text is None or text in self.found or text in self._environ:
            return
        if is_name or _NAME.fullmatch(text):
            self.found[text] = _text(value)


def _imported(node: ast.AST) -> Iterator[str]:
    """The full names of the modules that a statement may import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_environ(node: ast.expr | None) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None
