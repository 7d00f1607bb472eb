"""``make compat``: the runtime's tests with several versions of TensorFlow and Keras.

Each pair of versions has its own environment below ``.compat``, which is reused by the
next run. Finally prints the table of docs/compatibility.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".compat"
TOOLS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "scikit-learn")


@dataclass(frozen=True)
class Pair:
    """Versions of TensorFlow and Keras that are installed together."""

    tensorflow: str
    keras: str
    others: tuple[str, ...] = ()
    """Further requirements, which the libraries fail to declare."""

    @property
    def name(self) -> str:
        return f"TensorFlow {self.tensorflow}, Keras {self.keras}"

    @property
    def folder(self) -> Path:
        return FOLDER / f"tensorflow-{self.tensorflow}-keras-{self.keras}"


PAIRS = (
    Pair("2.16.2", "3.7.0"),
    Pair("2.18.1", "3.8.0"),
    Pair("2.19.1", "3.10.0"),
    # write_graph of TensorFlow 2.20 passes float_format, which protobuf 7 removed.
    Pair("2.20.0", "3.12.0", ("protobuf<7",)),
    Pair("2.21.0", "3.15.1"),
)
"""The oldest and the newest supported versions, and some in between."""


@dataclass(frozen=True)
class Subject:
    """A tested feature; its tests are given by file and prefixes of their names."""

    name: str
    file: str
    beginnings: tuple[str, ...] = ("test_",)
    slow: bool = False
    """Whether its slow tests run, too."""

    @property
    def selection(self) -> str:
        """What pytest's ``-k`` gets to select these tests, by names and marks."""
        tests = f"{self.file} and ({' or '.join(self.beginnings)})"
        return f"({tests})" if self.slow else f"({tests} and not slow)"

    def has(self, file: str, test: str) -> bool:
        return file == self.file and test.startswith(self.beginnings)


SUBJECTS = (
    Subject("contract", "test_keras_contract"),
    Subject("partition", "test_partition", ("test_of_partition",)),
    Subject("threads", "test_partition_ranks"),
    Subject("fit", "test_keras_models", ("test_ranks_train",)),
    Subject("tape loops", "test_keras_loops"),
    Subject("callbacks, checkpoints", "test_keras_callbacks"),
    Subject("async ps", "test_parameter_server", ("test_alone",)),
    Subject("sync ps", "test_parameter_server", ("test_in_step",)),
    Subject("replicated", "test_parameter_server", ("test_replicated",), slow=True),
    Subject("local SGD", "test_local_sgd", ("test_averaged", "test_loops"), slow=True),
    Subject(
        "data tasks", "test_data_tasks", ("test_one_reader", "test_loops"), slow=True
    ),
    Subject("TensorFlow 1", "test_tf1_scripts"),
)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.compat", description=__doc__)
    parser.add_argument("--only", metavar="TENSORFLOW", help="only the pair with this")
    given = parser.parse_args(words)
    rows = {}
    for pair in PAIRS:
        if given.only in (None, pair.tensorflow):
            problem = install(pair)
            rows[pair] = {} if problem else run(pair)
            if problem:
                sys.stdout.write(f"{pair.name} cannot be installed: {problem}\n")
    sys.stdout.write(table(rows))
    return 0 if rows and all(map(_all_passed, rows.values())) else 1


def install(pair: Pair) -> str | None:
    """Make the pair's environment if it is missing. Returns a problem, if any."""
    ready = pair.folder / ".ready"
    if ready.exists():
        return None
    sys.stdout.write(f"installing {pair.name}\n")
    sys.stdout.flush()
    venv.create(pair.folder, with_pip=True, clear=True)
    pip = [_python(pair), "-m", "pip", "install", "--quiet"]
    pins = (f"tensorflow=={pair.tensorflow}", f"keras=={pair.keras}")
    done = subprocess.run(
        [*pip, *pins, *pair.others, *TOOLS, "-e", str(ROOT)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        errors = [x for x in done.stderr.splitlines() if x.startswith("ERROR")]
        return errors[-1] if errors else f"pip ended with {done.returncode}"
    ready.touch()
    return None


def run(pair: Pair) -> dict[str, list[str]]:
    """Run the tests; returns outcomes by subject ("" or a failure's first line)."""
    report = pair.folder / "report.xml"
    report.unlink(missing_ok=True)
    files = sorted({f"tests/runtime/{subject.file}.py" for subject in SUBJECTS})
    marks = "not (testbed or chaos or exhaustive)"
    options = ("-q", "--numprocesses", "2", "--dist", "loadfile", "-m", marks)
    subprocess.run(
        [
            *(_python(pair), "-m", "pytest", *options, f"--junitxml={report}"),
            *(*files, "-k", " or ".join(subject.selection for subject in SUBJECTS)),
        ],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{pair.folder / 'bin'}:{os.environ['PATH']}"},
        check=False,
    )
    if not report.exists():
        return {}
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return outcomes(_read(case) for case in cases)


def outcomes(cases: Iterable[tuple[str, str, str | None]]) -> dict[str, list[str]]:
    """Group (file, test, outcome) by subject, without skipped tests (outcome None)."""
    found: dict[str, list[str]] = {subject.name: [] for subject in SUBJECTS}
    for file, test, outcome in cases:
        for subject in SUBJECTS:
            if outcome is not None and subject.has(file, test):
                found[subject.name].append(outcome)
    return found


def table(rows: Mapping[Pair, Mapping[str, Sequence[str]]]) -> str:
    """A Markdown table of how many tests of each subject passed."""
    head = ["TensorFlow", "Keras", *(subject.name for subject in SUBJECTS)]
    lines = [head, ["---"] * len(head)]
    for pair, found in rows.items():
        cells = [cell(found.get(subject.name, ())) for subject in SUBJECTS]
        lines.append([pair.tensorflow, pair.keras, *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(outcomes: Sequence[str]) -> str:
    passed = outcomes.count("")
    if not outcomes:
        return "not run"
    return "passed" if passed == len(outcomes) else f"{passed} of {len(outcomes)}"


def _read(case: ElementTree.Element) -> tuple[str, str, str | None]:
    file = case.get("classname", "").rpartition(".")[2]
    if case.find("skipped") is not None:
        return file, case.get("name", ""), None
    failures = [*case.findall("failure"), *case.findall("error")]
    text = failures[0].get("message", "failed") if failures else ""
    return file, case.get("name", ""), text


def _all_passed(found: Mapping[str, Sequence[str]]) -> bool:
    return bool(found) and all(cell(each) == "passed" for each in found.values())


def _python(pair: Pair) -> str:
    return str(pair.folder / "bin" / "python")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
