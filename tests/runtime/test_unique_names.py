"""Names that must be the same on all ranks, whenever Python frees their objects."""

from __future__ import annotations

from tfcluster.runtime.keras.unique_names import OptimizerNames, UniqueNames


class Optimizer:
    name = "adam"


def test_a_name_is_given_once() -> None:
    names = UniqueNames()
    given = [names.new(name) for name in ("dense", "dense", "other", "dense")]
    assert given == ["dense", "dense (2)", "other", "dense (3)"]


def test_the_name_of_an_optimizer_that_is_gone_is_not_given_again() -> None:
    names = OptimizerNames()
    first, second = Optimizer(), Optimizer()
    assert [names.of(one) for one in (first, second, first)] == [  # type: ignore[arg-type]
        "adam",
        "adam (2)",
        "adam",
    ]
    del first
    assert names.of(Optimizer()) == "adam (3)"  # type: ignore[arg-type]
