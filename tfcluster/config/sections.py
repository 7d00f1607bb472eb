"""The shape of cluster.yaml together with the sections of schedulers.

A scheduler names the kind of each of its keys; here, kinds become types.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal, Optional

from pydantic import Field, create_model

from tfcluster import schedulers
from tfcluster.config import field_types
from tfcluster.config.models import Cluster, Section
from tfcluster.schedulers.base import Scheduler

KINDS: dict[str, Any] = {
    "count": field_types.Count,
    "gpus": field_types.Gpus,
    "memory": field_types.Memory,
    "time": field_types.Time,
    "word": field_types.Word,
    "words": field_types.WordList,
    "line": field_types.Line,
    "resources": dict[field_types.Word, field_types.Resource],
    "options": list[field_types.Line],
}
"""Kind of a key, as in ``setting(kind, ...)`` -> what values it takes."""


def known(names: Iterable[str]) -> tuple[Scheduler, ...]:
    """The built-in schedulers, and those of ``names`` that a site has installed."""
    others = sorted({*names} - {*schedulers.names(), *Cluster.model_fields})
    return (*schedulers.built_in(), *filter(None, map(schedulers.find, others)))


@functools.cache
def cluster_model(known: tuple[Scheduler, ...]) -> type[Cluster]:
    """``Cluster`` with a section for each scheduler that has settings."""
    backends = tuple(each.name for each in known)
    launchers = ("auto", *(each.launcher for each in known if each.launcher))
    fields: dict[str, Any] = {
        "backend": (Literal.__getitem__(backends), Cluster.model_fields["backend"]),
        "launcher": (Literal.__getitem__(launchers), Cluster.model_fields["launcher"]),
    }
    for each in known:
        if each.settings is not None:
            about = f"Backend {each.name}: {each.title}."
            kind = _section(each.settings)
            fields[each.name] = (kind, Field(default={}, description=about))
    model: type[Cluster] = create_model(
        "Cluster", __base__=Cluster, __doc__=Cluster.__doc__, **fields
    )
    return model


def _section(settings: type[Any]) -> type[Section]:
    fields = {}
    for each in dataclasses.fields(settings):
        kind, default = KINDS[each.metadata["kind"]], each.default
        if each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        default = list(default) if isinstance(default, tuple) else default
        if default is None:
            kind = Optional[kind]  # noqa: UP045 - a value, which may be Annotated
        about = Field(default=default, description=each.metadata["about"])
        fields[each.name] = (kind, about)
    name = settings.__name__.removesuffix("Settings")
    options: dict[str, Any] = fields
    model: type[Section] = create_model(
        name, __base__=Section, __doc__=settings.__doc__, **options
    )
    return model
