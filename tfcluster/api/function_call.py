"""``run``: call a function on all ranks of a cluster.

The arguments and results are files in a private folder of the state folder, which the
hosts must see. The ranks run a small program beside these files.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, overload

from tfcluster.api import rank_program
from tfcluster.api.launching import IMPORTING, begin
from tfcluster.api.run_handle import Run
from tfcluster.base import plain_data
from tfcluster.base.errors import ConfigError, Problem, ResourceError
from tfcluster.launcher.job import module_uses_tensorflow
from tfcluster.record.paths import ELSEWHERE, FOLDER_MODE, state_dir

_CALLS = "calls"
_PROGRAM = "call.py"
_COPIED = (plain_data, rank_program)
_SOURCE = '''\
"""Calls {function} on a rank."""
{mention}
import importlib.util, os, sys

FOLDER = os.path.dirname(os.path.abspath(__file__))

def load(name):
    spec = importlib.util.spec_from_file_location(
        "tfcluster.call." + name, os.path.join(FOLDER, name + ".py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module

if __name__ == "__main__":  # not in processes that multiprocessing starts
    __name__ = "tfcluster.call"  # tracebacks leave out modules of this name
    load("rank_program").main(FOLDER, load("plain_data"))
'''
# The launcher reads the ranks' program to see whether they need TensorFlow.
_MENTION = "# It uses TensorFlow: import tensorflow"

T = TypeVar("T")


@overload
def run(
    function: Callable[..., T],
    *arguments: Any,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    workers: int = ...,
    ps: int = ...,
    hosts: str | Sequence[str] | None = ...,
    backend: str | None = ...,
    name: str | None = ...,
    settings: Mapping[str, Any] | None = ...,
    environ: Mapping[str, str] | None = ...,
    echo: bool = ...,
    all_results: Literal[False] = ...,
    **keywords: Any,
) -> T: ...


@overload
def run(
    function: Callable[..., T],
    *arguments: Any,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    workers: int = ...,
    ps: int = ...,
    hosts: str | Sequence[str] | None = ...,
    backend: str | None = ...,
    name: str | None = ...,
    settings: Mapping[str, Any] | None = ...,
    environ: Mapping[str, str] | None = ...,
    echo: bool = ...,
    all_results: Literal[True],
    **keywords: Any,
) -> list[T]: ...


def run(
    function: Callable[..., T],
    *arguments: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    workers: int = 2,
    ps: int = 0,
    hosts: str | Sequence[str] | None = None,
    backend: str | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    echo: bool = False,
    all_results: bool = False,
    **keywords: Any,
) -> T | list[T]:
    """Call a function on all ranks; returns what rank 0 returns.

    The ranks import the function from its module, so it must be defined at the level of
    a module, or of the script that calls ``run`` under ``if __name__ == "__main__":``.
    Arguments and results are plain data: None, bool, int, float, str, bytes, list,
    tuple, dict and NumPy arrays.

    Args:
        function: What the ranks call, under the training runtime like a script.
        arguments: Its arguments. Keywords other than the following ones are also
            arguments of the function.
        args: Its arguments, instead of ``arguments``.
        kwargs: Its keyword arguments, even those with a name from this list.
        workers: The number of ranks.
        ps: The number of parameter servers.
        hosts: SSH hosts, like ``["node1:4", "node2:4"]``. They must see the state
            folder, and the function's module.
        backend: ``local``, ``ssh``, ``slurm`` or another scheduler.
        name: The run's name; default: the function's name.
        settings: Further settings, as for ``launch``. If nothing in the function's
            module mentions TensorFlow or Keras, ``runtime.require_exchange`` is False,
            unless it is set here: the function trains nothing.
        environ: As for ``launch``.
        echo: Print the lines of the tasks as they arrive.
        all_results: Return the list of all ranks' results, in rank order.

    Raises:
        RunFailedError: A rank has failed, with the first failure and its last lines.
        TfclusterError: What ``launch`` raises.
        TypeError: An argument is not plain data; the message names the argument's path,
            ``args[0]['model']``. A result that is not plain data fails the run.
    """
    environ = dict(os.environ if environ is None else environ)
    if arguments and args:
        hint = "give them once"
        raise ConfigError([Problem("args", "are also given as arguments", hint)])
    if twice := sorted((kwargs or {}).keys() & keywords.keys()):
        what = f"has {', '.join(twice)}, also given as a keyword"
        raise ConfigError([Problem("kwargs", what, "give it once")])
    args, kwargs = tuple(arguments or args), {**(kwargs or {}), **keywords}
    source = locate(function)
    require_fitting(function, args, kwargs)
    trains = source.file is None or module_uses_tensorflow(Path(source.file))
    if not trains:
        settings = {"runtime.require_exchange": False, **(settings or {})}
    with _folder(environ) as folder:
        text = _SOURCE.format(function=source.name, mention=_MENTION if trains else "")
        _write(folder, text, source, args, kwargs, all_results=all_results)
        handle = begin(
            command=["python", str(folder / _PROGRAM)],
            workers=workers,
            ps=ps or None,
            hosts=hosts,
            backend=backend,
            name=name,
            usual_name=source.name,
            arguments=(),
            settings=settings,
            detach=False,
            environ=environ,
            scratch=folder,
        )
        with handle:
            if echo:
                for line in handle.logs(follow=True):
                    print(f"{line.task} {line}", flush=True)  # noqa: T201 - asked for
            handle.wait().check()
        ranks = range(workers) if all_results else range(1)
        results: list[T] = [_result(folder, rank, handle) for rank in ranks]
        return results if all_results else results[0]


@contextlib.contextmanager
def _folder(environ: Mapping[str, str]) -> Iterator[Path]:
    """A private folder for one call, which is removed after the call."""
    try:
        calls = state_dir(environ) / _CALLS
        calls.mkdir(FOLDER_MODE, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=calls))
    except OSError as error:
        what = f"cannot make a folder for the call: {error.strerror}"
        raise ResourceError(what, hint=ELSEWHERE) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(
    folder: Path,
    program: str,
    source: FunctionSource,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    all_results: bool,
) -> None:
    """Write the files that a rank needs. Raises NotPlainError or ResourceError."""
    call = {
        "args": args,
        "kwargs": kwargs,
        "function": source.name,
        "module": source.module,
        "path": list(source.path),
        "script": source.script,
        "importing": IMPORTING,
        "all_results": all_results,
    }
    for place, value in (("args", args), ("kwargs", kwargs)):
        plain_data.check(value, place)
    try:
        plain_data.write(str(folder / rank_program.ARGUMENTS), call, "the call")
        (folder / _PROGRAM).write_text(program)
        for module in _COPIED:
            assert module.__file__ is not None  # they are files of this package
            shutil.copy(module.__file__, folder)
    except OSError as error:
        what = f"cannot write the call to {folder}: {error.strerror}"
        raise ResourceError(what, hint=ELSEWHERE) from error


def _result(folder: Path, rank: int, handle: Run) -> Any:
    path = folder / rank_program.result_name(rank)
    try:
        return plain_data.read(str(path))
    except FileNotFoundError:
        raise ResourceError(
            f"rank {rank} has left no result in {folder}",
            hint="either the function has ended its process (sys.exit), or its host "
            f"does not see that folder; `tfcluster logs {handle.id}`",
        ) from None


_OWN_MODULE = (
    "put it into a module: a file train.py beside this program, `import train`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSource:
    """How to import a function."""

    name: str
    module: str
    path: tuple[str, ...]
    """The folders to search for modules."""
    script: str | None
    """The file to import, if the function is defined in the program itself."""
    file: str | None
    """The file that defines the module, if it has one."""


def locate(function: Callable[..., Any]) -> FunctionSource:
    """Where to import ``function``. Raises ConfigError if a rank could not do so."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    home = getattr(function, "__module__", None) or ""
    module = sys.modules.get(home)
    if "<lambda>" in name:
        raise _refused(name, "is a lambda: ranks cannot import it", _OWN_MODULE)
    if "<locals>" in name:
        what = "is defined within a function: ranks cannot import it"
        raise _refused(name, what, "move it to the level of its module")
    if "." in name or not hasattr(function, "__qualname__"):
        what = "is not a function of a module: ranks cannot import it"
        hint = "give a function that is defined at module level, then its arguments"
        raise _refused(name, what, hint)
    if module is not None and getattr(module, name, None) is not function:
        what = f"is not what the name {name} means in {home}: ranks would call that"
        raise _refused(name, what, f"define `def {name}` once, at module level")
    if home == "__main__" and module is not None:
        return _of_program(function, name, module)
    if module is None:
        raise _refused(name, f"its module {home or '?'} is not imported", _OWN_MODULE)
    return _of_module(name, home, getattr(module, "__file__", None))


def _of_module(name: str, module: str, file: str | None) -> FunctionSource:
    path: tuple[str, ...] = ()
    if file is not None:
        place = Path(os.path.abspath(file))  # noqa: PTH100 - resolve() follows links
        package = place.name == "__init__.py"
        depth = module.count(".") + (1 if package else 0)
        path = (str(place.parents[depth]),)
    return FunctionSource(name=name, module=module, path=path, script=None, file=file)


def _of_program(
    function: Callable[..., Any], name: str, module: ModuleType
) -> FunctionSource:
    spec = getattr(module, "__spec__", None)
    if spec is not None and spec.name:  # python -m PACKAGE.MODULE
        return _of_module(name, spec.name, spec.origin)
    file = getattr(module, "__file__", None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    if file is None or code is None or not _same(code.co_filename, file):
        where = "in a notebook cell or typed in: ranks cannot import it"
        hint = "put it into a module: `%%writefile train.py` in a cell, `import train`"
        raise _refused(name, f"is defined {where}", hint)
    script = os.path.abspath(file)  # noqa: PTH100 - resolve() follows links
    folder = os.path.dirname(script)  # noqa: PTH120 - a text is wanted
    return FunctionSource(
        name=name, module="__main__", path=(folder,), script=script, file=script
    )


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def require_fitting(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise ConfigError if the function cannot be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # written in C
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", str(function))
        hint = f"its arguments are {name}{signature}"
        raise ConfigError([Problem(name, str(error), hint)]) from None


def _refused(name: str, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(name, what, hint)])
