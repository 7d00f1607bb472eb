"""The types of values in cluster.yaml: durations, names, port ranges, text.

Each is a type that pydantic checks, with its JSON Schema. A value that does not fit
raises ``unfit`` (the message then names key and value) or ``refused`` (the message is
complete). Knows no keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tfcluster.config.yaml11_scalars import Lossy
from tfcluster.durations import PATTERN as DURATION
from tfcluster.durations import parse_duration
from tfcluster.model import PortRange

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
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def unfit(what: str, hint: str | None = None) -> PydanticCustomError:
    return PydanticCustomError("unfit", "{what}", {"what": what, "hint": hint})


def refused(message: str, hint: str | None = None) -> PydanticCustomError:
    context = {"message": message, "hint": hint}
    return PydanticCustomError("refused", "{message}", context)


@dataclass(frozen=True, slots=True, eq=False)
class Shorthand:
    """Lets a plain value stand for a mapping with one key: ``worker: 3``."""

    key: str
    json: dict[str, Any]
    of: type = object
    """The type of the plain value. Mappings are never plain; lists are plain only if
    this is ``list``."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            self._widened, handler(source)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [self.json, handler(schema)]}

    def _widened(self, value: object) -> object:
        if self.of is list:
            return {self.key: value} if isinstance(value, list) else value
        return value if isinstance(value, dict | list) else {self.key: value}


@dataclass(frozen=True, slots=True)
class Matching:
    """Text that fully matches a pattern."""

    pattern: str
    what: str
    hint: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            self._checked, handler(source)
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"type": "string", "pattern": f"^(?:{self.pattern})$"}

    def _checked(self, text: str) -> str:
        if not re.fullmatch(self.pattern, text):
            raise unfit(self.what, self.hint)
        return text


def _duration(*, zero: bool, off: bool) -> Callable[[object], float | None]:
    def check(value: object) -> float | None:
        if off and value is False:
            # YAML reads `off` as false.
            return None
        seconds = parse_duration(value) if isinstance(value, str) else None
        if seconds is not None:
            if seconds > _MAX_DURATION_S:
                raise unfit("at most 366d")
            if seconds > 0 or zero:
                return seconds
            raise unfit("longer than 0s", "write off for none" if off else None)
        example = "10s, 5m, 1h or off" if off else "10s, 5m, 1h"
        raise unfit("a duration", _duration_hint(value, example))

    return check


def _duration_hint(value: object, example: str) -> str:
    if isinstance(value, int | str) and not isinstance(value, bool):
        spaced = re.fullmatch(r"([0-9.]+) *(ms|s|m|h|d)[a-z]*", str(value))
        if spaced:
            return f"write {spaced[1]}{spaced[2]}"
        if re.fullmatch("[0-9]+", str(value)):
            return f"write a unit: {value}s, or like {example}"
    return f"write {example}"


def _duration_json(*extra: Any) -> WithJsonSchema:
    schema = {"type": "string", "pattern": f"^{DURATION}$"}
    return WithJsonSchema({"anyOf": [schema, *extra]} if extra else schema)


Duration = Annotated[
    float, PlainValidator(_duration(zero=False, off=False)), _duration_json()
]
DurationOrZero = Annotated[
    float, PlainValidator(_duration(zero=True, off=False)), _duration_json()
]
DurationOrOff = Annotated[
    float | None,
    PlainValidator(_duration(zero=False, off=True)),
    # YAML 1.1 reads unquoted `off` as a boolean, which is what validators then see.
    _duration_json({"const": "off"}, {"const": False}),
]


def _ports(value: object) -> PortRange | None:
    if value == "auto":
        return None
    if not isinstance(value, str) or not (match := re.fullmatch(_PORT_RANGE, value)):
        raise unfit("auto or a range like 40000-41000")
    low, high = int(match[1]), int(match[2])
    if low > high:
        raise refused(f"range {value} is reversed", f"write {high}-{low}")
    if low < 1024 or high > 65535:
        why = "ports below 1024 need root" if low < 1024 else None
        raise unfit("within 1024-65535", why)
    return PortRange(low, high)


Ports = Annotated[
    PortRange | None,
    PlainValidator(_ports),
    WithJsonSchema({"type": "string", "pattern": "^(auto|[0-9]+-[0-9]+)$"}),
]


def _as_text(value: object) -> object:
    """Accept numbers as text if their text is not changed by that."""
    if isinstance(value, bool | Lossy) or not isinstance(value, int | float):
        return value
    return str(value)


Text = Annotated[
    str, BeforeValidator(_as_text), WithJsonSchema({"type": ["string", "number"]})
]


def _argument(text: str) -> str:
    if len(text.encode(errors="surrogateescape")) >= MAX_ENV_BYTES:
        raise refused(f"an argument is longer than {MAX_ENV_BYTES} bytes", "use a file")
    return text


def _as_list(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return value
    raise unfit("text or a list", "like: python train.py --epochs 3")


Command = Annotated[
    list[Annotated[Text, AfterValidator(_argument)]],
    Field(min_length=1),
    BeforeValidator(_as_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": ["string", "number"]},
                },
            ]
        }
    ),
]
"""Arguments; a command given as one string becomes a list with that string."""


def _setup(value: object) -> str | list[str]:
    if isinstance(value, str) and value:
        return _one_line(value)
    if not isinstance(value, list) or not value:
        raise unfit("a list of lines for bash, or a file", "setup: [module load cuda]")
    for item in value:
        if not isinstance(item, str) or not item or "\0" in item or "\r" in item:
            raise unfit("a list of lines for bash", 'like "module load cuda/12"')
    return value


Setup = Annotated[
    str | list[str],
    PlainValidator(_setup),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "string", "minLength": 1},
                },
            ]
        }
    ),
]


def _env_name(name: str) -> str:
    if not re.fullmatch(_ENV_NAME, name):
        hint = "letters, digits and '_', not a digit first"
        raise refused(f"{name!r} is not the name of a variable", hint)
    if name in _OURS or name.startswith("TFCLUSTER_"):
        raise refused(f"{name} is set by tfcluster", "remove it")
    if name == "CUDA_VISIBLE_DEVICES":
        message = "CUDA_VISIBLE_DEVICES is set by tfcluster"
        raise refused(message, "set the number with 'gpus' under 'tasks'")
    return name


def _env_value(text: str) -> str:
    if "\0" in text or "\n" in text or "\r" in text:
        raise refused("a variable's value must be one line, without NUL")
    if len(text.encode(errors="surrogateescape")) >= MAX_ENV_BYTES - 256:
        raise refused(f"a variable is longer than {MAX_ENV_BYTES} bytes", "use a file")
    return text


EnvName = Annotated[str, AfterValidator(_env_name)]
Env = Annotated[
    dict[EnvName, Annotated[Text, AfterValidator(_env_value)]],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "pass": {
                    "type": ["string", "number", "array"],
                    "items": {"type": "string"},
                    "description": "A list: variables that are passed on from where "
                    "tfcluster is started. Text: the value of a variable `pass`.",
                }
            },
            "additionalProperties": {"type": ["string", "number"]},
        }
    ),
]
"""Names and values. ``passed_variables`` has already replaced a list below ``pass``."""


def _one_line(text: str) -> str:
    if _CONTROL.search(text):
        raise unfit("one line, without control characters")
    return text


Line = Annotated[str, AfterValidator(_one_line), Field(min_length=1)]


def _interpreter(value: object) -> tuple[str, ...]:
    words: list[Any] = value if isinstance(value, list) else [value]
    hint = 'like ["apptainer", "exec", "tf.sif", "python"]'
    if not isinstance(value, str | list):
        raise unfit("a path, a name, or a command as a list of words", hint)
    if not words:
        raise refused("a command must not be an empty list", hint)
    if not all(isinstance(word, str) and word for word in words):
        message = "a command must be a list of words: text, and not empty"
        raise refused(message, hint)
    return tuple(_one_line(word) for word in words)


Interpreter = Annotated[
    tuple[str, ...],
    PlainValidator(_interpreter),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "string", "minLength": 1},
                },
            ]
        }
    ),
]
"""A path, a name, or a command of several words that ends with either."""


Name = Annotated[
    str,
    Matching(
        _NAME,
        "at most 64 letters, digits, '.', '_' and '-', and must not begin with . or -",
    ),
]
User = Annotated[str, Matching(_USER, "a user name")]
Word = Annotated[
    str, Matching(_WORD, "one word of letters, digits and . _ : + / @ % = -")
]
WordList = Annotated[
    str,
    Matching(f"{_WORD}(?:,{_WORD})*", "words of letters, digits and . _ : + / @ % = -"),
]


def _slurm_time(value: object) -> object:
    """A duration (``4h``) in Slurm's format; anything else as it is, as text."""
    seconds = parse_duration(value) if isinstance(value, str) else None
    if seconds is None:
        return _as_text(value)
    if seconds > _MAX_DURATION_S or seconds < 1:
        raise unfit("between 1s and 366d")
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


Time = Annotated[
    str,
    Matching(
        r"(?:[0-9]+-)?[0-9]+(?::[0-9]{1,2}){0,2}|UNLIMITED|INFINITE",
        "a duration, or a time in Slurm's format",
        'like 4h, minutes, or quoted: "HH:MM:SS", "D-HH:MM:SS"',
    ),
    BeforeValidator(_slurm_time),
    WithJsonSchema({"type": ["string", "integer"]}),
]
Memory = Annotated[
    str,
    Matching("[0-9]+[KMGT]?", "an amount of memory", "like 16G, or 16000 for MB"),
    BeforeValidator(_memory),
    WithJsonSchema({"type": ["string", "integer"]}),
]
Resource = Annotated[
    str,
    Matching(r"[A-Za-z0-9._:+/@%*|!&-]+", "one word, without ',' and '='"),
    BeforeValidator(_as_text),
]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Gpus = Annotated[int, Field(ge=0, le=1024)]
Port = Annotated[int, Field(ge=1, le=65535)]
