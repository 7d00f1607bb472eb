"""Tests of the comparison of two recordings, on recordings made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfcluster.plan.model import Runtime, Strategy
from tfcluster.verify.compare import Comparison, compare, noise_of
from tfcluster.verify.noise import (
    MARGIN,
    Noise,
    deterministic_variables,
    is_nondeterministic,
    tolerance,
)
from tfcluster.verify.outputs import Outputs, compare_outputs
from tfcluster.verify.recorded import Recorded, read
from tfcluster.verify.verdict import causes, failure, of_method, own_difference

TOLERANCE = 1e-5
Steps = Sequence[Mapping[str, Any]]


def recording(folder: Path, events: Steps) -> Path:
    """Write a recording; an event with ``weights`` is a step."""
    folder.mkdir()
    lines = []
    for number, event in enumerate(events):
        if "weights" not in event:
            lines.append(event)
            continue
        arrays = [np.float32(event.get("rate", 0.1)), *event["weights"]]
        np.savez(folder / f"{number}.npz", *map(np.asarray, arrays))
        names = [["weight", f"kernel_{index}"] for index in range(len(arrays) - 1)]
        names.insert(0, ["learning_rate", "learning_rate"])
        file = f"{number}.npz"
        step = {"kind": "step", "optimizer": 0, "file": file, "names": names}
        lines.append(step)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "events.jsonl").write_text(text)
    return folder


def compared(folder: Path, alone: Steps, ranks: Steps) -> Comparison:
    mine = read(recording(folder / "alone", alone))
    theirs = read(recording(folder / "ranks", ranks))
    return compare(mine, theirs, Noise(TOLERANCE))


def weights(*values: float) -> dict[str, Any]:
    return {"weights": [np.array(values, np.float32)]}


def two(first: float, second: float) -> dict[str, Any]:
    return {"weights": [np.array([first], "f"), np.array([second], "f")]}


def batch(**logs: float) -> dict[str, Any]:
    return {"kind": "batch", "model": 0, "logs": logs}


def test_equal_within_rounding(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        [weights(1, 2), batch(loss=0.5), weights(3, 4)],
        [weights(1, 2.000001), batch(loss=0.5000001), weights(3, 4)],
    )
    assert found.first is None
    assert found.steps == 2
    assert 1e-7 < found.largest < TOLERANCE


def test_a_value_may_differ_by_the_noise_of_one_process(tmp_path: Path) -> None:
    """Each value by its own noise, which grows with the steps."""
    one = read(recording(tmp_path / "one", [two(1, 1), two(2, 2), two(3, 3)]))
    again = read(recording(tmp_path / "again", [two(1, 1), two(2, 2.1), two(3, 3)]))
    noise = noise_of(one, again, TOLERANCE)
    assert noise.of((0, 2), 1) == noise.of((0, 1), 3) == TOLERANCE
    assert noise.of((0, 2), 2) == noise.of((0, 2), 9) == pytest.approx(MARGIN * 0.05)

    def found(name: str, *steps: Mapping[str, Any]) -> Comparison:
        return compare(one, read(recording(tmp_path / name, steps)), noise)

    equal = found("equal", two(1, 1), two(2, 2.7), two(3, 2))
    assert (equal.first, equal.of_noise < 1) == (None, True)
    assert equal.of_noise > 0.8
    first = found("early", two(1, 1.1), two(2, 2), two(3, 3)).first
    assert first is not None
    assert (first.name, first.step) == ("kernel_1", 1)
    first = found("other", two(1, 1), two(2, 2), two(3.1, 3)).first
    assert first is not None
    assert first.name == "kernel_0"
    assert first.of_noise == pytest.approx(0.1 / 3 / 1e-5, rel=1e-3)
    late = found("late", two(1, 1), two(2, 2), two(3, 6)).first
    assert late is not None
    assert 2 < (late.of_noise or 0) < 3


def test_metrics_may_move_when_others_do(tmp_path: Path) -> None:
    one = read(recording(tmp_path / "one", [batch(loss=1.0, accuracy=0.5)]))
    again = read(recording(tmp_path / "again", [batch(loss=1.01, accuracy=0.5)]))
    other = read(recording(tmp_path / "other", [batch(loss=1.0, accuracy=0.53)]))
    assert compare(one, other, Noise(TOLERANCE)).first is not None
    assert compare(one, other, noise_of(one, again, TOLERANCE)).first is None


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        [weights(1, 2), weights(1, 3), weights(1, 4)],
        [weights(1, 2), weights(1, 3.5), weights(9, 9)],
    ).first
    assert found is not None
    assert found.words() == ("weight kernel_0 after step 2: 3 alone, 3.5 on the ranks")


def test_the_learning_rate_comes_first(tmp_path: Path) -> None:
    found = compared(
        tmp_path, [{**weights(1), "rate": 0.1}], [{**weights(2), "rate": 0.2}]
    ).first
    assert found is not None
    assert found.words() == "learning rate after step 1: 0.1 alone, 0.2 on the ranks"


def test_a_metric_differs(tmp_path: Path) -> None:
    first = compared(
        tmp_path, [weights(1), batch(peak=2.0)], [weights(1), batch(peak=1.0)]
    ).first
    assert first is not None
    assert first.words() == (
        "'peak' in the logs of a batch after step 1: 2 alone, 1 on the ranks"
    )


@pytest.mark.parametrize("ranks", [[], [weights(1)], [weights(1), batch(loss=1.0)]])
def test_another_course(tmp_path: Path, ranks: Steps) -> None:
    first = compared(tmp_path, [weights(1), weights(2)], ranks).first
    assert first is not None
    assert first.kind == "course"
    assert "alone optimizer 0 made a step, but on the ranks" in first.words()


def test_not_a_number_is_equal_to_itself_only(tmp_path: Path) -> None:
    nan = float("nan")
    assert compared(tmp_path, [weights(nan, 1)], [weights(nan, 1)]).first is None
    (tmp_path / "b").mkdir()
    first = compared(tmp_path / "b", [weights(1, 1)], [weights(nan, 1)]).first
    assert first is not None
    assert first.relative == float("inf")


def test_half_a_line_at_the_end_is_ignored(tmp_path: Path) -> None:
    folder = recording(tmp_path / "cut", [weights(1)])
    with (folder / "events.jsonl").open("a") as out:
        out.write('{"kind": "ste')
    assert read(folder).steps == 1
    assert read(tmp_path / "none").events == ()


def explained(folder: Path, alone: Steps, ranks: Steps, **runtime: Any) -> list[str]:
    found = compared(folder, alone, ranks).first
    assert found is not None
    mine = read(folder / "alone")
    return causes(found, mine, size=2, runtime=Runtime(**runtime), warnings=[])


def test_a_sum_is_recognised_by_its_factor(tmp_path: Path) -> None:
    said = explained(
        tmp_path, [weights(1, 1), weights(2, 3)], [weights(1, 1), weights(3, 5)]
    )
    assert said == [
        "the update of the weights is 2 times that of one process, the number of "
        "ranks: the program adds gradients up, without a mean"
    ]


def test_lines_that_clip_are_named(tmp_path: Path) -> None:
    clip = {"kind": "clip", "line": "train.py:41"}
    said = explained(tmp_path, [clip, weights(1, 1)], [clip, weights(1, 2)])
    assert said == [
        "gradients may have been clipped before the optimizer saw them: train.py:41"
    ]


def test_layers_and_methods_are_named(tmp_path: Path) -> None:
    layers = {"kind": "layers", "layers": ["Dropout", "RandomFlip", "Dense"]}
    said = explained(tmp_path, [layers, weights(1)], [weights(2)])
    assert [text.partition(":")[0] for text in said] == [
        "Dropout, RandomFlip draw random numbers"
    ]
    (tmp_path / "b").mkdir()
    said = explained(
        tmp_path / "b", [weights(1)], [weights(2)], strategy=Strategy.LOCAL_SGD
    )
    assert [text.partition(":")[0] for text in said] == ["local_sgd"]


def test_a_factor_of_its_own_may_come_from_a_clip(tmp_path: Path) -> None:
    """Clipping by the global norm scales all gradients by one factor."""
    clip = {"kind": "clip", "line": "train.py:41"}
    steps = [clip, weights(0, 0), weights(1, 2)]
    said = explained(tmp_path, steps, [clip, weights(0, 0), weights(0.7, 1.4)])
    assert said == [
        "the update of the weights is 0.7 times that of one process",
        "gradients may have been clipped before the optimizer saw them: train.py:41",
    ]


def run(**logs: float) -> dict[str, Any]:
    return {"kind": "run", "model": 0, "logs": logs}


def test_what_sessions_return_is_compared_after_all_steps(tmp_path: Path) -> None:
    """Updates of a graph may be recorded before or after a session returns."""
    alone = [weights(1), run(loss=0.5), weights(2), run(loss=0.4)]
    other = [weights(1), weights(2), run(loss=0.5), run(loss=0.3)]
    found = compared(tmp_path, alone, other)
    assert found.steps == 2
    assert found.first is not None
    assert found.first.words() == (
        "'loss' fetched from a session after step 2: 0.4 alone, 0.3 on the ranks"
    )
    (tmp_path / "b").mkdir()
    found = compared(tmp_path / "b", alone, [*other[:3], weights(9)])
    assert found.first is not None
    assert found.first.kind == "course"


def test_how_graphs_combine_gradients(tmp_path: Path) -> None:
    runtime = Runtime(strategy=Strategy.PARAMETER_SERVER)
    said = {}
    for method in ("independent", "sync_replicas", "mean"):
        note = {"kind": "tf1", "method": method}
        found = read(recording(tmp_path / method, [note, weights(1)]))
        said[method] = of_method(runtime, found, size=2)
        assert of_method(runtime, found, size=1) is None
    assert "as it arrives" in (said["independent"] or "")
    assert said["sync_replicas"] is said["mean"] is None


# --- devices --------------------------------------------------------------------------


def test_the_tolerance_depends_on_the_devices(tmp_path: Path) -> None:
    def run(unit: float = 2.0**-24, **devices: Any) -> Recorded:
        return Recorded(events=(), unit=unit, **devices)

    cpu, gpu, tf32 = run(), run(gpus=1), run(gpus=2, tf32=True)
    # TensorFlow says so on machines without a GPU, too.
    assert tolerance(None, run(tf32=True), cpu).value == TOLERANCE
    assert tolerance(None, gpu, cpu).value == tolerance(None, cpu, gpu).value == 1e-4
    assert tolerance(None, gpu, tf32).value == 2 * 2.0**-11
    assert tolerance(None, run(unit=2.0**-8), cpu).value == 2 * 2.0**-8
    assert tolerance(1e-7, tf32, tf32).value == 1e-7
    notes = [{"kind": "devices", "gpus": 2, "tf32": True}]
    notes += [{"kind": "rounding", "unit": unit} for unit in (2.0**-24, 2.0**-11)]
    found = read(recording(tmp_path / "a", [*notes, weights(1)]))
    assert (found.gpus, found.tf32, found.unit) == (tf32.gpus, tf32.tf32, 2.0**-11)


def test_operations_are_deterministic_on_gpus() -> None:
    assert deterministic_variables(["0"], {}) == {"TF_DETERMINISTIC_OPS": "1"}
    assert deterministic_variables([], {}) == {}
    assert deterministic_variables(["0"], {"TF_DETERMINISTIC_OPS": "0"}) == {}
    assert is_nondeterministic(
        "UnimplementedError: a deterministic GPU implementation is not available", ()
    )
    assert not is_nondeterministic("ValueError: no", ("Traceback",))


def test_a_program_that_differs_from_itself(tmp_path: Path) -> None:
    found = compared(tmp_path, [weights(1)], [weights(2)]).first
    assert found is not None
    said = own_difference(found, found)
    assert said is not None
    assert said.startswith("the program is not deterministic")
    assert own_difference(None, found) is None
    assert "(weight kernel_0 after step 1)" in said
    printed = replace(found, kind="printed", step=-1)
    assert own_difference(printed, found) is None
    assert own_difference(found, printed) == said


def test_the_whole_reason_is_found_in_the_log() -> None:
    tail = ("Traceback", "a.CollectiveError: the loss is a sum over rows")
    refused = failure("a.CollectiveError: the loss is", tail)
    assert (refused.reason, refused.refused) == ("the loss is a sum over rows", True)
    assert not failure("ValueError: no", tail).refused
    copied = failure("E: /tmp/x/a.py", ('File "/tmp/x/a.py"',), folder="/tmp/x")
    assert (copied.reason, copied.tail) == ("E: a.py", ('File "a.py"',))


# --- files and text -------------------------------------------------------------------


RUNS = ("alone", "ranks", "again")


def outputs(
    folder: Path,
    alone: Mapping[str, Any],
    ranks: Mapping[str, Any],
    again: Mapping[str, Any] | None = None,
) -> str:
    for name, files in zip(RUNS, (alone, ranks, again or {}), strict=True):
        (folder / name).mkdir()
        for file, content in files.items():
            if file == "log":
                (folder / f"{name}.log").write_text(content)
            elif isinstance(content, str):
                (folder / name / file).write_text(content)
            else:
                np.savez(folder / name / file, content)
    runs = [Outputs(folder / name, folder / f"{name}.log") for name in RUNS]
    third = runs[2] if again is not None else None
    found = compare_outputs(runs[0], runs[1], third, {}, TOLERANCE)
    return "" if found is None else found.words()


def test_equal_outputs(tmp_path: Path) -> None:
    assert not outputs(
        tmp_path,
        {
            "a.npz": np.ones(3),
            "history.csv": "epoch,loss\n0,0.12345\n",
            "events.out.tfevents.1712345678": "x",
            "log": "10/10 - 3s - 21ms/step - loss: 0.1234\ndone in 4.2 seconds\n"
            "[1.25   0.5   ]\n",
        },
        {
            "a.npz": np.ones(3) + 1e-7,
            "history.csv": "epoch,loss\n0,0.12346\n",
            "events.out.tfevents.1799999999": "y",
            "log": "10/10 - 4s - 37ms/step - loss: 0.1235\ndone in 3.9 seconds\n"
            "[1.25   0.5001]\n",
        },
    )


def test_outputs_may_differ_by_the_noise(tmp_path: Path) -> None:
    def run(value: float) -> dict[str, Any]:
        return {"a.npz": np.ones(3) * value, "a.csv": f"x,{value}\n", "log": f"{value}"}

    assert not outputs(tmp_path, run(1.0), run(1.1), run(1.05))
    (tmp_path / "b").mkdir()
    assert outputs(tmp_path / "b", run(1.0), run(1.9), run(1.05))


@pytest.mark.parametrize(
    ("alone", "ranks", "words"),
    [
        ({"a.txt": "1"}, {}, "the program wrote a.txt only alone"),
        ({}, {"b.txt": "1"}, "the program wrote b.txt only on the ranks"),
        ({"a.npz": np.ones(2)}, {"a.npz": np.zeros(2)}, "a.npz: array arr_0: 1 alone"),
        ({"a.csv": "0.5"}, {"a.csv": "0.7"}, "a.csv: line 1: '0.5' alone, '0.7' on"),
        ({"a.csv": "3"}, {"a.csv": "4"}, "a.csv: line 1"),
    ],
)
def test_a_file_differs(tmp_path: Path, alone: Any, ranks: Any, words: str) -> None:
    assert outputs(tmp_path, alone, ranks).startswith(words)


def test_messages_of_libraries_are_not_the_programs(tmp_path: Path) -> None:
    said = (
        "WARNING:tensorflow:From a.py:3: x is old\nInstructions for updating:\nuse y\n"
    )
    warned = "a.py:3: UserWarning: beware\n  f(x)\nsaved in {}/model\n"
    alone, ranks = warned.format(tmp_path / "alone"), warned.format(tmp_path / "ranks")
    assert not outputs(
        tmp_path,
        {"log": alone, "a.txt": f"{tmp_path / 'alone'}/x"},
        {"log": said + ranks, "a.txt": f"{tmp_path / 'ranks'}/x"},
    )


def test_printed_text_differs(tmp_path: Path) -> None:
    words = outputs(
        tmp_path,
        {"log": "2026-11-23 10:00:00.1: I cpu\nloss 0.5\n"},
        {"log": "loss 0.9\n"},
    )
    assert (
        words == "the chief printed line 1: 'loss 0.5' alone, 'loss 0.9' on the ranks"
    )
