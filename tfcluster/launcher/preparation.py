"""What a host does before anything is imported there: the request and its answers.

Pure. ``doctor`` asks hosts to do the same.
"""

from __future__ import annotations

from tfcluster.model import Description, Host, Interpreter
from tfcluster.protocol.messages import Prepared, Unprepared
from tfcluster.protocol.requests import Environment, Prepare


def prepare_request(
    description: Description, host: Host, *, cwd: str, log: str, digest: str | None
) -> Prepare:
    """The request; ``cwd`` is the working directory on the host.

    ``digest`` identifies the requirements, see ``requirements_digest``; None: there are
    none.
    """
    setup = description.setup
    return Prepare(
        setup=None if setup is None else setup.text,
        env=dict(description.env),
        cwd=cwd,
        log=log,
        environment=_environment(description, host, digest),
    )


def _environment(
    description: Description, host: Host, digest: str | None
) -> Environment | None:
    requirements = description.requirements
    if requirements is None or digest is None:
        return None
    return Environment(
        file=requirements.file,
        files=requirements.files,
        digest=digest,
        python=host.python or description.python,
        configured=_is_configured(description, host),
        system_site_packages=requirements.system_site_packages,
    )


def _is_configured(description: Description, host: Host) -> bool:
    return "python" in description.origins or host.python is not None


def changed_python(
    description: Description, host: Host, prepared: Prepared
) -> Interpreter | None:
    """The interpreter that a leading ``python`` means from now on; None: the same.

    A configured interpreter takes precedence over one that the lines put on the PATH.
    An environment replaces either; the wrapper that starts its base starts it, too.
    """
    configured = _is_configured(description, host)
    if prepared.environment is not None:
        base = host.python or description.python if configured else ()
        return (*base[:-1], prepared.environment)
    if configured or prepared.python is None:
        return None
    return (prepared.python,)


def unprepared_cause(description: Description, failed: Unprepared) -> str:
    """One sentence that says what has failed."""
    setup = description.setup
    if setup is None or failed.of == "environment":
        return failed.cause
    return setup.failed(failed.line, failed.cause)
