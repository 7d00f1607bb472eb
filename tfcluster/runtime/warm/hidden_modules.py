"""Hides imported modules from a task's program until the program imports them.

A program may set variables, ``sys.path`` or limits before it imports TensorFlow. So a
forked task starts like a new interpreter, without these modules; when the program
imports one of them, it gets the module that is already there, if an import would now
have the same result. Otherwise, the task has to start again in a fresh interpreter.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import takewhile
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NoReturn

from tfcluster.runtime.warm.import_variables import concerns_imports
from tfcluster.runtime.warm.start_state import StartState, native_environ

_ALL_AT_ONCE = ("keras", "tensorflow")
"""Libraries whose import has imported all of the hidden modules."""
_VISIBLE = sys.stdlib_module_names | {"__mp_main__", "tfcluster"}

StartAgain = Callable[[str], NoReturn]


@dataclass(frozen=True, slots=True)
class Imports:
    """What is known about the imports of this interpreter."""

    earlier: frozenset[str]
    """The modules that had been imported before."""
    read: frozenset[str]
    """The environment variables that Python code has read."""
    missing: frozenset[str]
    """The modules that were imported if there were any, and that were not found."""
    settings: bytes | None
    """The content of Keras's settings."""
    settings_file: str

    def concerned_by(self, name: str) -> bool:
        """Whether another value of a variable might have changed the imports."""
        return concerns_imports(name, self.read)


class MissingModules(MetaPathFinder):
    """Records the top-level modules that no other finder finds; must be the last."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, fullname: str, *_: object) -> None:
        if "." not in fullname:
            self.names.add(fullname)


def default_values() -> dict[str, str]:
    """The values that the imports have used for variables that were not set."""
    values = {"TF_CPP_MIN_LOG_LEVEL": "1"}  # see bootstrap.quieten_tensorflow
    with suppress(AttributeError, KeyError):
        values["KERAS_BACKEND"] = sys.modules["keras"].backend.backend()
    return values


def settings_file() -> str:
    """The file from which Keras reads its defaults on import, or which it creates."""
    home = os.environ.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - as Keras
    folder = os.environ.get("KERAS_HOME") or str(Path(home) / ".keras")
    return str(Path(folder) / "keras.json")


def content(file: str) -> bytes | None:
    """The content of a file; None if it cannot be read."""
    try:
        return Path(file).read_bytes()
    except OSError:
        return None


def shadowed_module(folder: str | None, imported: Container[str]) -> str | None:
    """Why a program with modules in ``folder`` would get a wrong module, or None.

    This happens if another module of the same name has already been imported.
    """
    if folder is None:
        return None
    try:
        with os.scandir(folder or ".") as entries:
            names = sorted(map(_module_name, entries))
    except OSError:
        return None
    shadowed = next((name for name in names if name and name in imported), None)
    return shadowed and f"the program's folder contains its own module {shadowed!r}"


def _module_name(entry: os.DirEntry[str]) -> str:
    """The name of the top-level module in a directory entry; empty if it is none."""
    name, _, suffix = entry.name.partition(".")
    if suffix == "py" or suffix.endswith("so"):
        return name
    package = not suffix and (Path(entry.path) / "__init__.py").exists()
    return name if package else ""


class HiddenModules(MetaPathFinder):
    """Finds the hidden modules.

    ``env`` is the environment of a new interpreter; what the imports have changed in it
    is undone until the program imports TensorFlow. ``start_again`` gets the reason why
    an import would now have another result, and replaces the process.
    """

    def __init__(
        self, imports: Imports, env: Mapping[str, str], start_again: StartAgain
    ) -> None:
        self._imports = imports
        self._start_again = start_again
        self._pid = os.getpid()
        self._watching = True
        self._defaults = default_values()
        self._made = _undone(env)
        self._modules = _taken_away(imports.earlier)
        self._names: dict[str, list[str]] = {}
        for name in self._modules:
            self._names.setdefault(name.partition(".")[0], []).append(name)
        self._loaded = sys.stdlib_module_names & sys.modules.keys()
        self._path = tuple(sys.path)
        self._state = StartState.of_this_process()
        self._environ = dict(os.environ)
        self._put, self._unset = os.putenv, os.unsetenv
        # os.environ calls these functions for every change.
        os.putenv, os.unsetenv = self._putenv, self._unsetenv  # type: ignore[assignment]
        sys.meta_path.insert(0, self)
        # At the end, Python must find the modules where it always finds them.
        atexit.register(self._show_all)

    @property
    def state(self) -> StartState:
        """The state of the process when the modules were hidden."""
        return self._state

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        module = self._modules.get(fullname)
        if module is None:
            return None
        spec = self._found_elsewhere(fullname, path, target)
        if spec is None:
            # Libraries may use modules that only they can find.
            spec, same = ModuleSpec(fullname, None), not self._watching
        else:
            same = _same_file(spec, module)
        spec.loader = _HiddenModuleLoader(self, fullname, module, same=same)
        return spec

    def _found_elsewhere(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """What an import would find now; the runtime's own hooks are not asked."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                return spec
        return None

    def expect(self, settings: Mapping[str, str | None]) -> None:
        """Start again at once if the program is going to set such variables."""
        for name, value in settings.items():
            self._watch(name, value)

    # --- showing modules ------------------------------------------------------------

    def show(self, name: str, *, same: bool) -> None:
        """Show a package with all that is below it, and what it uses."""
        if name not in self._modules:
            return  # another thread was faster
        self._require_unchanged(name, same=same)
        package = name.partition(".")[0]
        shown = {n: self._modules.pop(n) for n in self._names.pop(package, ())}
        sys.modules.update(shown)
        everything = name in _ALL_AT_ONCE
        if everything and self._watching:
            self._stop_watching()
        # These imports call the hooks that wait for them.
        used = _used_by(shown) if self._watching else list(self._names)
        for other in used:
            if other in self._modules:
                importlib.import_module(other)
        if everything:
            self._show_all()
            self._modules.clear()
            if self in sys.meta_path:
                sys.meta_path.remove(self)

    def _show_all(self) -> None:
        sys.modules.update({**self._modules, **sys.modules})

    def _stop_watching(self) -> None:
        self._watching = False
        os.putenv, os.unsetenv = self._put, self._unset
        for name, value in self._made.items():
            if os.environ.get(name) == self._environ.get(name):
                os.environ[name] = value

    # --- what has changed -----------------------------------------------------------

    def _putenv(self, name: str | bytes, value: str | bytes) -> None:
        self._put(name, value)
        self._watch(os.fsdecode(name), os.fsdecode(value))

    def _unsetenv(self, name: str | bytes) -> None:
        self._unset(name)
        self._watch(os.fsdecode(name), None)

    def _watch(self, name: str, value: str | None) -> None:
        """Start again at once: later, the program has done more that others can see."""
        if os.getpid() == self._pid and self._differs(name, value):
            self._start_again(f"sets {name}")

    def _differs(self, name: str, value: str | None) -> bool:
        if not self._imports.concerned_by(name):
            return False
        default = self._defaults.get(name)
        before = self._environ.get(name, default)
        return before != (default if value is None else value)

    def _require_unchanged(self, name: str, *, same: bool) -> None:
        reason = None if same else f"has another {name} on its sys.path"
        if reason is None and self._watching:
            reason = next(self._changed(), None)
        if reason is None:
            return
        if os.getpid() == self._pid:
            self._start_again(reason)
        sys.stderr.write(
            f"tfcluster: warning: a forked process {reason}, which has no effect: its "
            f"{name} was imported earlier\n"
        )

    def _changed(self) -> Iterator[str]:
        """What the program has done that may change the result of an import."""
        for environ in (os.environ, native_environ()):
            for name in sorted({*environ, *self._environ}):
                if self._differs(name, environ.get(name)):
                    yield f"sets {name}"
        for name, module in self._modules.items():
            if sys.modules.get(name, module) is not module:
                yield f"has its own module {name}"
        if limit := self._state.changed_limit():
            yield f"sets {limit}"
        if content(self._imports.settings_file) != self._imports.settings:
            yield f"writes {self._imports.settings_file}"
        # Python's own modules are found before those in later folders.
        first = list(takewhile(lambda entry: entry not in self._path, sys.path))
        for folder in [entry for entry in sys.path if entry not in self._path]:
            names = self._loaded if folder in first else frozenset()
            if problem := shadowed_module(folder, names | self._imports.missing):
                yield f"has {problem.rpartition(' ')[2]} in {folder or 'its folder'}"


class _HiddenModuleLoader(Loader):
    """Loads one hidden module, by showing it."""

    def __init__(
        self, hidden: HiddenModules, name: str, module: ModuleType, *, same: bool
    ) -> None:
        self._hidden = hidden
        self._name = name
        self._module = module
        self._spec = module.__spec__
        self._same = same

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._hidden.show(self._name, same=self._same)
        finally:
            module.__spec__ = self._spec


def _undone(env: Mapping[str, str]) -> dict[str, str]:
    """Undo the changes of the imports to the environment, and return them."""
    changed = {
        name: value
        for name, value in os.environ.items()
        if env.get(name) != value and not name.startswith("TFCLUSTER_")
    }
    for name in changed:
        if name in env:
            os.environ[name] = env[name]
        else:
            del os.environ[name]
    return changed


def _taken_away(earlier: frozenset[str]) -> dict[str, ModuleType]:
    """Remove modules from ``sys.modules``, and return them by their names."""
    taken = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _VISIBLE or name in earlier or module is None:
            continue
        # Some modules can be found only in sys.modules.
        if "." in name or getattr(module.__spec__, "name", None) == name:
            taken[name] = sys.modules.pop(name)
    return taken


def _same_file(spec: ModuleSpec, module: ModuleType) -> bool:
    before = module.__spec__.origin if module.__spec__ else None
    if spec.origin == before or before is None or spec.origin is None:
        return spec.origin == before
    return os.path.realpath(spec.origin) == os.path.realpath(before)


def _used_by(modules: Mapping[str, ModuleType]) -> list[str]:
    """The top-level modules to which the values in ``modules`` belong."""
    owners: dict[str, None] = {}
    for module in modules.values():
        for value in list(vars(module).values()):
            if type(value) is ModuleType:
                owners[value.__name__.partition(".")[0]] = None
            elif isinstance(value, type | FunctionType):
                owners[str(value.__module__).partition(".")[0]] = None
    return list(owners)
