"""Chat templates rendered by a process of their own, whose time and memory have limits.

A template comes with a model and is a program of somebody else's. Jinja's sandbox keeps it from files and the network,
but not from doubling a string or from two long loops; a process can be stopped. Conversations go there by the hundred,
so that it costs next to nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import marshal
import math
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, NoReturn

from kubetune.base.processes import module
from kubetune.data.text.marks import Message
from kubetune.data.text.templates import ChatTemplate, Rendered
from kubetune.errors import EnvironmentFault, ModelError

SECONDS: Final = 10
"""Processor time that one conversation may take: what is published takes a thousandth of a second."""
SECONDS_OF_ALL: Final = 20
SECONDS_FOR_EACH: Final = 0.05
"""Processor time that all conversations of a process may take: so much, and so much more for each."""
MEMORY: Final = 1 << 30
"""Bytes that a template may use beyond what the process itself needs."""

_REARM_SECONDS: Final = 0.2
_PIPE_BYTES: Final = 1 << 19

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of ChatTemplate and its arguments."""


class LimitedTemplate:
    """A chat template that another process renders: `ChatTemplate` with limits. Made without rendering anything.

    What uses it raises ValueError as ChatTemplate does, and ModelError when the template is no valid Jinja or needs
    more than the limits.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str = "the tokenizer's",
        date: str | None = None,
    ) -> None:
        self.source = source
        self.name = name
        self._arguments = (source, dict(special_tokens), name, date)
        self._is_loaded = False

    def load(self) -> None:
        """Have the other process read the template, if it has not yet. Raises ModelError as all that uses it."""
        if not self._is_loaded:
            self._ask([])
            self._is_loaded = True

    @cached_property
    def closing(self) -> str:
        """Text that the template writes after an answer, such as `<|im_end|>`; empty when it writes nothing."""
        (closing,) = self._ask([("closing", (), {})])
        return str(closing)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation, as `ChatTemplate.render`."""
        (text,) = self._ask(
            [("render", (messages, tools), {"generation_prompt": generation_prompt})]
        )
        if isinstance(text, ValueError):
            raise text
        return str(text)

    def left_out(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[str]:
        """Parts of a conversation that a model that is asked does not see, as `ChatTemplate.left_out`."""
        (found,) = self._ask([("left_out", (messages, tools), {})])
        if isinstance(found, ValueError):
            raise found
        return list(found)

    def render_all(
        self, chats: Sequence[tuple[Sequence[Message], Sequence[Any], Sequence[int]]]
    ) -> list[Rendered | ValueError]:
        """`ChatTemplate.render_answers` of each (messages, tools, trained); an error stands in its place."""
        calls: list[Call] = [("render_answers", chat[:2], {"trained": chat[2]}) for chat in chats]
        answers = self._ask(calls)
        return [
            answer if isinstance(answer, ValueError) else Rendered(*answer) for answer in answers
        ]

    def _ask(self, calls: list[Call]) -> list[Any]:
        with _lock:
            answers = _process().ask(self._arguments, calls)
        for kind, value in answers:
            if kind == "invalid":
                raise ModelError(f"{self.name} chat template is not valid Jinja: {value}")
            if kind == "limit":
                raise ModelError(
                    f"{self.name} chat template needs more than {value}; set another "
                    "(`model.chat_template: chatml`, or a Jinja file)"
                )
        return [ValueError(value) if kind == "refused" else value for kind, value in answers]


class _Process:
    """The process that renders, seen from the one that asks. It ends when its input does."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, str], int] = {}
        try:
            self._child = subprocess.Popen(
                module("kubetune.data.text.template_process", SECONDS, SECONDS_OF_ALL, MEMORY),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for who asks
            )
            for stream in (self._child.stdin, self._child.stdout):
                _widen(stream)
        except OSError as error:
            raise EnvironmentFault(
                f"the process that renders chat templates cannot be started: {error}"
            ) from error

    def ask(
        self, template: tuple[str, dict[str, str], str, str | None], calls: list[Call]
    ) -> list[tuple[str, Any]]:
        key = (template[0], repr(template[1:]))
        number = self._templates.get(key)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            _send(
                self._child.stdin,
                pickle.dumps((number, template if number is None else None, calls)),
            )
            number, answers = marshal.loads(_receive(self._child.stdout))
        except (OSError, EOFError) as error:
            code = self._child.wait()
            end()
            if code == -signal.SIGXCPU:
                return [("limit", f"{SECONDS} seconds of processor time for one conversation")]
            raise EnvironmentFault(
                f"the process that renders chat templates was killed ({code}), probably for want of memory; run the "
                "same command again"
            ) from error
        if number is not None:
            self._templates[key] = number
        return list(answers)

    def close(self) -> None:
        """End the process; it has nothing to save."""
        for stream in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        self._child.kill()
        self._child.wait()

    def disown(self) -> None:
        """Let go of a process that belongs to the one that forked this one."""
        self._child.returncode = 0  # or Python would wait for it
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


_current: _Process | None = None
_lock = threading.Lock()


def _process() -> _Process:
    global _current
    if _current is None:
        _current = _Process()
    return _current


def _start_anew() -> None:
    """After a fork: the renderer is the parent's."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.disown()
        _current = None


os.register_at_fork(after_in_child=_start_anew)


@atexit.register
def end() -> None:
    """End the process that renders, if there is one; what needs it starts another."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def _widen(stream: IO[bytes] | None) -> None:
    """Let a pipe take a batch at once: each time it is full two processes change places."""
    if stream is not None and hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # a user may have no more such memory to give to pipes
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _send(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(8))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    content: bytes = stream.read(int.from_bytes(head))
    return content


class _TooSlow(BaseException):
    """Not an Exception: a template's own errors are caught as such."""


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise _TooSlow


class _Allowance:
    """The processor time of a template over all conversations, so that many slow ones do not add up to hours."""

    def __init__(self, seconds: int) -> None:
        self._seconds = seconds
        self._used = 0.0
        self._conversations = 0

    def take(self, seconds: float, conversations: int) -> tuple[str, str] | None:
        """Count what was used; return the answer that says so once it is too much."""
        self._used += seconds
        self._conversations += conversations
        if self._used <= self._seconds + SECONDS_FOR_EACH * self._conversations:
            return None
        count = f"{self._conversations:,} conversation{'s' * (self._conversations > 1)}"
        return "limit", f"{self._used:.0f} seconds of processor time for {count}"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _arm(seconds: int) -> float:
    """Start the time that a conversation may take anew, and say when that was."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(_processor_seconds()) + seconds + 1
    # The timer interrupts Python; what one instruction does, such as a power of powers, only the kernel ends.
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    return time.monotonic()


def _answer(
    template: ChatTemplate | None, call: Call, seconds: int, memory: int
) -> tuple[str, Any]:
    """Answer to a call, as plain values: `done`, `invalid`, `refused` or `limit`, and what belongs to it."""
    method, arguments, options = call
    try:
        if template is None:
            return "made", ChatTemplate(*arguments)
        value = (
            template.closing
            if method == "closing"
            else getattr(template, method)(*arguments, **options)
        )
    except _TooSlow:
        return "limit", f"{seconds} seconds of processor time for one conversation"
    except MemoryError:
        return "limit", f"{memory >> 20:,} MiB of memory for one conversation"
    except ValueError as error:
        return "invalid" if template is None else "refused", str(error)
    if isinstance(value, Rendered):
        return "done", tuple(getattr(value, field.name) for field in fields(Rendered))
    return "done", value


def _serve(
    requests: IO[bytes], answers: IO[bytes], seconds: int, seconds_of_all: int, memory: int
) -> None:
    templates: list[tuple[ChatTemplate, _Allowance]] = []
    while True:
        number, made_of, calls = pickle.loads(_receive(requests))
        results: list[tuple[str, Any]] = []
        if number is None:
            _arm(seconds)
            results = [_answer(None, ("", made_of, {}), seconds, memory)]
            if results[0][0] == "made":
                templates.append((results.pop()[1], _Allowance(seconds_of_all)))
                number = len(templates) - 1
        if number is not None:
            template, allowance = templates[number]
            results = _answer_all(template, allowance, calls, seconds, memory)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, marshal.dumps((number, results)))


def _answer_all(
    template: ChatTemplate, allowance: _Allowance, calls: list[Call], seconds: int, memory: int
) -> list[tuple[str, Any]]:
    """Return the answers to all calls, or up to the first that needs more than a limit, which is the last then."""
    results: list[tuple[str, Any]] = []
    armed, used, counted = _arm(seconds), _processor_seconds(), 0
    for call in calls:
        # Asking the kernel each time would cost as much as rendering.
        if time.monotonic() - armed > _REARM_SECONDS:
            armed, before = _arm(seconds), used
            used = _processor_seconds()
            if limit := allowance.take(used - before, len(results) - counted):
                return [*results, limit]
            counted = len(results)
        results.append(_answer(template, call, seconds, memory))
        if results[-1][0] == "limit":
            return results
    limit = allowance.take(_processor_seconds() - used, len(results) - counted)
    return results if limit is None else [*results, limit]


def _end_with(pipe: int) -> None:
    """End this process when nobody is left who could ask it, though it may be rendering."""
    watched = select.poll()
    watched.register(pipe, 0)  # of a pipe that was hung up the kernel always tells
    watched.poll()
    os._exit(0)


def main() -> None:
    """Render what is asked for on standard input until it ends."""
    seconds, seconds_of_all, memory = map(int, sys.argv[1:4])
    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
    signal.signal(signal.SIGPROF, _stop)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # where there is no such limit or file
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, hard))
    with contextlib.suppress(EOFError, BrokenPipeError):
        _serve(sys.stdin.buffer, sys.stdout.buffer, seconds, seconds_of_all, memory)


if __name__ == "__main__":
    main()
