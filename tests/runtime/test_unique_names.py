"""Names that must be the same on all ranks, whenever Python frees their objects."""

from __future__ import annotations

from tfcluster.runtime.keras.training_session import OptimizerNames


class Optimizer:
    name = "adam"


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
