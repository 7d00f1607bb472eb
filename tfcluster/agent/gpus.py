"""Finds the GPUs that we may use on this host, and asks NVIDIA how busy they are.

NVIDIA's management library (NVML) comes with the driver. Loading it may take seconds,
and a broken driver may never answer. So only a thread asks it, and nobody waits for
that thread. https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from tfcluster.protocol.messages import Gpu

_NVIDIA = "/proc/driver/nvidia/gpus"


def gpus(
    environ: Mapping[str, str], folder: str | os.PathLike[str] = _NVIDIA
) -> tuple[str, ...]:
    """The devices in CUDA_VISIBLE_DEVICES if it is set, else all devices, by number."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(word.strip() for word in visible.split(",") if word.strip())
    try:
        count = len(os.listdir(folder))
    except OSError:
        return ()
    return tuple(map(str, range(count)))


_DRIVER = "/proc/driver/nvidia/version"
_LIBRARY = "libnvidia-ml.so.1"
_INTERVAL_S = 1.0
_UUID_CHARS = 96


class GpuUsage:
    """The last known usage of this host's GPUs; empty where there are none."""

    def __init__(self, driver: str = _DRIVER, library: str = _LIBRARY) -> None:
        self._driver = driver
        self._library = library
        self._thread: threading.Thread | None = None
        self.latest: list[Gpu] = []

    def start(self) -> None:
        if self._thread is None and os.path.exists(self._driver):
            self._thread = threading.Thread(
                target=self._watch, name="nvml", daemon=True
            )
            self._thread.start()

    def of(self, visible: str | None) -> list[Gpu]:
        """The usage of the GPUs in CUDA_VISIBLE_DEVICES; of all GPUs if it is None."""
        latest = self.latest
        if visible is None:
            return latest
        wanted = [word.strip() for word in visible.split(",") if word.strip()]
        return [
            gpu
            for word in wanted
            for gpu in latest
            # CUDA accepts any beginning of a UUID.
            if word == str(gpu.gpu)
            or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]

    def _watch(self) -> None:
        pause = threading.Event()
        try:
            nvml = _Nvml(self._library)
            while (usage := nvml.read()) is not None:
                self.latest = usage
                pause.wait(_INTERVAL_S)
        except (OSError, AttributeError):
            self.latest = []  # no library, or an old one that lacks a function


class _Nvml:
    """The few functions of the library that we need. Raises OSError."""

    def __init__(self, library: str) -> None:
        import ctypes  # only where there is a driver: it takes long to import

        class Utilization(ctypes.Structure):
            _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]

        class Memory(ctypes.Structure):
            _fields_ = [
                ("total", ctypes.c_ulonglong),
                ("free", ctypes.c_ulonglong),
                ("used", ctypes.c_ulonglong),
            ]

        self._c = ctypes
        self._utilization, self._memory = Utilization, Memory
        self._nvml = ctypes.CDLL(library)
        if self._nvml.nvmlInit_v2() != 0:
            raise OSError(f"{library} cannot be initialised")

    def read(self) -> list[Gpu] | None:
        count = self._c.c_uint()
        if self._nvml.nvmlDeviceGetCount_v2(self._c.byref(count)) != 0:
            return None
        return [gpu for n in range(count.value) if (gpu := self._gpu(n)) is not None]

    def _gpu(self, number: int) -> Gpu | None:
        ref, handle = self._c.byref, self._c.c_void_p()
        nvml = self._nvml
        if nvml.nvmlDeviceGetHandleByIndex_v2(number, ref(handle)) != 0:
            return None
        uuid = self._c.create_string_buffer(_UUID_CHARS)
        nvml.nvmlDeviceGetUUID(handle, uuid, _UUID_CHARS)
        # Neither is known for a GPU that is divided into instances (MIG).
        busy, memory = self._utilization(), self._memory()
        is_known = nvml.nvmlDeviceGetUtilizationRates(handle, ref(busy)) == 0
        has_memory = nvml.nvmlDeviceGetMemoryInfo(handle, ref(memory)) == 0
        return Gpu(
            gpu=number,
            uuid=uuid.value.decode("ascii"),
            busy=busy.gpu / 100 if is_known else None,
            memory_bytes=memory.used if has_memory else None,
            memory_total_bytes=memory.total if has_memory else None,
        )
