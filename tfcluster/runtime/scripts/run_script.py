"""Runs the user's program as ``__main__``, as ``python PROGRAM ARG...`` would.

A program cannot tell the difference: sys.argv, sys.path and ``__main__`` are the same
as with Python, and our frames are left out of its tracebacks. The module knows nothing
about tasks or TensorFlow.
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
class Script:
    """A program: ``option`` is ``-m``, ``-c`` or empty, and ``target`` is the module,
    code or path."""

    option: str
    target: str
    args: tuple[str, ...] = ()

    @property
    def argv(self) -> tuple[str, ...]:
        """The arguments of the equivalent Python command."""
        head = (self.option, self.target) if self.option else (self.target,)
        return (*head, *self.args)


def parse(argv: Sequence[str]) -> Script | None:
    """Parse ``SCRIPT ARG...``, ``-m MODULE ARG...`` or ``-c CODE ARG...``.

    Returns None if the program is missing.
    """
    option = argv[0] if argv and argv[0] in ("-m", "-c") else ""
    rest = list(argv[1:] if option else argv)
    return Script(option, rest[0], tuple(rest[1:])) if rest else None


def import_folder(program: Script) -> str | None:
    """The folder that Python would put first on sys.path for ``program``.

    None with PYTHONSAFEPATH or ``-P``.
    """
    if getattr(sys.flags, "safe_path", False):
        return None
    if program.option == "-c":
        return ""
    if program.option == "-m":
        return str(Path.cwd())
    return str(Path(program.target).resolve().parent)


def run(program: Script) -> None:
    """Run ``program`` to its end; pass on its exceptions, including SystemExit.

    Python prints an uncaught exception at exit, without our frames.
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
            exec(code, main.__dict__)  # noqa: S102 - the user's program
        else:
            _run_path(program, main)
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook = _without_our_frames(error, sys.excepthook)
        raise


def _run_module(name: str, folder: str | None) -> None:
    _put_first(folder)
    # Python's C code calls this for -m: it is the only way to run in the real __main__.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _run_path(program: Script, main: ModuleType) -> None:
    path = _absolute(program.target)
    if pkgutil.get_importer(path) is not None:
        # A folder or an archive with a __main__ module.
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
    exec(code, main.__dict__)  # noqa: S102 - the user's program


def _code(loader: SourceFileLoader | SourcelessFileLoader, path: str) -> CodeType:
    if isinstance(loader, SourceFileLoader):
        # Not loader.get_code(): Python does not write scripts to __pycache__.
        return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    code = loader.get_code("__main__")
    if code is None:
        raise ImportError(f"no code in {path}")
    return code


def _absolute(path: str) -> str:
    """Make a path absolute as Python does: without resolving or normalising it."""
    return path if path.startswith("/") else f"{Path.cwd()}/{path}"


def _put_first(folder: str | None) -> None:
    if folder is not None:
        sys.path.insert(0, folder)


def _fresh_main() -> ModuleType:
    """Replace ``__main__`` with an empty module."""
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    main.__dict__["__builtins__"] = builtins
    # Once multiprocessing is imported, __mp_main__ is a second name of this module.
    caller = sys.modules["__main__"]
    for name in [name for name, module in sys.modules.items() if module is caller]:
        sys.modules[name] = main
    return main


Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


_OURS = "tfcluster."


def _without_our_frames(error: BaseException, hook: Hook) -> Hook:
    """Wrap the exception hook, so that it shows only the program's part of a traceback.

    Python calls the hook at the very end, and then exits with its usual status: 1, or
    SIGINT after a KeyboardInterrupt. With TFCLUSTER_DEBUG=1 nothing is hidden.
    """
    if os.environ.get("TFCLUSTER_DEBUG", "") not in ("", "0"):
        return hook
    entries = list(_parts(error.__traceback__))
    ours = _is_ours(type(error).__module__)
    if ours:
        # End at the line where the program called us: the author can change that line.
        entries = entries[: 1 + max(_places_of_program(entries), default=-1)]
    traceback: TracebackType | None = None
    for module, part in reversed(entries):
        if not _is_ours(module):
            traceback = TracebackType(
                traceback, part.tb_frame, part.tb_lasti, part.tb_lineno
            )

    def show(
        kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        if value is error:
            trace = sys.last_traceback = traceback
            value.__traceback__ = traceback
            if ours:
                value.__cause__ = value.__context__ = None
            if getattr(kind, "of_another_rank", False):
                # The other rank prints what has happened, and where.
                sys.stderr.write(f"{kind.__name__}: {value}\n")
                return
        hook(kind, value, trace)

    return show


def _is_ours(module: str) -> bool:
    return module.startswith(_OURS)


def _places_of_program(
    entries: Sequence[tuple[str, TracebackType]],
) -> Iterator[int]:
    """The indices of the entries that are neither ours nor in any library."""
    folders = tuple({sysconfig.get_path(name) for name in _LIBRARIES})
    for at, (module, part) in enumerate(entries):
        file = part.tb_frame.f_code.co_filename
        if not _is_ours(module) and not file.startswith(folders):
            yield at


_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")


def _parts(traceback: TracebackType | None) -> Iterator[tuple[str, TracebackType]]:
    """Yield every entry of a traceback, with the name of its module."""
    while traceback is not None:
        yield traceback.tb_frame.f_globals.get("__name__", ""), traceback
        traceback = traceback.tb_next
