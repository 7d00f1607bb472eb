"""tfcluster: one command that trains an unmodified Keras script on a cluster.

From Python: ``launch``, ``attach`` and ``run``, and the errors that they raise. They
are imported on use: ``import tfcluster`` costs nothing, and hosts need only a part of
this package.
"""

__version__ = "0.3.0"

TYPE_CHECKING = False  # typing itself takes a while to import
if TYPE_CHECKING:
    from tfcluster.api import (
        ActiveRunError,
        ConfigError,
        ContactLostError,
        HostError,
        Outcome,
        ResourceError,
        Run,
        RunFailedError,
        StartError,
        TfclusterError,
        attach,
        launch,
        run,
    )

__all__ = [
    "ActiveRunError",
    "ConfigError",
    "ContactLostError",
    "HostError",
    "Outcome",
    "ResourceError",
    "Run",
    "RunFailedError",
    "StartError",
    "TfclusterError",
    "__version__",
    "attach",
    "launch",
    "run",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tfcluster' has no attribute {name!r}")
    from tfcluster import api

    found = globals()[name] = getattr(api, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
