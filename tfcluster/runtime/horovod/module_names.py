"""Makes ``import horovod`` find tfcluster's API in a task without Horovod installed.

So scripts written for Horovod run unchanged. Importing one of these modules declares
that the program distributes its training itself. Does not import TensorFlow.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from tfcluster.runtime.scripts import program_kind

VERSION = "0.28.1"
"""The version of Horovod that these modules imitate; some scripts compare it."""

_ERRORS = "tfcluster.runtime.errors"
_KERAS = "tfcluster.runtime.horovod.keras_module"
_MODULES = {
    "horovod": "",
    "horovod.common": "",
    "horovod.common.exceptions": _ERRORS,
    "horovod.common.process_sets": "tfcluster.runtime.process_sets",
    "horovod.common.util": "tfcluster.runtime.horovod.capabilities",
    "horovod.keras": _KERAS,
    "horovod.keras.callbacks": "tfcluster.runtime.callbacks",
    "horovod.keras.elastic": "tfcluster.runtime.elastic",
    "horovod.tensorflow": "tfcluster.runtime",
    "horovod.tensorflow.compression": "tfcluster.runtime.exchange.wire_format",
    "horovod.tensorflow.elastic": "tfcluster.runtime.elastic",
    "horovod.tensorflow.functions": "tfcluster.runtime",
    "horovod.tensorflow.keras": _KERAS,
    "horovod.tensorflow.keras.callbacks": "tfcluster.runtime.callbacks",
    "horovod.tensorflow.keras.elastic": "tfcluster.runtime.elastic",
    "horovod.tensorflow.mpi_ops": "tfcluster.runtime",
    "horovod.tensorflow.sync_batch_norm": (
        "tfcluster.runtime.horovod.sync_batch_normalization"
    ),
}
"""The module that has the names of each Horovod module."""

_CLAIMING = ("horovod.keras", "horovod.tensorflow")
_OTHER_NAMES = {
    "HorovodInternalError": (_ERRORS, "CollectiveError"),
    "HorovodVersionMismatchError": (_ERRORS, "CollectiveMismatchError"),
    "HostsUpdatedInterrupt": (_ERRORS, "HostsUpdatedInterrupt"),
}


def install(report: Callable[[str], None]) -> None:
    """Make ``horovod`` importable if it is not installed; ``report`` is called once."""
    sys.meta_path.append(_Finder(report))


class _Finder(MetaPathFinder):
    """Must be the last finder, so that an installed Horovod is preferred."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        package = any(name.startswith(f"{fullname}.") for name in _MODULES)
        return ModuleSpec(
            fullname, _HorovodLoader(self._report), origin=__file__, is_package=package
        )


class _HorovodLoader(Loader):
    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__file__ = __file__
        if name == "horovod":
            self._report(
                "horovod is not installed: `import horovod` imports tfcluster.runtime"
            )
        if name in _CLAIMING:
            program_kind.claim_distribution()
        vars(module)["__version__"] = VERSION
        if source := _MODULES[name]:
            source_module = importlib.import_module(source)
            vars(module)["__all__"] = list(getattr(source_module, "__all__", ()))
        vars(module)["__getattr__"] = _attributes_of(module)


def _attributes_of(module: ModuleType) -> Callable[[str], object]:
    source = _MODULES[module.__name__]

    def attribute(name: str) -> object:
        full = f"{module.__name__}.{name}"
        if full in _MODULES:
            return importlib.import_module(full)
        if name in _OTHER_NAMES:
            own_module, own_name = _OTHER_NAMES[name]
            return getattr(importlib.import_module(own_module), own_name)
        if source and not name.startswith("__"):
            return getattr(importlib.import_module(source), name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    return attribute
