"""What ranks agree on before a program runs, with real connections between threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.kit.ranks import as_threads, results
from tests.runtime.partition.installed import simulated_ranks
from tfcluster.runtime.collective import Group
from tfcluster.runtime.errors import CollectiveError, CollectiveMismatchError
from tfcluster.runtime.partition.agreement import Agreement
from tfcluster.runtime.partition.variables import Watched

Act = Callable[[Agreement, int], object]


def on_two_ranks(act: Act) -> tuple[list[object], list[str]]:
    """What ``act`` returned or raised on each rank, and the warnings of both."""
    said: list[str] = []

    def run(group: Group) -> object:
        return act(Agreement(group, said.append), group.rank)

    return list(as_threads(2, run)), said


def variable(value: object) -> tuple[tf.Variable, Watched]:
    made = tf.Variable(value)
    return made, Watched("dense/kernel", made.handle, made.dtype, 0)


def test_equal_batches_are_used_as_they_are() -> None:
    batch = tf.constant([[1.0, 2.0], [3.0, 4.0]])

    def act(agreement: Agreement, rank: int) -> bool:
        return agreement.on("step", [batch])[0] is batch

    assert on_two_ranks(act) == ([True, True], [])


@pytest.mark.parametrize("rows", [3, 5])
def test_of_differing_batches_all_ranks_use_the_chiefs(rows: int) -> None:
    def act(agreement: Agreement, rank: int) -> list[list[float]]:
        own = tf.fill([3 if rank == 0 else rows, 2], float(rank))
        labels = tf.range(3 if rank == 0 else rows)
        return [each.numpy().tolist() for each in agreement.on("step", [own, labels])]

    found, said = on_two_ranks(act)
    assert found == [[[[0.0, 0.0]] * 3, [0, 1, 2]]] * 2
    assert len(said) == 2
    assert said[0].startswith("step: the ranks have different batches")


def test_strings_that_differ_become_the_chiefs() -> None:
    def act(agreement: Agreement, rank: int) -> list[object]:
        own = [b"a", b"", b"\xff\0c"] if rank == 0 else [b"ab", b"c"]
        inputs = [tf.constant([own]), tf.constant([rank]), tf.constant([b"same"])]
        inputs += [tf.zeros([0, 2]), tf.constant([2.5], tf.bfloat16)]
        return [each.numpy().tolist() for each in agreement.on("f", inputs)]

    results, warnings = on_two_ranks(act)
    assert results == [[[[b"a", b"", b"\xff\0c"]], [0], [b"same"], [], [2.5]]] * 2
    assert len(warnings) == 2


def test_different_programs_are_an_error_on_all_ranks() -> None:
    def act(agreement: Agreement, rank: int) -> object:
        return agreement.on(f"step_{rank}", [])

    found, _ = on_two_ranks(act)
    for each in found:
        assert isinstance(each, CollectiveMismatchError)
        assert "step_0" in str(each)
        assert "step_1" in str(each)


def test_different_exchanges_are_an_error_on_all_ranks() -> None:
    def act(agreement: Agreement, rank: int) -> object:
        _, watched = variable([1.0])
        words = ["kernel P(sum) float32 (3, 4)", "bias P(sum) float32 (4)"]
        agreement.on("step", [tf.ones(3)], [watched], words)
        return agreement.on("step", [tf.ones(3)], [watched], words[rank:])

    found, _ = on_two_ranks(act)
    for each in found:
        assert isinstance(each, CollectiveMismatchError)
        assert "exchanges of step: the ranks have different numbers" in str(each)


def test_exchanges_of_other_batches_may_differ() -> None:
    def act(agreement: Agreement, rank: int) -> list[float]:
        own = tf.fill([3 + rank], float(rank))
        words = [f"kernel P(sum) float32 ({3 + rank})"]
        return list(agreement.on("step", [own], [], words)[0].numpy())

    assert on_two_ranks(act)[0] == [[0.0] * 3] * 2


def test_new_variables_get_the_chiefs_values() -> None:
    def act(agreement: Agreement, rank: int) -> list[float]:
        made, watched = variable([1.0 + rank, 2.0])
        agreement.on("step", [], [watched])
        return list(made.numpy())

    assert on_two_ranks(act) == ([[1.0, 2.0]] * 2, [])


def test_a_scalar_that_gets_the_chiefs_value_stays_a_scalar() -> None:
    def act(agreement: Agreement, rank: int) -> object:
        made, watched = variable(0.5 + rank)
        agreement.on("step", [], [watched])
        return float(made.numpy())

    assert on_two_ranks(act) == ([0.5, 0.5], [])


def changed_by(change: float) -> tuple[list[object], list[str]]:
    """Variables that rank 1 changes after the first call."""

    def act(agreement: Agreement, rank: int) -> list[float]:
        made, watched = variable([1.0, -2.0])
        agreement.on("step", [], [watched])
        made.assign_add([change if rank else 0.0, 0.0])
        agreement.on("step", [], [watched])
        return list(made.numpy())

    return on_two_ranks(act)


def test_last_bits_are_taken_from_the_chief() -> None:
    found, said = changed_by(1e-6)
    assert found == [[1.0, -2.0]] * 2
    assert len(said) == 2
    assert "last bits" in said[0]


@pytest.mark.parametrize("change", [0.5, float("nan")])
def test_a_larger_difference_is_an_error_that_names_the_variable(
    change: float,
) -> None:
    found, said = changed_by(change)
    for each in found:
        assert isinstance(each, CollectiveError)
        assert "dense/kernel differs between rank 0 and rank 1" in str(each)
    assert said == []


def test_counters_that_differ_are_an_error() -> None:
    def act(agreement: Agreement, rank: int) -> None:
        made, watched = variable(np.array([1_000_000_007], np.int64))
        agreement.on("step", [], [watched])
        made.assign_add([rank])
        agreement.on("step", [], [watched])

    found, _ = on_two_ranks(act)
    assert all(isinstance(each, CollectiveError) for each in found)


def test_variables_are_compared_now_and_then() -> None:
    def act(agreement: Agreement, rank: int) -> int:
        made, watched = variable([1.0])
        for call in range(1, 40):
            agreement.on("step", [], [watched])
            if call == 4:
                made.assign_add([0.5 * rank])
        return 0

    found, _ = on_two_ranks(act)
    for each in found:
        assert isinstance(each, CollectiveError)
        assert "in call 8" in str(each)


def test_ranks_go_on_after_a_mismatch() -> None:
    def act(agreement: Agreement, rank: int) -> int:
        with pytest.raises(CollectiveMismatchError):
            agreement.on(f"step_{rank}", [])
        return len(agreement.on("step", [tf.constant(1.0)]))

    assert results(on_two_ranks(act)[0]) == [1, 1]


def test_ranks_need_not_have_traced_equally_many_functions() -> None:
    weights = tf.Variable(np.linspace(-1.0, 1.0, 3))

    def labels() -> list[str]:
        product = tf.function(lambda x: tf.linalg.matvec(x, weights) ** 2)
        with simulated_ranks(2) as hook:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(product(tf.ones((6, 3), tf.float64)))
            tape.gradient(loss, weights)
        return [program.label for program in hook.programs]

    assert labels() == labels() == ["__forward_<lambda>", "__backward_<lambda>"]
