"""The network NCCL uses between nodes, as its own log tells: it says so nowhere else, and falls back in silence.

Asked for InfiniBand where no adapter can be opened, NCCL goes on over sockets, and a run is slow without a word.
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
    """NCCL's name for the network it uses (`IB`, `Socket`, a plugin's name), and why not InfiniBand where it says."""

    name: str
    reason: str = ""


def wants_rdma(environ: Mapping[str, str]) -> bool:
    """The environment names adapters, as pods of `profile: rdma` do, and nothing turns them off."""
    is_off = (
        environ.get("NCCL_IB_DISABLE", "0") not in ("", "0")
        or environ.get("NCCL_NET", "").lower() == "socket"
    )
    return bool(environ.get("NCCL_IB_HCA")) and not is_off


def keep_log(environ: MutableMapping[str, str], folder: Path) -> Path:
    """Have NCCL in this process write what it finds to a file, and return it. To be called before NCCL begins.

    A file of the user's own stays where it is.
    """
    environ["NCCL_DEBUG"], environ["NCCL_DEBUG_SUBSYS"] = "INFO", "INIT,NET,ENV"
    pattern = environ.setdefault("NCCL_DEBUG_FILE", str(folder / "nccl.%p.log"))
    return Path(pattern.replace("%h", socket.gethostname()).replace("%p", str(os.getpid())))


def network(log: str) -> Network | None:
    """The network in a log of NCCL; None where it does not say."""
    found = _NETWORK.findall(log)
    if not found:
        return None
    if library := _NO_LIBRARY.search(log):
        return Network(
            found[-1].strip(), f"{library[1]} is not there; Debian has it in libibverbs1"
        )
    return Network(
        found[-1].strip(), "no adapter of that name can be opened" if _NO_DEVICE in log else ""
    )


def read_network(log: Path) -> Network | None:
    """The network in a log file; None where there is none or it does not say."""
    try:
        return network(log.read_text("utf-8", "replace"))
    except OSError:
        return None
