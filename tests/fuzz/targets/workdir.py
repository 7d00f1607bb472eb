"""The user's files, as they arrive at a host: list, parts, paths, sizes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.target import Target
from tfcluster.agent.workdir_receiver import WorkdirReceiver
from tfcluster.protocol import frames, requests
from tfcluster.protocol.messages import Message, Synced, Unsynced
from tfcluster.protocol.requests import Part, SyncRequest
from tfcluster.protocol.wire import Decoder, WireError, encode

_FILES = {"train.py": b"import keras\n", "data/a b.txt": b"x" * 100, "empty": b""}


def _receive(data: bytes) -> None:
    """Whatever is sent, only the folder changes."""
    with TemporaryDirectory(prefix="tfcluster-fuzz-") as name:
        folder = Path(name) / "a" / "b" / "folder"
        answers: list[type] = []

        def send(message: Message) -> None:
            answers.append(type(message))
            frames.encode(message)

        receiver = WorkdirReceiver(send)
        try:
            for frame in Decoder().feed(data + b"\n"):
                request = requests.decode(frame)
                if isinstance(request, SyncRequest):
                    here = {"folder": str(folder), "inodes": []}
                    request = requests.decode({**frame, **here})
                if isinstance(request, SyncRequest):
                    receiver.listed(request)
                elif isinstance(request, Part):
                    receiver.came(request)
        finally:
            receiver.close()
            ends = answers.count(Synced) + answers.count(Unsynced)
            assert ends <= 1
            outside = [path for path in Path(name).rglob("*") if path.is_file()]
            assert all(path.is_relative_to(folder) for path in outside)


def _seeds() -> Sequence[bytes]:
    digests = {path: hashlib.sha256(text).hexdigest() for path, text in _FILES.items()}
    rows = [[path, len(text), 7, 0o644, digests[path]] for path, text in _FILES.items()]
    about = {"folder": "/x", "original": "/y", "inodes": []}
    listed = encode({"type": "sync", **about, "files": rows, "last": True})
    first = encode({"type": "sync", **about, "files": rows[:1], "last": False})
    parts = [
        encode(
            {
                "type": "part",
                "index": index,
                "offset": 0,
                "data": base64.b64encode(text).decode(),
            }
        )
        for index, text in enumerate(_FILES.values())
    ]
    rest = encode({"type": "sync", **about, "files": rows[1:], "last": True})
    return [listed, b"".join([listed, *parts]), b"".join([first, rest, *parts])]


TARGETS = (
    Target(
        "workdir",
        _receive,
        _seeds,
        (WireError,),
        (b'"../x"', b'"/etc/x"', b"..", b'"type":"part"', b'"data":null'),
        most_bytes=1 << 16,
    ),
)
