"""Pods without namespaces, for machines that permit none: processes of this user, each pod at a loopback address.

Nothing can be mounted, so paths are translated instead: where a command line, a variable or a projected file names a
folder that a volume would be mounted at, it names the volume's folder. No name server can be had either, so variables
that name the pod of rank 0 name its address; and since torch listens on all addresses, each such pod has a port of its
own. Users, read-only mounts, memory volumes and process namespaces are not there in this mode.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

# Addresses in each 127.1.N.x.
_LAST = 250


class Addresses:
    """A loopback address for each host name of a namespace, and a free port for those that others meet at."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, str], str] = {}
        self._ports: dict[str, int] = {}

    def of(self, namespace: str, host: str) -> str:
        """Return the address of a pod, which may not be there yet, by its host name or any name below which it is."""
        key = (namespace, host.partition(".")[0])
        number = len(self._hosts)
        return self._hosts.setdefault(key, f"127.1.{number // _LAST}.{number % _LAST + 1}")

    def port(self, address: str) -> int:
        """Return a port that is free on this machine, always the same for an address."""
        if address not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self._ports[address] = int(probe.getsockname()[1])
        return self._ports[address]

    def resolved(self, namespace: str, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables with addresses in place of names, and a port for each in place of the usual one."""
        variables = {"GLOO_SOCKET_IFNAME": "lo", **env}
        for prefix in ("PET_", ""):
            name = f"{prefix}MASTER_ADDR"
            if name in env:
                address = self.of(namespace, env[name])
                variables[name] = address
                variables[f"{prefix}MASTER_PORT"] = str(self.port(address))
        return variables


def translate(text: str, folders: Mapping[str, str]) -> str:
    """Return a text with other folders in place of those named: `/outputs`, but not `/outputs-old` or `/my/outputs`."""
    if not folders:
        return text
    names = "|".join(re.escape(name) for name in sorted(folders, key=len, reverse=True))
    return re.sub(rf"(?<![\w./-])({names})(?![\w.-])", lambda match: folders[match[1]], text)
