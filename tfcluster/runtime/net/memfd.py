"""Anonymous files (memfd) that processes of one host share through /proc.

Such a file has no name, cannot shrink, and is freed with the last process that has it.
It begins with a nonce, by which a process knows that it has opened the right file. See
memfd_create(2) and fcntl(2), "File Sealing".
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from tfcluster.runtime.files.opener import open_of

NONCE_BYTES = 32


@contextmanager
def created(name: str, size: int) -> Iterator[int]:
    """The descriptor of a new file of ``size`` bytes; closed if the body fails.

    Raises OSError if there is not enough memory.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    descriptor = os.memfd_create(name, flags)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, secrets.token_bytes(NONCE_BYTES), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield descriptor
    except BaseException:
        os.close(descriptor)
        raise


@contextmanager
def opened(pid: int, descriptor: int, size: int, nonce: bytes) -> Iterator[int]:
    """A descriptor, open during the body, of the file that process ``pid`` has created.

    Raises OSError if the file cannot be opened, is not a memfd, may shrink, or has the
    wrong size or nonce.
    """
    memory = open_of(pid, descriptor, os.O_RDWR, "/memfd:")
    try:
        sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(memory).st_size != size:
            raise OSError("unexpected size")
        if os.pread(memory, NONCE_BYTES, 0) != nonce:
            raise OSError("it is not the memory of this run")
        yield memory
    finally:
        os.close(memory)
