"""What the end of a pod's log says when nobody can be asked any more: the last numbers, and the cause of an end.

torchrun and its store print long tracebacks when other nodes go first, at ends that are perfectly normal. They are
known here, so that they are never shown as the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_STEP = re.compile(r"\[TRAIN\] step (?P<step>\d+)/(?P<steps>\d+) .*loss (?P<loss>\S+) .*tokens/s (?P<speed>[\d.]+)")
_STOPPED = re.compile(r"stopped after step (?P<step>\d+);")
_VERDICT = re.compile(r"^kubetune: (?P<reason>.*?);? ?ended with exit code \d+, logs in ")
_ERROR = re.compile(r"\[ERROR\] (?P<reason>.+)")
_TRACEBACK = "Traceback (most recent call last):"
_NORMAL_ENDS = re.compile(
    r"(DistNetworkError|DistStoreError|SignalException|ChildFailedError|RendezvousConnectionError"
    r"|RendezvousClosedError|RendezvousTimeoutError)\b"
)
# `[rank1]:[W1120 10:15:00.1 TCPStore.cpp:106] [c10d] …` and the frames of C++ that follow it.
_STORE = re.compile(
    r"^(\[rank\d+\]:)?\[[WEI]\d{3,4} .*\b(TCPStore|TCPStoreLibUvBackend|socket|ProcessGroup\w+)\.cpp"
    r"|^frame #\d+: |^Exception raised from "
)


@dataclass(frozen=True)
class Words:
    """What a log told at its end."""

    reason: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    saved_step: int | None = None


def read_words(lines: Sequence[str]) -> Words:
    """The last numbers and the cause of the end in the last lines of a log."""
    reason, step, saved = "", None, None
    for line in meaningful(lines):
        if found := _STEP.search(line):
            step, saved = found, None
        elif found := _STOPPED.search(line):
            saved = int(found["step"])
        elif found := _VERDICT.match(line):
            reason = found["reason"] or reason
        elif found := _ERROR.search(line):
            reason = found["reason"]
    if step is None:
        return Words(reason, step=saved, saved_step=saved)
    loss, speed = float(step["loss"]), float(step["speed"])
    # not every step has a line
    return Words(reason, saved or int(step["step"]), int(step["steps"]), loss, speed, saved)


def meaningful(lines: Sequence[str]) -> Iterator[str]:
    """The lines without the tracebacks and store messages of normal ends."""
    traceback: list[str] = []
    for line in lines:
        if line.startswith(_TRACEBACK):
            yield from traceback
            traceback = [line]
        elif traceback and (not line or line.startswith((" ", "\t"))):
            traceback.append(line)
        elif traceback:
            # The exception itself: the first line after the frames.
            if not _NORMAL_ENDS.search(line):
                yield from [*traceback, line]
            traceback = []
        elif not _STORE.search(line):
            yield line
    yield from traceback
