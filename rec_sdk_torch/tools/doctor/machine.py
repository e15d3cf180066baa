"""Facts about the machine and installed packages, as lines of text. Works without torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_CGROUP = Path("/sys/fs/cgroup")
_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torch-npu", "tensordict", "numpy", "safetensors")
_LIBRARIES = {
    "_engine*.so": "the host engine",
    "_ops.so": "operators on the CPU",
    "_ops_cuda.so": "operators on CUDA",
    "_ops_npu.so": "operators on torch_npu",
    "librec_sdk_ascendc.so": "kernels for Ascend NPUs",
    "_emulator/libascendcl.so": "the emulated NPU",
}


def read_text(path: str | Path) -> str:
    """Returns the text of a file in /proc or /sys; "" if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def format_bytes(count: float) -> str:
    """Returns a number of bytes with a unit, such as `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def system() -> Iterator[str]:
    """Yields the versions of the interpreter and the operating system."""
    libc = " ".join(platform.libc_ver()).strip() or "unknown libc"
    yield f"Python {platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    yield f"{platform.system()} {platform.release()}, {platform.machine()}, {libc}"


def packages() -> Iterator[str]:
    """Yields the installed versions of torch and other packages that rec_sdk_torch uses."""
    for name in _PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name}: not installed"


def libraries() -> Iterator[str]:
    """Yields a line for each compiled library of this package: its file name, or that it is not built."""
    for pattern, meaning in _LIBRARIES.items():
        found = next(iter(_PACKAGE.glob(pattern)), None)
        yield f"{meaning}: {'not built' if found is None else found.name}"


def _cpu_name() -> str:
    for line in read_text("/proc/cpuinfo").splitlines():
        if line.lower().startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_quota() -> str:
    """Returns the number of processors that the container may use, as text; "" if there is no limit."""
    quota, _, period = read_text(_CGROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        return f", of which the container may use {int(quota) / int(period):.1f}"
    return ""


def processors() -> Iterator[str]:
    """Yields the processors, and the environment variables that limit threads."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{_cpu_name()}: {allowed} of {os.cpu_count()} processors{_cpu_quota()}"
    settings = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    yield f"threads by the environment: {', '.join(settings) or 'not set'}"


def _page_locked() -> str:
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    except (ImportError, OSError):
        return "unknown"
    return "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def memory() -> Iterator[str]:
    """Yields free host memory, huge-page settings, and free disk space."""
    fields = (line.split() for line in read_text("/proc/meminfo").splitlines())
    info = {name.rstrip(":"): int(rest[0]) for name, *rest in fields if rest and rest[0].isdecimal()}
    if info:
        limit = read_text(_CGROUP / "memory.max")
        bound = f", the container's limit {format_bytes(int(limit))}" if limit.isdecimal() else ""
        free, total = (format_bytes(info[name] << 10) for name in ("MemAvailable", "MemTotal"))  # the numbers are KiB
        yield f"host memory: {free} free of {total}{bound}"
    huge = read_text("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = huge[huge.find("[") + 1 : huge.find("]")] if "[" in huge else "unknown"
    slower = "" if chosen in ("always", "madvise") else ", tables and caches are slower"
    yield f"transparent huge pages: {chosen}{slower}"
    yield f"huge pages set aside: {info.get('HugePages_Total', 0)}; memory that may be page-locked: {_page_locked()}"
    for folder in ("/dev/shm", os.environ.get("TMPDIR", "/tmp")):
        with contextlib.suppress(OSError):
            yield f"{folder}: {format_bytes(shutil.disk_usage(folder).free)} free"
