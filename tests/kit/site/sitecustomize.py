"""The ``sitecustomize`` of programs that tests start: Keras's import is quicker.

If scikit-learn, matplotlib and the like are installed, the import of Keras imports them
for its wrappers and its galleries. No test uses those, and without them TensorFlow and
Keras need 40% less time to import. A program that imports one by itself gets it.
"""

import sys

TYPE_CHECKING = False  # Not from typing, which takes a long time to import.
if TYPE_CHECKING:
    from collections.abc import Sequence

_OPTIONAL = ("IPython", "matplotlib", "scipy", "sklearn")
_KERAS = ("keras.", "tensorflow.python.keras.")


class _NotForKeras:
    """A finder that finds nothing, and refuses what only Keras asks for."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: object = None
    ) -> None:
        if name in _OPTIONAL and _importer().startswith(_KERAS):
            raise ModuleNotFoundError(f"hidden from Keras: {name}", name=name)


def _importer() -> str:
    """The name of the module that contains the import statement in progress."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


sys.meta_path.insert(0, _NotForKeras())
