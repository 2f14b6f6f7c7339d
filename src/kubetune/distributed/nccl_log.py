"""Find in NCCL's log which network it uses between nodes. It says so nowhere else.

If NCCL should use InfiniBand and cannot open an adapter, it uses sockets instead, and the run is slow without a message.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_NO_DEVICE = "NET/IB : No device found"
_NO_LIBRARY = re.compile(r"(?:Failed to open|Unable to open) (libibverbs\.so\S*)")


class Network(NamedTuple):
    """The network that NCCL uses."""

    name: str  # NCCL's name: `IB`, `Socket`, or a plugin's name
    reason: str = ""  # why it is not InfiniBand, if the log says so


def wants_rdma(environ: Mapping[str, str]) -> bool:
    """True if the environment names adapters, as pods of `profile: rdma` do, and nothing switches them off."""
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return False
    if environ.get("NCCL_NET", "").lower() == "socket":
        return False
    return bool(environ.get("NCCL_IB_HCA"))


def keep_log(environ: MutableMapping[str, str], folder: Path) -> Path:
    """Let NCCL in this process write its log to a file, and return the file. Call it before NCCL begins.

    If the user has set a file, it is used.
    """
    # The lowest level at which NCCL names its network.
    environ["NCCL_DEBUG"] = "INFO"
    environ["NCCL_DEBUG_SUBSYS"] = "INIT,NET,ENV"
    pattern = environ.setdefault("NCCL_DEBUG_FILE", str(folder / "nccl.%p.log"))
    return Path(pattern.replace("%h", socket.gethostname()).replace("%p", str(os.getpid())))


def network(log: str) -> Network | None:
    """Return the network that a log of NCCL names. None if it names none."""
    names = _NETWORK.findall(log)
    if not names:
        return None
    name = names[-1].strip()
    if library := _NO_LIBRARY.search(log):
        return Network(name, f"{library[1]} is not there; Debian has it in libibverbs1")
    if _NO_DEVICE in log:
        return Network(name, "no adapter of that name can be opened")
    return Network(name)


def read_network(log: Path) -> Network | None:
    """Return the network that a log file names. None if there is no file, or it names none."""
    try:
        return network(log.read_text("utf-8", "replace"))
    except OSError:
        return None
