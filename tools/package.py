"""Builds the packages, checks them, and trains with the installed wheel.

Run ``python -m tools.package`` in the repository's folder. The wheel and its
dependencies are installed into a fresh environment, through pip's cache. TensorFlow,
Keras and scikit-learn (2.4 GB) come from the running environment: a .pth file in the
fresh one adds their folder after its own packages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

_DIST = Path("dist")
_IN_SDIST = (
    "Makefile",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "hatch_build.py",
    "mkdocs.yml",
    "pyproject.toml",
    "configs/digits.yaml",
    "docs/configuration.md",
    "examples/digits.py",
    "tests/conftest.py",
    "tools/package.py",
    "benchmarks/__main__.py",
)
_IN_WHEEL = (
    "tfcluster/py.typed",
    "share/man/man1/tfcluster.1",
    "share/bash-completion/completions/tfcluster",
    "share/zsh/site-functions/_tfcluster",
    "share/fish/vendor_completions.d/tfcluster.fish",
)
_RESULT = re.compile(r"validation loss ([\d.]+), accuracy ([\d.]+)")


def main() -> None:
    shutil.rmtree(_DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", str(_DIST))
    (wheel,), (sdist,) = _DIST.glob("*.whl"), _DIST.glob("*.tar.gz")
    _run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
    _check_wheel(wheel)
    with tempfile.TemporaryDirectory() as folder:
        sources = _unpacked(sdist, Path(folder))
        # -m puts the current folder first on the path, so its sources are tested.
        _run(
            sys.executable,
            "-m",
            "pytest",
            "-qx",
            "tests/config/test_reference.py",
            cwd=sources,
        )
        python = _fresh_environment(wheel, Path(folder) / "fresh")
        _train(python, sources / "examples" / "digits.py", Path(folder) / "empty")
    print(f"{wheel.name} and {sdist.name}: no problems found")


def _check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = [re.sub(r"^[^/]+\.data/data/", "", name) for name in opened.namelist()]
        (metadata,) = (n for n in opened.namelist() if n.endswith("/METADATA"))
        described = opened.read(metadata).decode()
    if missing := set(_IN_WHEEL) - set(names):
        raise SystemExit(f"{wheel.name} lacks {sorted(missing)}")
    relative = re.findall(r"\]\((?!https?://|#)[^)]*\)", described)
    if relative:
        raise SystemExit(f"links of the README that work only here: {relative}")


def _unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as opened:
        opened.extractall(folder, filter="data")
    sources = folder / sdist.name.removesuffix(".tar.gz")
    if missing := [name for name in _IN_SDIST if not (sources / name).exists()]:
        raise SystemExit(f"{sdist.name} lacks {missing}")
    return sources


def _fresh_environment(wheel: Path, folder: Path) -> Path:
    _run(sys.executable, "-m", "venv", str(folder))
    python = folder / "bin" / "python"
    _run(str(python), "-m", "pip", "install", "--quiet", str(wheel.absolute()))
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(_said(str(python), "-c", ask).strip())
    (packages / "tensorflow_of.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # -I leaves out the current folder, which has the sources.
    where = _said(
        str(python), "-I", "-c", "import tfcluster; print(tfcluster.__file__)"
    )
    if not where.startswith(str(folder)):
        raise SystemExit(f"the fresh environment imports {where}")
    return python


def _train(python: Path, script: Path, folder: Path) -> None:
    """Train in a folder with only the script, and check that all ranks agree."""
    folder.mkdir()
    shutil.copy(script, folder)
    command = python.parent / "tfcluster"
    words = ("launch", "-n", "3", "--", "python", script.name, "--epochs", "3")
    said = _said(str(command), *words, cwd=folder)
    print(said)
    results = _RESULT.findall(said)
    if len(results) != 3 or len(set(results)) != 1:
        raise SystemExit(f"not three equal results: {results}")


def _run(*words: str, cwd: Path | None = None) -> None:
    print("$", *words, flush=True)
    subprocess.run(words, check=True, cwd=cwd)


def _said(*words: str, cwd: Path | None = None) -> str:
    print("$", *words, flush=True)
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{words[0]} ended with {done.returncode}: {done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main()
