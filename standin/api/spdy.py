"""The part of SPDY/3.1 that port forwarding uses: frames, and header blocks compressed with the protocol's dictionary.

Flow control is left out, as it is in the implementation that kubectl uses.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

SYN_STREAM = 1
SYN_REPLY = 2
RST_STREAM = 3
PING = 6
FIN = 1
_CONTROL_BIT = 0x80000000
_VERSION = 3
_HEADER_BYTES = 8

# The specification's dictionary: words, each after its length, and then plain text.
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
)
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized"
    "403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable"
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT"
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,text/javascript,"
    "publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _length_and_word(word: str) -> bytes:
    return struct.pack("!I", len(word)) + word.replace("_", " ").encode()


DICTIONARY = b"".join(map(_length_and_word, _WORDS.split())) + _TEXT.encode()


@dataclass(frozen=True)
class Frame:
    """A control frame (`type` is set) or a data frame (`stream` is set)."""

    type: int | None
    stream: int
    flags: int
    payload: bytes


class Reader:
    """Cuts a byte stream into frames and reads header blocks, which share one compression state."""

    def __init__(self) -> None:
        self._bytes = b""
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole with the next bytes."""
        self._bytes += data
        while len(self._bytes) >= _HEADER_BYTES:
            head, size = struct.unpack("!II", self._bytes[:_HEADER_BYTES])
            flags = size >> 24
            length = size & 0xFFFFFF
            if len(self._bytes) < _HEADER_BYTES + length:
                return
            payload = self._bytes[_HEADER_BYTES : _HEADER_BYTES + length]
            self._bytes = self._bytes[_HEADER_BYTES + length :]
            if head & _CONTROL_BIT:
                yield Frame(head & 0xFFFF, 0, flags, payload)
            else:
                yield Frame(None, head, flags, payload)

    def opened_stream(self, frame: Frame) -> tuple[int, dict[str, str]]:
        """Return stream id and headers of a SYN_STREAM frame."""
        (stream,) = struct.unpack("!I", frame.payload[:4])
        # A count, then names and values in turn, each after its length.
        block = self._inflate.decompress(frame.payload[10:])
        (count,) = struct.unpack("!I", block[:4])
        words = []
        at = 4
        for _ in range(2 * count):
            (length,) = struct.unpack("!I", block[at : at + 4])
            words.append(block[at + 4 : at + 4 + length].decode())
            at += 4 + length
        return stream, dict(zip(words[::2], words[1::2], strict=True))


class Writer:
    """Makes the frames of one direction."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def reply(self, stream: int) -> bytes:
        """Accept a stream, without headers."""
        no_headers = self._deflate.compress(struct.pack("!I", 0))
        no_headers += self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return control_frame(SYN_REPLY, struct.pack("!I", stream) + no_headers)


def control_frame(type_: int, payload: bytes) -> bytes:
    return struct.pack("!II", _CONTROL_BIT | _VERSION << 16 | type_, len(payload)) + payload


def data_frame(stream: int, payload: bytes, flags: int = 0) -> bytes:
    return struct.pack("!II", stream, flags << 24 | len(payload)) + payload
