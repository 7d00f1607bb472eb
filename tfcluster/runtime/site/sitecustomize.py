"""The ``sitecustomize`` of every Python that the command of a training task starts.

Its folder comes first on PYTHONPATH. It runs the site's own ``sitecustomize``, and
loads the training runtime when TensorFlow or Keras is imported: see
``docs/protocols.md`` ("Python below the command"). Until then it imports nothing that
Python has not already imported, and works with any Python 3.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False  # Not from typing, which takes a long time to import.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
_LIBRARIES = ("tensorflow", "keras", "horovod")
"""Libraries that train, or that exchange gradients."""
_OLDEST = (3, 10)
_OURS = ("tfcluster.runtime.task.bootstrap", "tfcluster.runtime.warm.preloader")
_DISTRIBUTION_NAMES = ("DistributedOptimizer", "DistributedGradientTape", "horovod")
"""A program that contains one of these words shards its data by itself. Each of
``analysis.NAMES`` contains one of them; parsing the program would take too long."""


def _is_below_a_training_task() -> bool:
    """Whether this Python is part of a training task, but not the task's own.

    A program whose steps are recorded, without a strategy, counts as a training task.
    The task's own interpreter has loaded the runtime already.
    """
    return (
        (
            os.environ.get("TFCLUSTER_STRATEGY", "none") != "none"
            or "TFCLUSTER_RECORDING" in os.environ
        )
        and "TFCLUSTER_RANK" in os.environ
        and not any(name in _started_as() for name in _OURS)
    )


def _started_as() -> "Sequence[str]":
    return getattr(sys, "orig_argv", ())


def _is_helper() -> bool:
    """Whether multiprocessing has started this process, perhaps as one of many."""
    return any("multiprocessing" in word for word in _started_as()[:4])


class _Hook:
    """A finder that finds only our package, and reacts to the import of libraries."""

    def __init__(self) -> None:
        self._random_state: object = None
        self._only_finds_us = False

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        if name == "tfcluster" and sys.version_info >= _OLDEST:
            return _package()
        if self._only_finds_us:
            return None
        if name in _LIBRARIES:
            self._only_finds_us = True
            self._bring_runtime()
            sys.meta_path.remove(self)
            return _spec_of(name, path, target)
        if sys.version_info < _OLDEST:
            return None
        if name in ("random", "numpy"):
            return self._watched(name, path, target)
        return None

    def _bring_runtime(self) -> None:
        """Load the runtime, at the beginning of the import of a library."""
        if sys.version_info < _OLDEST:
            text = "tfcluster: warning: %s is Python %d.%d, but the training runtime "
            text += "needs %d.%d: training in this process is not distributed\n"
            values = (sys.executable, *sys.version_info[:2], *_OLDEST)
            sys.stderr.write(text % values)
            return
        # Before our own imports, which include "random".
        random_module, state = sys.modules.get("random"), self._random_state
        has_numpy = "numpy" in sys.modules
        from tfcluster.runtime.task import child_interpreter

        distributes_itself = _distributes_itself()
        if random_module is None:
            # The program has imported neither "random" nor, perhaps, numpy: the library
            # will, and this finder no longer sees it.
            untouched = not distributes_itself
        else:
            untouched = state == random_module.getstate()
        child_interpreter.begin(
            seed_random=untouched,
            seed_numpy=not has_numpy,
            distributes_itself=distributes_itself,
        )

    def _watched(
        self,
        name: str,
        path: "Sequence[str] | None",
        target: "ModuleType | None",
    ) -> "ModuleSpec | None":
        """The module's spec; its generator is seeded after the module is executed."""
        sys.meta_path.remove(self)
        try:
            spec = _spec_of(name, path, target)
        finally:
            sys.meta_path.insert(0, self)
        loader: Any = getattr(spec, "loader", None)
        if loader is None or _distributes_itself():
            return spec
        execute = loader.exec_module

        def executed(module: "Any") -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self._seed(name, module)

        vars(loader)["exec_module"] = executed
        return spec

    def _seed(self, name: str, module: "Any") -> None:
        """Seed a module's generator equally on all ranks; the program may reseed it."""
        if name == "numpy":
            module.random.seed(_seed())
        elif _is_helper():
            # Helpers of a program must not all draw the same numbers, and this helper
            # has no name yet: it is seeded later, unless its generator is used earlier.
            self._random_state = module.getstate()
        else:
            module.seed(_seed())


def _spec_of(
    name: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    """The spec from the first finder that finds one."""
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find else None
        if spec is not None:
            return spec
    return None


def _package() -> "ModuleSpec | None":
    """The spec of our package: this Python may have none, or another version."""
    from importlib.util import spec_from_file_location

    folder = os.path.join(_ROOT, "tfcluster")
    return spec_from_file_location(
        "tfcluster",
        os.path.join(folder, "__init__.py"),
        submodule_search_locations=[folder],
    )


def _seed() -> int:
    """The same seed as ``injection.common_seed``, without its imports."""
    import hmac

    environ = os.environ
    recording = environ.get("TFCLUSTER_RECORDING")
    if recording:
        import json

        seed: int = json.loads(recording)["seed"]
        return seed
    alone = environ["TFCLUSTER_STRATEGY"] == "parameter_server"
    if '"synchronous":true' in environ.get("TFCLUSTER_RUNTIME", ""):
        alone = False
    attempt = "0" if alone else environ.get("TFCLUSTER_ATTEMPT", "0")
    message = "seed " + attempt
    if _is_helper():
        process = sys.modules.get("multiprocessing.process")
        message += " " + process.current_process().name if process else ""
    token = bytes.fromhex(environ.get("TFCLUSTER_TOKEN", ""))
    digest = hmac.digest(token, message.encode(), "sha256")
    return int.from_bytes(digest, "big") % (1 << 31)


def _distributes_itself() -> bool:
    try:
        with open(sys.argv[0], encoding="utf-8", errors="replace") as file:
            source = file.read()
    except (AttributeError, IndexError, OSError, ValueError):
        source = " ".join(_started_as())
    return any(name in source for name in _DISTRIBUTION_NAMES)


def _run_site_sitecustomize() -> None:
    """Run the ``sitecustomize`` that Python would have found without ours."""
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if _is_below_a_training_task():
    sys.meta_path.insert(0, _Hook())
_run_site_sitecustomize()
