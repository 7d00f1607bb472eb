"""``python`` as a command: a list of words that ends with the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import SMALLEST, Bad, check_bad, loaded


def test_a_command(tmp_path: Path) -> None:
    """Its paths are those of the hosts, and perhaps of a container."""
    content = SMALLEST + (
        "python: [apptainer, exec, tf.sif, ./bin/python3.12]\n"
        "hosts:\n- {host: a, python: [nice, -n5, python]}\n- {host: b, python: p/q}\n"
    )
    description = loaded(tmp_path, content).description
    assert description.python == ("apptainer", "exec", "tf.sif", "./bin/python3.12")
    pythons = [entry.python for entry in description.hosts]
    assert pythons == [("nice", "-n5", "python"), (f"{tmp_path}/p/q",)]


def test_one_word_is_no_command(tmp_path: Path) -> None:
    content = SMALLEST + "python: [venv/bin/python]\n"
    description = loaded(tmp_path, content).description
    assert description.python == (f"{tmp_path}/venv/bin/python",)


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("{a: b}", "'python' must be a path, a name, or a command as a list of words"),
        ("[]", "a command must not be an empty list"),
        ("[nice, [python]]", "a command must be a list of words: text, and not empty"),
        ("[nice, '', python]", "a command must be a list of words: text"),
        ("[false, python]", "a command must be a list of words: text"),
        ("nice -n5 python", 'a command must be a list of words (write ["nice", "-n5'),
        ("[nice -n5, python]", '\'nice -n5\' is several words (write ["nice", "-n5'),
        ("[docker, run, tf, python]", "docker starts Python below a process of its"),
        ("[/usr/bin/srun, python]", "srun starts processes itself, which tfcluster"),
        ("[conda, run, -n, tf]", "the last word must be the interpreter, not 'tf'"),
        ("[~/bin/wrap, python]", "'~' is not expanded in a command"),
    ],
)
def test_bad_commands(python: str, words: str, tmp_path: Path) -> None:
    check_bad(Bad(f"python: {python}\n{SMALLEST}", "1:9", words), tmp_path)
