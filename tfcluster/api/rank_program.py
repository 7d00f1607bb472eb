"""What a rank runs for ``tfcluster.run``: imports the function and calls it.

Ranks run it from a copy beside their data, with Python alone: it must import nothing
from tfcluster.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

ARGUMENTS = "arguments.zip"
_MAIN = "__tfcluster_main__"


class PlainData(Protocol):
    """The module ``plain_data``."""

    def read(self, path: str) -> Any: ...

    def write(self, path: str, value: object, name: str) -> None: ...


def result_name(rank: int) -> str:
    """The file of a rank's result."""
    return f"result-{rank}.zip"


def main(folder: str, plain_data: PlainData) -> None:
    """Call the function that the files in ``folder`` describe, and write its result."""
    call = plain_data.read(os.path.join(folder, ARGUMENTS))  # noqa: PTH118 - as below
    sys.path[:] = [place for place in sys.path if place != folder]
    for place in reversed(call["path"]):
        if place not in sys.path:
            sys.path.insert(0, place)
    function = _function(call)
    value = function(*call["args"], **call["kwargs"])
    rank = int(os.environ.get("TFCLUSTER_RANK", "0"))
    if rank == 0 or call["all_results"]:
        target = os.path.join(folder, result_name(rank))  # noqa: PTH118 - few imports
        try:
            plain_data.write(target, value, "result")
        except TypeError as error:
            raise TypeError(str(error)) from None  # hides the traceback in plain_data


def _function(call: dict[str, Any]) -> Callable[..., Any]:
    if call["script"] is None:
        module = importlib.import_module(call["module"])
    else:
        module = _script(call["script"], call["importing"])
    function: Callable[..., Any] = getattr(module, call["function"])
    return function


def _script(path: str, importing: str) -> Any:
    """The module of a script, under a name other than ``__main__``.

    So the code under ``if __name__ == "__main__":`` does not run. ``importing`` is the
    variable that forbids launches during the import.
    """
    spec = importlib.util.spec_from_file_location(_MAIN, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python script")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MAIN] = module
    os.environ[importing] = path
    try:
        spec.loader.exec_module(module)
    finally:
        del os.environ[importing]
    return module
