"""The lines of the user's script that added the ops of a function."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tensorflow as tf

import tfcluster
from tfcluster.runtime import tf_internals
from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.functions import (
    BRANCHES,
    Function,
    called_function,
    function_named,
)
from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.tensor_types import Message


@dataclass(frozen=True, slots=True)
class Line:
    """A place in a source file."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        path, here = Path(self.file), Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        return f"{shown}:{self.number}:{self.function}"


def line_of(node: Node, function: str) -> Line | None:
    """The innermost line of the script at which a node of a function was added.

    ``function`` is the name of the traced function with which the node's origin
    begins. None if TensorFlow has not recorded the line, or if all lines are in
    libraries.
    """
    place = _place_of(node.origin, function)
    if place is None:
        return None
    lines = _lines_of(*place)
    return next((line for line in reversed(lines) if is_of_the_script(line.file)), None)


def _place_of(origin: Sequence[str], function: str) -> tuple[str, str] | None:
    """The name of the function that has a node itself, and the node's name there."""
    words = iter(origin)
    current: Function | None = function_named(function)
    for word in words:
        if current is None:
            return None
        if word not in current.nodes:
            # The part of a loop's body that follows the batch it takes.
            if word == "taken":
                continue
            return None
        definition = current.nodes[word].definition
        called = called_function(definition) or _body_of(definition, words)
        if called is None:
            return current.name, word
        current = function_named(called)
    return None


def _body_of(definition: Message, words: Iterator[str]) -> str | None:
    """The function of a loop or branch that the next word of an origin names.

    None if the origin ends with the loop or branch itself, or for another op.
    """
    attributes = definition.attr
    if "cond" in attributes and "body" in attributes:
        word = next(words, None)
        names = {"condition": "cond", "body": "body"}
        return None if word not in names else str(attributes[names[word]].func.name)
    if definition.op not in BRANCHES:
        return None
    word = next(words, None)
    if word is None or not word.isdecimal():
        return None
    if "branches" in attributes:
        return str(attributes["branches"].list.func[int(word)].name)
    return str(attributes[("else_branch", "then_branch")[int(word)]].func.name)


def _lines_of(function: str, node: str) -> Sequence[Line]:
    """All lines of the call that added a node, the innermost last."""
    info = _debug_info(function)
    if info is None or node not in info.name_to_trace_id:
        return ()
    trace = info.traces_by_id[info.name_to_trace_id[node]]
    frames = (info.frames_by_id[each] for each in trace.frame_id)
    return [Line(info.files[f.file_index], f.line, f.func) for f in frames]


@functools.lru_cache(maxsize=64)
def _debug_info(function: str) -> Message | None:
    return tf_functions.debug_info(function)


def _folder(file: object) -> str:
    return f"{Path(str(file)).resolve().parent}/"


_KERAS = find_spec("keras")
_LIBRARIES = (
    *([] if _KERAS is None else [_folder(_KERAS.origin)]),
    _folder(tf.__file__),
    _folder(tfcluster.__file__),
)


@functools.lru_cache(maxsize=1024)
def is_of_the_script(file: str) -> bool:
    """Whether a file belongs neither to TensorFlow, Keras nor tfcluster."""
    generated = tf_internals.is_generated(file) or file.startswith("<")
    return not generated and not str(Path(file).resolve()).startswith(_LIBRARIES)
