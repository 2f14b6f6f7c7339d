"""As much protobuf as `kubectl create namespace` sends: an object of which nothing but its name is known.

Kubernetes' own clients send typed objects in this form. The fields read here are those of runtime.Unknown (1 the type,
2 the object), of TypeMeta (1 apiVersion, 2 kind), and of an object and its ObjectMeta (both 1).
"""

from __future__ import annotations

from standin.state.objects import Object

_MAGIC = b"k8s\x00"
_VARINT, _BYTES = 0, 2
KINDS = ("Namespace",)


def decode(body: bytes) -> Object | None:
    """The object in a body; None where it is of another kind or form."""
    if not body.startswith(_MAGIC):
        return None
    envelope = _fields(body[len(_MAGIC) :])
    type_meta = _fields(envelope.get(1, b""))
    api_version, kind = type_meta.get(1, b"").decode(), type_meta.get(2, b"").decode()
    if kind not in KINDS:
        return None
    name = _fields(_fields(envelope.get(2, b"")).get(1, b"")).get(1, b"").decode()
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}}


def _fields(message: bytes) -> dict[int, bytes]:
    """The fields that hold bytes, by number; numbers are skipped."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        value, at = _varint(message, at)
        if key & 7 == _BYTES:
            found[key >> 3] = message[at : at + value]
            at += value
        elif key & 7 != _VARINT:
            raise ValueError(f"a field of wire type {key & 7}")
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    value, shift = 0, 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
