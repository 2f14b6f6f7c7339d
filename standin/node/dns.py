"""Cluster DNS: A records of Services, and of pod host names below headless Services. One UDP socket, no recursion.

A name that is not there yet answers NXDOMAIN, exactly the race that training pods have to survive.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from typing import Any

from standin.state.objects import Object, condition, labels_of, namespace_of, phase, terminating
from standin.state.store import Store

DOMAIN = "svc.cluster.local"
_AUTHORITATIVE_REPLY, _NO_SUCH_NAME = 0x8580, 3
_TYPE_A = 1


def service_pods(store: Store, service: Object) -> Iterator[Object]:
    """The pods a Service points at now."""
    spec = service["spec"]
    wanted = spec.get("selector") or {}
    for pod in store.list("Pod", namespace_of(service)):
        ready = condition(pod, "Ready") and not terminating(pod)
        alive = pod.get("status", {}).get("podIP") and phase(pod) in ("Pending", "Running")
        selected = wanted and wanted.items() <= labels_of(pod).items()
        if selected and alive and (ready or spec.get("publishNotReadyAddresses")):
            yield pod


def addresses(store: Store, name: str) -> list[str]:
    """Addresses of `[host.]service.namespace.svc.cluster.local`; empty when there are none."""
    if not name.endswith("." + DOMAIN):
        return []
    parts = name.removesuffix("." + DOMAIN).split(".")
    if len(parts) not in (2, 3):
        return []
    host, service_name, namespace = parts[0] if len(parts) == 3 else None, parts[-2], parts[-1]
    service = store.get("Service", namespace, service_name)
    return [
        pod["status"]["podIP"]
        for pod in (service_pods(store, service) if service else ())
        if host is None
        or (pod["spec"].get("hostname"), pod["spec"].get("subdomain")) == (host, service_name)
    ]


class DnsServer(asyncio.DatagramProtocol):
    def __init__(self, store: Store) -> None:
        self._store = store

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("ascii", "replace").lower())
            at += 1 + data[at]
        (question_type,) = struct.unpack("!H", data[at + 1 : at + 3])
        found = addresses(self._store, ".".join(labels))
        answers = [
            b"\xc0\x0c" + struct.pack("!HHIH", _TYPE_A, 1, 1, 4) + socket.inet_aton(ip)
            for ip in (found if question_type == _TYPE_A else [])
        ]
        flags = _AUTHORITATIVE_REPLY | (0 if found else _NO_SUCH_NAME)
        header = data[:2] + struct.pack("!HHHHH", flags, 1, len(answers), 0, 0)
        self._transport.sendto(header + data[12 : at + 5] + b"".join(answers), address)
