"""``keras.utils.get_file`` downloads once per host; the host's other ranks wait.

The ranks of a host share a small file, which is also their lock. It records which calls
have been answered and with what result. So an archive is not unpacked again while
another rank reads the extracted files.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import hmac
import inspect
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tfcluster.runtime.context import Context
from tfcluster.runtime.files import private_files
from tfcluster.runtime.keras import internals, patches

_SHARED_LOCK = ".tfcluster.lock"


class Downloads:
    """The hook on ``get_file``."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls: Counter[str] = Counter()
        name = hmac.digest(
            context.token, f"downloads {context.attempt}".encode(), "sha256"
        )
        folder = Path(tempfile.gettempdir())
        self._answers = folder / f"tfcluster-{os.getuid()}-{name.hex()[:32]}"

    def install(self) -> None:
        """Put the hook in place; local rank 0 removes the shared file at exit."""
        if self._context.size == 1:
            return
        patches.TABLE.install({patches.GET_FILE: self._get_file})
        if self._context.local_rank == 0:
            atexit.register(self._remove)

    def _remove(self) -> None:
        with private_files.uncounted():
            self._answers.unlink(missing_ok=True)

    def _get_file(self, original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
        call = inspect.signature(original).bind(*args, **kwargs)
        key = self._key(call.arguments)
        with _locked(self._answers) as descriptor:
            answers = _read(descriptor)
            answer = answers.get(key)
            if answer is not None and Path(answer).exists():
                # A string, as Keras itself returns it.
                return answer
            with self._alone_among_hosts(call.arguments), private_files.uncounted():
                path = original(*args, **kwargs)
            if descriptor is not None and isinstance(path, str):
                _write(descriptor, {**answers, key: path})
            return path

    def _key(self, arguments: Mapping[str, object]) -> str:
        """A key for a call: equal on all ranks, and new for each repetition."""
        text = repr(sorted((name, str(value)) for name, value in arguments.items()))
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._calls[digest] += 1
        return f"{digest} {self._calls[digest]}"

    @contextmanager
    def _alone_among_hosts(self, arguments: Mapping[str, object]) -> Iterator[None]:
        """Lock a folder that hosts may share, if its file system supports locks."""
        if self._context.is_on_one_host:
            yield
            return
        base = arguments.get("cache_dir") or internals.keras_home()
        with _locked(Path(str(base)) / _SHARED_LOCK):
            yield


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Lock the file and yield its descriptor; None if it cannot be opened."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        yield None
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int | None) -> dict[str, str]:
    if descriptor is None:
        return {}
    data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    try:
        answers = json.loads(data) if data else {}
    except ValueError:
        return {}
    return answers if isinstance(answers, dict) else {}


def _write(descriptor: int, answers: dict[str, str]) -> None:
    data = json.dumps(answers).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)
