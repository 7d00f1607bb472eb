"""Run the user's program as ``__main__``, as ``python PROGRAM ARG...`` would.

What a program can see of how it was started is what Python itself would give it; the
frames above it are left out of its tracebacks. Knows neither tasks nor TensorFlow.
"""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any


@dataclass(frozen=True, slots=True)
class Program:
    """``option`` is ``-m``, ``-c`` or empty; ``target`` the module, code or path."""

    option: str
    target: str
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments that Python itself would be given."""
        head = (self.option, self.target) if self.option else (self.target,)
        return (*head, *self.args)


def parse(argv: Sequence[str]) -> Program | None:
    """The program in ``SCRIPT ARG...``, ``-m MODULE ARG...`` or ``-c CODE ARG...``."""
    option = argv[0] if argv and argv[0] in ("-m", "-c") else ""
    rest = list(argv[1:] if option else argv)
    return Program(option, rest[0], tuple(rest[1:])) if rest else None


def import_folder(program: Program) -> str | None:
    """What Python puts first on the module path for ``program``.

    None where PYTHONSAFEPATH or ``-P`` forbids it.
    """
    if getattr(sys.flags, "safe_path", False):
        return None
    if program.option == "-c":
        return ""
    if program.option == "-m":
        return str(Path.cwd())
    return str(Path(program.target).resolve().parent)


def run(program: Program) -> None:
    """Run ``program`` to its end; what it raises passes through.

    An exception that nobody catches is shown by Python at exit, without our frames.
    """
    sys.orig_argv[:] = [sys.executable, *program.argv]
    sys.argv[:] = [program.option or program.target, *program.args]
    main = _fresh_main()
    try:
        if program.option == "-m":
            _run_module(program.target, import_folder(program))
        elif program.option == "-c":
            _put_first(import_folder(program))
            code = compile(program.target, "<string>", "exec", dont_inherit=True)
            exec(code, main.__dict__)
        else:
            _run_path(program, main)
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook = _without_our_frames(error, sys.excepthook)
        raise


def _run_module(name: str, folder: str | None) -> None:
    _put_first(folder)
    # What Python's own C code calls for -m: it alone runs in the real __main__.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_path(program: Program, main: ModuleType) -> None:
    path = _absolute(program.target)
    if pkgutil.get_importer(path) is not None:
        # A folder or an archive with a __main__ module of its own.
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    _put_first(import_folder(program))
    compiled = path.endswith(".pyc")
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", path)
    try:
        code = _code(loader, path)
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: "
            f"[Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(2) from None
    main.__dict__.update(__loader__=loader, __file__=path, __cached__=None)
    exec(code, main.__dict__)


def _code(loader: SourceFileLoader | SourcelessFileLoader, path: str) -> CodeType:
    if isinstance(loader, SourceFileLoader):
        # Not loader.get_code(): no script is kept in __pycache__.
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    code = loader.get_code("__main__")
    if code is None:
        raise ImportError(f"no code in {path}")
    return code


def _absolute(path: str) -> str:
    """As Python makes a script's path absolute: nothing is resolved or normalised."""
    return path if path.startswith("/") else f"{Path.cwd()}/{path}"


def _put_first(folder: str | None) -> None:
    if folder is not None:
        sys.path.insert(0, folder)


def _fresh_main() -> ModuleType:
    """An empty ``__main__`` in place of the one that called us."""
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    # multiprocessing, once imported, has a second name for it: __mp_main__.
    caller = sys.modules["__main__"]
    for name in [name for name, module in sys.modules.items() if module is caller]:
        sys.modules[name] = main
    return main


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


_OURS = "tfcluster."


def _without_our_frames(error: BaseException, hook: Hook) -> Hook:
    """``hook`` for ``sys.excepthook``, shown the program's own part of the traceback.

    Python itself calls it at the very end, after which it exits as it must: with 1, or
    by the signal after a KeyboardInterrupt. With TFCLUSTER_DEBUG=1 all is shown.
    """
    if os.environ.get("TFCLUSTER_DEBUG", "") not in ("", "0"):
        return hook
    entries = list(_parts(error.__traceback__))
    ours = _is_ours(type(error).__module__)
    if ours:
        # Where the program called into us is what its author can do something about.
        entries = entries[: 1 + max(_places_of_program(entries), default=-1)]
    traceback: TracebackType | None = None
    for module, part in reversed(entries):
        if not _is_ours(module):
            traceback = TracebackType(
                traceback, part.tb_frame, part.tb_lasti, part.tb_lineno
            )

    def show(
        kind: type[BaseException], value: BaseException, found: TracebackType | None
    ) -> None:
        if value is error:
            found = sys.last_traceback = traceback
            value.__traceback__ = traceback
            if ours:
                value.__cause__ = value.__context__ = None
            if getattr(kind, "of_another_rank", False):
                # Its own rank shows what has happened, and where.
                sys.stderr.write(f"{kind.__name__}: {value}\n")
                return
        hook(kind, value, found)

    return show


def _is_ours(module: str) -> bool:
    return module.startswith(_OURS)


def _places_of_program(
    entries: Sequence[tuple[str, TracebackType]],
) -> Iterator[int]:
    """Which entries are neither ours nor of an installed or standard library."""
    folders = tuple({sysconfig.get_path(name) for name in _LIBRARIES})
    for at, (module, part) in enumerate(entries):
        file = part.tb_frame.f_code.co_filename
        if not _is_ours(module) and not file.startswith(folders):
            yield at


_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")


def _parts(traceback: TracebackType | None) -> Iterator[tuple[str, TracebackType]]:
    """Every entry of a traceback with its module's name."""
    while traceback is not None:
        yield traceback.tb_frame.f_globals.get("__name__", ""), traceback
        traceback = traceback.tb_next
