"""What ``verify`` prints."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from tfcluster.documents.json_schema import FormatVersion

QuantityKind = Literal[
    "learning_rate",
    "weight",
    "state",
    "slot",
    "logs",
    "run",
    "course",
    "file",
    "printed",
]


class ComparedKind(TypedDict):
    """The values of one kind."""

    values: Annotated[int, "How many."]
    largest: Annotated[
        float | None, "The largest relative difference; null if it is not finite."
    ]
    of_noise: Annotated[
        float | None, "The largest difference, divided by the noise of its value."
    ]


class FirstDifference(TypedDict):
    """The first value that differs."""

    step: Annotated[
        int,
        "The number of steps before it; 0: before the first step ended; -1: at the "
        "end.",
    ]
    kind: QuantityKind
    name: Annotated[str, "What differs."]
    alone: Annotated[float | None, "The value alone, of the element that differs most."]
    ranks: Annotated[float | None, "The value on the ranks."]
    relative: Annotated[
        float | None, "The difference, relative to the largest value of the array."
    ]
    of_noise: Annotated[
        float | None,
        "The difference, divided by the noise of one process; null if it has none.",
    ]
    factor: Annotated[
        float | None,
        "The change on the ranks divided by the change alone, if equal everywhere.",
    ]
    text: Annotated[str, "All of this in words."]


class FailedTrial(TypedDict):
    """Why a run that was to be compared failed."""

    reason: Annotated[str, "One sentence."]
    tail: Annotated[list[str], "The last lines of the task's output."]
    refused: Annotated[
        bool, "tfcluster ended it because its result would have differed."
    ]
    task: Annotated[str, "The task that failed first; empty if unknown."]
    hint: Annotated[str, "What to do next; may be empty."]


class Verification(TypedDict):
    """Whether ranks compute what one process computes: tfcluster verify --json"""

    schema: FormatVersion
    equal: bool
    ranks: Annotated[int, "How many ranks were compared."]
    strategy: Annotated[str, "As runtime.strategy."]
    of_noise: Annotated[
        float | None,
        "The largest difference, divided by the noise of its value; above 1 it is a "
        "difference. null if nothing was compared, or if it is not finite.",
    ]
    tolerance: Annotated[
        float | None,
        "The least noise: no smaller relative difference counts; null if a run failed.",
    ]
    tolerance_reason: str | None
    compared_with: Annotated[str, "one process, or what took its place."]
    by_chance: Annotated[
        str | None, "Why another run may differ, although this one is equal."
    ]
    not_compared: Annotated[list[str], "What could not be compared."]
    steps: Annotated[int, "How many steps were compared."]
    to_the_end: Annotated[bool, "The program ran to its end."]
    largest_difference: Annotated[
        float | None,
        "Relative; null if nothing was compared, or if it is not finite.",
    ]
    compared: Annotated[dict[str, ComparedKind], "The compared values by their kind."]
    first_difference: FirstDifference | None
    causes: Annotated[list[str], "Likely causes of the difference."]
    failed_alone: FailedTrial | None
    failed_on_ranks: FailedTrial | None
