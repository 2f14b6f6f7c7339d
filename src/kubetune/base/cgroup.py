"""Read the limits of the container or service that this process runs in: Linux control groups, versions 1 and 2.

Standard library only. On other systems, and if the system does not tell, the answer is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory_limit() -> int | None:
    """Return the bytes of memory that all processes of the group may use together.

    Each group above has a limit too, and the smallest counts.
    """
    limits = []
    for folder in _memory_folders():
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # version 2 says `max` if there is no limit
                limits.append(int((folder / name).read_text()))
    return min(limits, default=None)


def oom_kills() -> int | None:
    """Return how many processes of the group the kernel has killed for memory since the group was made."""
    for folder in _memory_folders():
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                text = (folder / name).read_text()
                if match := re.search(r"^oom_kill (\d+)$", text, re.MULTILINE):
                    return int(match[1])
    return None


def _memory_folders() -> Iterator[Path]:
    """Yield the folder of this process's group, then those above it.

    /proc/self/cgroup has a line for each hierarchy:

        0::/kubepods/pod7                version 2: /sys/fs/cgroup/kubepods/pod7
        4:cpu,memory:/docker/1a2b        version 1: /sys/fs/cgroup/memory/docker/1a2b
    """
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = ROOT / "memory" if controllers else ROOT
            group = root / name.lstrip("/")
            # In a container the group may be the root, under a name that does not exist here: such folders are skipped.
            for folder in (group, *group.parents):
                if folder.is_relative_to(root) and folder.is_dir():
                    yield folder
