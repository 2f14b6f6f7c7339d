"""Limits of the container or service that this process runs in: control groups of Linux, of both versions.

Standard library only. Elsewhere, and where nothing is told, the answer is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory_limit() -> int | None:
    """Bytes of memory that all processes of the group may use together: the least of its own limit and those above."""
    limits = []
    for folder in _memory_folders():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # version 2 says `max` where there is no limit
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def oom_kills() -> int | None:
    """Number of the group's processes that the kernel has killed for memory since it was made."""
    for folder in _memory_folders():
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                if found := re.search(
                    r"^oom_kill (\d+)$", (folder / name).read_text(), re.MULTILINE
                ):
                    return int(found[1])
    return None


def _memory_folders() -> Iterator[Path]:
    """The group's own folder first, then those above. A container sees its own as the root, whatever its name."""
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = ROOT / "memory" if controllers else ROOT
            own = root / name.lstrip("/")
            yield from (
                folder
                for folder in (own, *own.parents)
                if folder.is_relative_to(root) and folder.is_dir()
            )
