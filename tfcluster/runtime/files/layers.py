"""Writable layers over folders: only this process sees what it writes there.

A layer is an overlay file system in a mount namespace of the process, so it ends with
the process and its children, however they end. See overlayfs in the documentation of
Linux, mount_namespaces(7) and user_namespaces(7). The folder of a layer's files lies
beside the logs of the run; ``tfcluster.agent.layers`` clears it away.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tfcluster.runtime.files import opener
from tfcluster.runtime.files.events import temporary_folder

_NEW_MOUNTS, _NEW_USERS = 0x20000, 0x10000000
_DETACH = 2
_REMOUNT, _BIND, _RECURSIVE, _SLAVE = 0x20, 0x1000, 0x4000, 0x80000
_CAPABILITIES_VERSION = 0x20080522
_OPTIONS = ("redirect_dir=on", "redirect_dir=off")
_OPTIONS_IN_USER_NAMESPACE = ("userxattr",)
"""Otherwise, the kernel could not note there that a folder is a new one."""
_MOUNT_POINT = 4
"""A field of /proc/self/mountinfo, counted from 0."""

LISTED = ".layers"
"""The ending of the file that lists the layers: their files, and what they are over."""

_libc = ctypes.CDLL(None, use_errno=True)


class Layers:
    """The layers of this process.

    They are listed in a file whose path begins with ``name``, and their files are in a
    folder whose path begins so, too, or in a new temporary folder. Below the folders
    ``open_paths``, the process reaches the real files.
    """

    def __init__(self, name: str, open_paths: Sequence[str]) -> None:
        self._name = name
        self._place = ""
        self._open_paths = open_paths
        self._folders: list[str] = []
        self._count = 0
        """The number of layers that were mounted."""
        self._lock = threading.Lock()

    def can_cover(self, folder: str) -> bool:
        """Whether this process can have a layer over ``folder``, and others.

        Tried in a child, since there is no way back. To be called before ``enter``.
        """
        if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - names suffice
            return False  # the kernel allows it to processes without threads only
        for new_place in (self._beside, _temporary):
            try:
                self._place = new_place()
            except FileExistsError:
                continue  # an earlier program in this process could not remove it
            child = os.fork()
            if child == 0:
                with suppress(OSError):
                    enter(helps=False)
                    self._mount(folder)
                    os._exit(0)
                os._exit(1)
            if os.waitpid(child, 0)[1] == 0:
                return True
            shutil.rmtree(self._place, ignore_errors=True)
        return False

    def _beside(self) -> str:
        place = f"{self._name}.files"
        Path(place).mkdir(0o700)
        return place

    def cover(self, folder: str) -> None:
        """Put a layer over a folder, unless one is there. Raises OSError.

        ``folder`` is an absolute path without links.
        """
        with self._lock:
            if not any(is_below(folder, covered) for covered in self._folders):
                files = self._mount(folder)
                self._count += 1
                self._folders.append(folder)
                with Path(f"{self._name}{LISTED}").open("a") as listing:
                    listing.write(json.dumps([files, folder]) + "\n")

    def leave(self) -> None:
        """Take all layers away with their files: a new program follows in this process.

        The process keeps its own mounts. Paths lead to the real files again, but not
        those that are relative to the working folder. Raises OSError.
        """
        with self._lock, _all_capabilities():
            for folder in reversed(self._folders):
                _checked(_libc.umount2(os.fsencode(folder), _DETACH))
            self._folders.clear()
            # The kernel makes folders that their owner may not read.
            shutil.rmtree(self._place, ignore_errors=True)
        Path(f"{self._name}{LISTED}").unlink(missing_ok=True)

    def refresh(self) -> None:
        """Let this process see what others have done to the folders since.

        Otherwise, the kernel would remember for long what is and is not there, and a
        program that waits for a file of another process would never find it.
        """
        with suppress(OSError), _all_capabilities():
            for folder in self._folders:
                _mount("none", folder, "", _REMOUNT)

    def make_movable(self, path: str) -> None:
        """Let a folder that is about to be renamed be one of the layer. Raises OSError.

        In a user namespace, the kernel does not rename a folder from under a layer.
        """
        if not _has_user_namespace or os.path.islink(path) or not os.path.isdir(path):  # noqa: PTH112, PTH114
            return
        copy = tempfile.mkdtemp(dir=os.path.dirname(path))  # noqa: PTH120
        shutil.copytree(path, copy, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(path)
        Path(copy).rename(path)

    def release(self, folder: str) -> None:
        """Let a folder that has a layer be renamed or removed. Raises OSError.

        The kernel refuses it while something is mounted there. Another layer must be
        over the folder that it is in; that gets what this process sees.
        """
        with self._lock:
            if folder not in self._folders:
                return
            self._folders.remove(folder)
        copy = f"{self._place}/moved"
        shutil.copytree(folder, copy, symlinks=True, dirs_exist_ok=True)
        with _all_capabilities():
            _checked(_libc.umount2(os.fsencode(folder), _DETACH))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(copy, folder, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(copy)

    def _mount(self, folder: str) -> str:
        """Mount a layer; returns the folder of its files."""
        inner = [path for path in _mount_points() if is_below(path, folder)]
        inner += [path for path in self._open_paths if is_below(path, folder)]
        here = os.getcwd()  # noqa: PTH109 - the text is needed
        own = Path(self._place) / str(self._count)
        upper, work = own / "upper", own / "work"
        for own_folder in (upper, work):
            own_folder.mkdir(0o700, parents=True, exist_ok=True)
        upper.chmod(_mode_for_us(folder))
        with ExitStack() as opened, _all_capabilities():

            def reach(path: str | Path) -> str:
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
                # Such a path needs no quotes in mount options.
                return f"/proc/self/fd/{descriptor}"

            above = [(path, reach(path)) for path in inner if Path(path).exists()]
            options = f"upperdir={reach(upper)},workdir={reach(work)}"
            _overlay(folder, f"lowerdir={reach(folder)},{options}")
            for path, source in above:
                _mount(source, path, "", _BIND | _RECURSIVE)
        # Relative paths shall lead into the layer.
        os.chdir(here)
        return str(upper)


def _mode_for_us(folder: str) -> int:
    """The mode of a folder that is ours and gives us the same rights as ``folder``."""
    status = Path(folder).stat()
    mode = status.st_mode & 0o7777
    if os.geteuid() in (0, status.st_uid):
        return mode
    rights = sum(right for right in (os.R_OK, os.W_OK, os.X_OK) if _may(folder, right))
    return mode & ~stat.S_IRWXU | rights << 6


def _may(path: str, right: int) -> bool:
    return os.access(path, right, effective_ids=True)


def _temporary() -> str:
    return tempfile.mkdtemp(prefix="tfcluster-files-", dir=temporary_folder())


def _overlay(folder: str, options: str) -> None:
    options_in_turn = _OPTIONS_IN_USER_NAMESPACE if _has_user_namespace else _OPTIONS
    for number, more in enumerate(options_in_turn, 1):
        try:
            _mount("overlay", folder, "overlay", 0, f"{options},index=off,{more}")
        except OSError:
            if number == len(options_in_turn):
                raise
        else:
            return


def is_below(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or leads into it; both are absolute."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def enter(*, helps: bool = True) -> None:
    """Give this process its own mounts, and if necessary a user namespace for that.

    ``helps``: then it can still open what other processes share. Raises OSError.
    """
    global _has_user_namespace
    user, group = os.geteuid(), os.getegid()
    try:
        _checked(_libc.unshare(_NEW_MOUNTS))
    except PermissionError:
        if helps:
            opener.start()
        _checked(_libc.unshare(_NEW_USERS | _NEW_MOUNTS))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _has_user_namespace = True
        _set_capabilities(0)
    with _all_capabilities():
        # What is mounted on the host later is seen here, too, but not the reverse.
        _mount("none", "/", "", _RECURSIVE | _SLAVE)


_has_user_namespace = False


@contextmanager
def _all_capabilities() -> Iterator[None]:
    """A context with the rights to mount.

    In its own user namespace, a process would always have all rights over its user's
    files, even over those that their modes forbid.
    """
    if not _has_user_namespace:
        yield
        return
    _set_capabilities(0xFFFFFFFF)
    try:
        yield
    finally:
        _set_capabilities(0)


def _set_capabilities(effective: int) -> None:
    """Set the effective capabilities, out of those that are permitted."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()
    _checked(_libc.capget(header, sets))
    for at in (0, 3):  # the lower and upper 32 bits: effective, permitted, inheritable
        sets[at] = sets[at + 1] & effective
    _checked(_libc.capset(header, sets))


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    words = [os.fsencode(word) for word in (source, target, kind)]
    data = options.encode() or None
    _checked(_libc.mount(*words, ctypes.c_ulong(flags), data))


def _checked(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mount_points() -> Iterator[str]:
    """The folders of all mounts, those that are above others first."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        text = line.split(" ")[_MOUNT_POINT]
        # Blanks, tabs and the like are octal there.
        yield text.encode().decode("unicode_escape").encode("latin-1").decode()
