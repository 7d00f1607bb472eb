"""``setup``: lines, or a file with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.files import SMALLEST, Bad, check_bad, loaded
from tfcluster.plan.model import Setup


def test_lines(tmp_path: Path) -> None:
    """Variables are those of the hosts; an item may be a block."""
    content = SMALLEST + "setup:\n- module load $A ${B\n- |\n  if true\n  then x; fi\n"
    setup = loaded(tmp_path, content).description.setup
    assert setup == Setup(lines=("module load $A ${B", "if true", "then x; fi"))
    assert setup.failed(2, "failed") == "setup line 2, `if true`, failed"
    assert setup.failed(None, "failed") == "setup: the lines failed"


def test_a_file_is_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_bytes(b"# modules\r\nmodule load a\n")
    setup = loaded(tmp_path, SMALLEST + "setup: env.sh\n").description.setup
    assert setup == Setup(lines=("# modules", "module load a"), file="env.sh")
    assert setup.failed(2, "failed") == "env.sh:2, `module load a`, failed"


@pytest.mark.parametrize(
    ("setup", "column", "words"),
    [
        ("[]", 8, "'setup' must be a list of lines for bash, or a file"),
        ("[1]", 8, "'setup' must be a list of lines for bash"),
        ("{a: b}", 8, "'setup' must be a list of lines for bash, or a file"),
    ],
)
def test_bad_lines(setup: str, column: int, words: str, tmp_path: Path) -> None:
    check_bad(Bad(f"setup: {setup}\n{SMALLEST}", f"1:{column}", words), tmp_path)


def test_bad_files(tmp_path: Path) -> None:
    content = f"setup: env.sh\n{SMALLEST}"
    missing = f"'{tmp_path}/env.sh' does not exist"
    check_bad(Bad(content, "1:8", missing), tmp_path)
    (tmp_path / "env.sh").write_text("true\n")
    (tmp_path / "env.sh").chmod(0o666)
    check_bad(Bad(content, "1:8", f"{tmp_path}/env.sh: writable by others"), tmp_path)
