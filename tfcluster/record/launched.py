"""What a run was launched with: its Description, in the run's folder.

``rerun`` launches it again, and ``tensorboard`` finds the working directory in it.
"""

from __future__ import annotations

from tfcluster.base.errors import ConfigError, Problem
from tfcluster.plan.description_json import from_plain, to_plain
from tfcluster.plan.model import Description
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.paths import RunPaths

_SCHEMA = 1


def save_launched(paths: RunPaths, description: Description) -> None:
    """Write the Description, unless the run already has one. Raises OSError.

    A run that was submitted already has the Description of its submission.
    """
    if not paths.launched.exists():
        content = {"schema": _SCHEMA, "description": to_plain(description)}
        replace_json(paths.launched, content)


def launched(paths: RunPaths) -> Description:
    """The Description of a run. Raises ConfigError if the record has none."""
    content = read_json(paths.launched) or {}
    try:
        description = from_plain(Description, content["description"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            [
                Problem(
                    paths.run,
                    f"its record does not say how it was launched ({paths.launched})",
                    "an older version of tfcluster may have launched it",
                )
            ]
        ) from error
    assert isinstance(description, Description)  # what from_plain was asked for
    return description
