"""What ``explain`` prints."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from tfcluster.documents.json_schema import FormatVersion


class ExchangedTensor(TypedDict):
    """A tensor that the ranks exchange."""

    kind: Annotated[
        Literal["rows", "sum", "max", "min"],
        "rows: each rank has its rows; else what the ranks' terms are reduced by.",
    ]
    name: Annotated[str, "The name of the node that computes the tensor."]
    bytes: Annotated[
        int,
        "Of the whole tensor, per call of the function; 0 if its size is not known.",
    ]
    wanted_by: Annotated[str, "The type of an op that needs it whole, or result."]
    line: Annotated[
        str | None,
        "FILE:LINE:FUNCTION in the script: what needs the rows, or has computed the "
        "terms.",
    ]


class WholeOps(TypedDict):
    """Ops of a line that every rank computes whole."""

    op: Annotated[str, "The type of the ops."]
    count: Annotated[int, "How many there are in this line."]
    cost: Annotated[int, "Their own work."]
    following_cost: Annotated[
        int, "The work of ops that are whole only because they follow these."
    ]
    reason: str
    line: Annotated[str | None, "FILE:LINE:FUNCTION in the script."]


class ExplainedFunction(TypedDict):
    """A function of a program."""

    name: str
    trains: Annotated[bool, "Whether it computes gradients."]
    rows: Annotated[
        int | None, "The rows of the batch; null if there is nothing to divide."
    ]
    cost: Annotated[int, "All work: multiply-adds of products, else numbers."]
    divided_share: Annotated[
        float, "The part of the work that the ranks divide, 0 to 1."
    ]
    exchanges: Annotated[int, "Per call of the function."]
    exchanged_bytes: Annotated[int, "Per call of the function."]
    exchanged: Annotated[list[ExchangedTensor], "The largest first."]
    whole: Annotated[
        list[WholeOps],
        "Ops that every rank computes whole though their inputs have rows, the most "
        "costly first.",
    ]
    error: Annotated[str | None, "Why the function could not be divided at all."]


class Explanation(TypedDict):
    """How a program would be divided among ranks: tfcluster explain --json"""

    schema: FormatVersion
    ranks: Annotated[int, "How many ranks were asked for."]
    mostly_whole: Annotated[
        str | None, "A sentence if most of the work is not divided."
    ]
    functions: Annotated[list[ExplainedFunction], "The most costly first."]
