"""What processes cost, from `/proc`: processor time and memory. Where there is no `/proc`, nothing is known."""

import os
from pathlib import Path
from typing import Final

from duecourse.model import bounds
from duecourse.model.instants import Micros

_TICK: Final = bounds.SECOND // os.sysconf("SC_CLK_TCK")
_PPID, _UTIME, _CSTIME = 1, 11, 14


def is_known() -> bool:
    """Tell whether this machine has a `/proc` as Linux has it."""
    return Path("/proc/self/stat").exists()


def cpu_micros(pid: int) -> Micros:
    """Return the processor time, user and system, of a process and of its children that have ended."""
    fields = _stat(pid)
    return _TICK * sum(int(field) for field in fields[_UTIME : _CSTIME + 1]) if fields else 0


def tree_cpu_micros(pid: int) -> Micros:
    """Return the processor time of a process and all that descend from it."""
    return sum(cpu_micros(one) for one in _tree(pid))


def rss_bytes(pid: int) -> int:
    """Return how much memory a process has resident."""
    return _memory(pid, "VmRSS:")


def peak_rss_bytes(pid: int) -> int:
    """Return how much memory a process had resident at most."""
    return _memory(pid, "VmHWM:")


def _memory(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _stat(pid: int) -> list[str]:
    """Return the fields after the command's name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _tree(root: int) -> set[int]:
    parents = {
        int(entry.name): int(fields[_PPID])
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (fields := _stat(int(entry.name)))
    }
    tree = {root}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree
