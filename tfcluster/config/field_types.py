"""The kinds of single values in cluster.yaml: durations, names, port ranges, text.

Each has a check and a JSON Schema. A check returns what the value means, or raises
``Misfit`` (the message then names key and value) or ``refused`` (the message is
complete). Knows no keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tfcluster.base.durations import PATTERN as DURATION_PATTERN
from tfcluster.base.durations import parse_duration
from tfcluster.config.shape import ListShape, MapOf, Misfit, Plain, Widened, mistyped
from tfcluster.config.yaml11_scalars import Lossy
from tfcluster.plan.model import PortRange

MAX_COUNT = 10_000
"""The limit of tasks of one type: far more than fit into TF_CONFIG."""
MAX_ENV_BYTES = 131_072
"""The longest string in an environment on Linux (MAX_ARG_STRLEN)."""

_NAME = "[A-Za-z0-9_][A-Za-z0-9._-]{0,63}"
_MAX_DURATION_S = 366 * 86400.0
_PORT_RANGE = "([0-9]{1,9})-([0-9]{1,9})"
_ENV_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_OURS = frozenset({"TF_CONFIG", "TF_GRPC_REUSE_PORT"})
_USER = r"[A-Za-z0-9_][A-Za-z0-9._@+\\-]*\$?"
# Must not begin with '-': such a word would be taken for an option.
_WORD = "[A-Za-z0-9_.@/*][A-Za-z0-9_.:+/@%=*-]*"
_CONTROL = "[\x00-\x1f\x7f-\x9f]"
_FILLED = {"type": "string", "minLength": 1}
_TEXT_OR_NUMBER = {"type": ["string", "number"]}


def refused(message: str, hint: str | None = None) -> Misfit:
    return Misfit(message, hint, "refused")


def whole(least: int, most: int) -> Plain:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise mistyped("a whole number")
        if value < least:
            raise Misfit(f"a whole number of at least {least}", sort="bound")
        if value > most:
            raise Misfit(f"a whole number of at most {most}", sort="bound")
        return value

    return Plain(check, {"type": "integer", "minimum": least, "maximum": most})


def number(above: float, most: float) -> Plain:
    def check(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise mistyped("a number")
        if value <= above:
            raise Misfit(f"a number greater than {above:g}", sort="bound")
        if value > most:
            raise Misfit(f"a number of at most {most:g}", sort="bound")
        return float(value)

    schema = {"type": "number", "exclusiveMinimum": above, "maximum": most}
    return Plain(check, schema)


def words(*choices: str) -> Plain:
    def check(value: object) -> object:
        if value not in choices:
            raise Misfit(", ".join(choices), sort="word", words=choices)
        return value

    return Plain(check, {"type": "string", "enum": list(choices)})


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise mistyped("true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise mistyped("text")
    return value


def _matching(
    pattern: str,
    what: str,
    hint: str | None = None,
    before: Callable[[object], object] = lambda value: value,
    schema: Mapping[str, Any] | None = None,
) -> Plain:
    def check(value: object) -> str:
        text = _text(before(value))
        if not re.fullmatch(pattern, text):
            raise Misfit(what, hint)
        return text

    return Plain(check, schema or {"type": "string", "pattern": f"^(?:{pattern})$"})


def _duration(*, zero: bool, off: bool) -> Callable[[object], float | None]:
    def check(value: object) -> float | None:
        if off and value is False:
            # YAML reads `off` as false.
            return None
        seconds = parse_duration(value) if isinstance(value, str) else None
        if seconds is not None:
            if seconds > _MAX_DURATION_S:
                raise Misfit("at most 366d")
            if seconds > 0 or zero:
                return seconds
            raise Misfit("longer than 0s", "write off for none" if off else None)
        example = "10s, 5m, 1h or off" if off else "10s, 5m, 1h"
        raise Misfit("a duration", _duration_hint(value, example))

    return check


def _duration_hint(value: object, example: str) -> str:
    if isinstance(value, int | str) and not isinstance(value, bool):
        spaced = re.fullmatch(r"([0-9.]+) *(ms|s|m|h|d)[a-z]*", str(value))
        if spaced:
            return f"write {spaced[1]}{spaced[2]}"
        if re.fullmatch("[0-9]+", str(value)):
            return f"write a unit: {value}s, or like {example}"
    return f"write {example}"


_DURATION = {"type": "string", "pattern": f"^{DURATION_PATTERN}$"}


_SIZES = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZES |= {"KB": 1e3}
_SIZE = f"([0-9]+(?:[.][0-9]+)?)({'|'.join(_SIZES)})"


def _size_or_off(value: object) -> int | None:
    """A number of bytes; None for off, which YAML reads as false."""
    if value is False or value == "off":
        return None
    match = re.fullmatch(_SIZE, value) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise Misfit("a size, or off", f"write a number and {' or '.join(_SIZES)}")
    return int(float(match[1]) * _SIZES[match[2]])


def _ports(value: object) -> PortRange | None:
    if value == "auto":
        return None
    if not isinstance(value, str) or not (match := re.fullmatch(_PORT_RANGE, value)):
        raise Misfit("auto or a range like 40000-41000")
    low, high = int(match[1]), int(match[2])
    if low > high:
        raise refused(f"range {value} is reversed", f"write {high}-{low}")
    if low < 1024 or high > 65535:
        why = "ports below 1024 need root" if low < 1024 else None
        raise Misfit("within 1024-65535", why)
    return PortRange(low, high)


def _as_text(value: object) -> object:
    """Accept numbers as text if their text is not changed by that."""
    if isinstance(value, bool | Lossy) or not isinstance(value, int | float):
        return value
    return str(value)


def _argument(value: object) -> str:
    text = _text(_as_text(value))
    if len(text.encode(errors="surrogateescape")) >= MAX_ENV_BYTES:
        raise refused(f"an argument is longer than {MAX_ENV_BYTES} bytes", "use a file")
    return text


def _as_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    raise Misfit("text or a list", "like: python train.py --epochs 3")


def _setup(value: object) -> str | list[str]:
    if isinstance(value, str) and value:
        return _one_line(value)
    if not isinstance(value, list) or not value:
        raise Misfit("a list of lines for bash, or a file", "setup: [module load cuda]")
    for item in value:
        if not isinstance(item, str) or not item or "\0" in item or "\r" in item:
            raise Misfit("a list of lines for bash", 'like "module load cuda/12"')
    return value


def _env_name(value: object) -> str:
    name = _text(value)
    if not re.fullmatch(_ENV_NAME, name):
        hint = "letters, digits and '_', not a digit first"
        raise refused(f"{name!r} is not the name of a variable", hint)
    if name in _OURS or name.startswith("TFCLUSTER_"):
        raise refused(f"{name} is set by tfcluster", "remove it")
    if name == "CUDA_VISIBLE_DEVICES":
        message = "CUDA_VISIBLE_DEVICES is set by tfcluster"
        raise refused(message, "set the number with 'gpus' under 'tasks'")
    return name


def _env_value(value: object) -> str:
    text = _text(_as_text(value))
    if "\0" in text or "\n" in text or "\r" in text:
        raise refused("a variable's value must be one line, without NUL")
    if len(text.encode(errors="surrogateescape")) >= MAX_ENV_BYTES - 256:
        raise refused(f"a variable is longer than {MAX_ENV_BYTES} bytes", "use a file")
    return text


def _one_line(text: str) -> str:
    if re.search(_CONTROL, text):
        raise Misfit("one line, without control characters")
    return text


def _line(value: object) -> str:
    text = _one_line(_text(value))
    if not text:
        raise Misfit("", sort="empty")
    return text


def _interpreter(value: object) -> tuple[str, ...]:
    words: list[Any] = value if isinstance(value, list) else [value]
    hint = 'like ["apptainer", "exec", "tf.sif", "python"]'
    if not isinstance(value, str | list):
        raise Misfit("a path, a name, or a command as a list of words", hint)
    if not words:
        raise refused("a command must not be an empty list", hint)
    if not all(isinstance(word, str) and word for word in words):
        message = "a command must be a list of words: text, and not empty"
        raise refused(message, hint)
    return tuple(_one_line(word) for word in words)


def _slurm_time(value: object) -> object:
    """A duration (``4h``) in Slurm's format; anything else as it is, as text."""
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        return _as_text(value)
    if seconds > _MAX_DURATION_S or seconds < 1:
        raise Misfit("between 1s and 366d")
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}"
    return f"{days}-{clock}" if days else clock


def _memory(value: object) -> object:
    """``16GB`` and ``16GiB`` as Slurm writes them: 16G."""
    if not isinstance(value, str):
        return _as_text(value)
    match = re.fullmatch("([0-9]+) *([kmgtKMGT])i?[bB]?", value)
    return f"{match[1]}{match[2].upper()}" if match else value


FLAG = Plain(_flag, {"type": "boolean"})
COUNT = whole(1, MAX_COUNT)
GPUS = whole(0, 1024)
PORT = whole(1, 65535)
LINE = Plain(_line, _FILLED)
DURATION = Plain(_duration(zero=False, off=False), _DURATION)
DURATION_OR_ZERO = Plain(_duration(zero=True, off=False), _DURATION)
DURATION_OR_OFF = Plain(
    _duration(zero=False, off=True),
    # YAML 1.1 reads unquoted `off` as a boolean.
    {"anyOf": [_DURATION, {"const": "off"}, {"const": False}]},
)
SIZE_OR_OFF = Plain(
    _size_or_off,
    {
        "anyOf": [
            {"type": "string", "pattern": f"^{_SIZE}$"},
            {"const": "off"},
            {"const": False},
        ]
    },
)
PORTS = Plain(_ports, {"type": "string", "pattern": "^(auto|[0-9]+-[0-9]+)$"})
COMMAND = Widened(
    ListShape(Plain(_argument, _TEXT_OR_NUMBER), filled=True), _as_list, _FILLED
)
"""Arguments; a command given as one string becomes a list with that string."""
_LINES = {"anyOf": [_FILLED, {"type": "array", "minItems": 1, "items": _FILLED}]}
SETUP = Plain(_setup, _LINES)
INTERPRETER = Plain(_interpreter, _LINES)
"""A path, a name, or a command of several words that ends with either."""
ENV_NAME = Plain(_env_name, {"type": "string"})
ENV = MapOf(
    ENV_NAME,
    Plain(_env_value, _TEXT_OR_NUMBER),
    {
        "pass": {
            "type": ["string", "number", "array"],
            "items": {"type": "string"},
            "description": "A list: variables that are passed on from where "
            "tfcluster is started. Text: the value of a variable `pass`.",
        }
    },
)
"""Names and values. ``with_passed`` has already replaced a list below ``pass``."""
NAME = _matching(
    _NAME,
    "at most 64 letters, digits, '.', '_' and '-', and must not begin with . or -",
)
USER = _matching(_USER, "a user name")
WORD = _matching(_WORD, "one word of letters, digits and . _ : + / @ % = -")
WORD_LIST = _matching(
    f"{_WORD}(?:,{_WORD})*", "words of letters, digits and . _ : + / @ % = -"
)
TIME = _matching(
    r"(?:[0-9]+-)?[0-9]+(?::[0-9]{1,2}){0,2}|UNLIMITED|INFINITE",
    "a duration, or a time in Slurm's format",
    'like 4h, minutes, or quoted: "HH:MM:SS", "D-HH:MM:SS"',
    before=_slurm_time,
    schema={"type": ["string", "integer"]},
)
MEMORY = _matching(
    "[0-9]+[KMGT]?",
    "an amount of memory",
    "like 16G, or 16000 for MB",
    before=_memory,
    schema={"type": ["string", "integer"]},
)
RESOURCE = _matching(
    r"[A-Za-z0-9._:+/@%*|!&-]+", "one word, without ',' and '='", before=_as_text
)
