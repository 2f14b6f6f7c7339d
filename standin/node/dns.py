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
_AUTHORITATIVE_REPLY = 0x8580
_NO_SUCH_NAME = 3
_HEADER_BYTES = 12
_TYPE_A = 1
_CLASS_IN = 1
_TTL_SECONDS = 1
# A pointer to the name in the question, which follows the header.
_THE_NAME_ASKED_FOR = b"\xc0\x0c"


def service_pods(store: Store, service: Object) -> Iterator[Object]:
    """Yield the pods a Service points at now."""
    spec = service["spec"]
    wanted = spec.get("selector")
    if not wanted:
        return
    for pod in store.list("Pod", namespace_of(service)):
        if not wanted.items() <= labels_of(pod).items():
            continue
        is_ready = condition(pod, "Ready") and not terminating(pod)
        is_alive = pod.get("status", {}).get("podIP") and phase(pod) in ("Pending", "Running")
        if is_alive and (is_ready or spec.get("publishNotReadyAddresses")):
            yield pod


def addresses(store: Store, name: str) -> list[str]:
    """Return the addresses of `[host.]service.namespace.svc.cluster.local`; empty when there are none."""
    if not name.endswith("." + DOMAIN):
        return []
    parts = name.removesuffix("." + DOMAIN).split(".")
    if len(parts) not in (2, 3):
        return []
    *hosts, service_name, namespace = parts
    service = store.get("Service", namespace, service_name)
    if service is None:
        return []
    ips = []
    for pod in service_pods(store, service):
        pod_name = [pod["spec"].get("hostname")]
        if not hosts or (hosts == pod_name and pod["spec"].get("subdomain") == service_name):
            ips.append(pod["status"]["podIP"])
    return ips


class DnsServer(asyncio.DatagramProtocol):
    """Answers questions for A records."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def connection_made(self, transport: Any) -> None:
        """Remember where answers go."""
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        """Answer one question: a header, labels after their lengths up to a length of 0, type and class."""
        labels = []
        at = _HEADER_BYTES
        while data[at]:
            label = data[at + 1 : at + 1 + data[at]]
            labels.append(label.decode("ascii", "replace").lower())
            at += 1 + data[at]
        (question_type,) = struct.unpack("!H", data[at + 1 : at + 3])
        end_of_question = at + 5

        ips = addresses(self._store, ".".join(labels))
        flags = _AUTHORITATIVE_REPLY
        if not ips:
            flags |= _NO_SUCH_NAME
        answers = []
        if question_type == _TYPE_A:
            for ip in ips:
                facts = struct.pack("!HHIH", _TYPE_A, _CLASS_IN, _TTL_SECONDS, 4)
                answers.append(_THE_NAME_ASKED_FOR + facts + socket.inet_aton(ip))
        header = data[:2] + struct.pack("!HHHHH", flags, 1, len(answers), 0, 0)
        question = data[_HEADER_BYTES:end_of_question]
        self._transport.sendto(header + question + b"".join(answers), address)
