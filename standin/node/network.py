"""The pod network: one bridge in the server's own network namespace, one veth pair for each pod."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Iterator

SUBNET = "10.244.0"
GATEWAY = f"{SUBNET}.1"


def pod_addresses() -> Iterator[str]:
    """Yield all addresses a pod can have, lowest first."""
    for host in range(10, 255):
        yield f"{SUBNET}.{host}"


async def create_bridge() -> None:
    """Make the bridge; the caller is already alone in its network namespace."""
    await _ip(
        f"link set lo up\nlink add br0 type bridge\naddr add {GATEWAY}/24 dev br0\nlink set br0 up\n"
    )


async def attach(pid: int, address: str) -> None:
    """Give the network namespace of a process an `eth0` on the bridge."""
    await _ip(
        f"link add v{pid} type veth peer name eth0 netns {pid}\nlink set v{pid} master br0 up\n"
    )
    inside = f"link set lo up\naddr add {address}/24 dev eth0\nlink set eth0 up\nroute add default via {GATEWAY}\n"
    await _ip(inside, "nsenter", "-t", str(pid), "-n")


async def _ip(commands: str, *prefix: str) -> None:
    """Have `ip` carry out commands, a line each."""
    process = await asyncio.create_subprocess_exec(
        *prefix, "ip", "-batch", "-", stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    output, _ = await process.communicate(commands.encode())
    if process.returncode:
        raise RuntimeError(f"ip -batch: {output.decode()}")
