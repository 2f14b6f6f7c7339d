"""Render chat templates in another process, whose time and memory have limits.

A template comes with a model and is somebody else's program. Jinja's sandbox keeps it from files and the network, but
not from doubling a string sixty times, or from endless loops. So another process renders, the kernel limits its memory
and processor time, and this process reports when a limit was reached:

    LimitedTemplate._ask ──pickle: seconds, template, calls──▶ main (the other process)
                         ◀──marshal: answers────────────────── _answer_all

Conversations are sent by the hundred, so that this takes almost no time.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any, Final

from kubetune.base.humanize import counted
from kubetune.base.processes import module
from kubetune.data.text.turns.marks import Message
from kubetune.data.text.turns.template import ChatTemplate, Rendered
from kubetune.errors import EnvironmentFault, ModelError

# Processor time that a template may take for one request, whatever is in it.
SECONDS: Final = 10
# Processor time that it may take for each conversation beyond that. Published templates take a fiftieth of this.
SECONDS_FOR_EACH: Final = 0.05
# Bytes that a template may use beyond what the process itself needs.
MEMORY: Final = 1 << 30

# A pipe that takes a whole batch, so that two processes need not take turns within it.
_PIPE_BYTES: Final = 1 << 19

# What a ChatTemplate is made of: source, special tokens, name, date, tokens that may be tags.
Made = tuple[str, tuple[tuple[str, str], ...], str, str | None, tuple[str, ...]]
# A method of ChatTemplate and its arguments.
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
# `done` and the result, or `refused`, `invalid`, `limit` and why.
Answer = tuple[str, Any]


class LimitedTemplate:
    """A `ChatTemplate` with limits, which another process renders. Making one renders nothing.

    Its methods raise ValueError as ChatTemplate's do, and ModelError if the template is no valid Jinja or exceeds a
    limit.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        name: str = "the tokenizer's",
        date: str | None = None,
        tokens: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`tokens`: asked for at the first rendering, because they are those of a tokenizer that takes long to load."""
        self.source = source
        self.name = name
        self._special_tokens = tuple(special_tokens.items())
        self._date = date
        self._tokens = tokens

    @cached_property
    def _made(self) -> Made:
        return (self.source, self._special_tokens, self.name, self._date, tuple(self._tokens()))

    def load(self) -> None:
        """Let the other process read the template. Raise ModelError as all methods do."""
        _ = self.closing

    @cached_property
    def closing(self) -> str:
        """Text that the template writes after an answer, such as `<|im_end|>`; empty if it writes nothing."""
        return str(self._call("closing"))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """Return the text of a conversation, as `ChatTemplate.render`."""
        return str(self._call("render", messages, tools, generation_prompt=generation_prompt))

    def left_out(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> list[str]:
        """Return in words what the template leaves out of the prompt, as `ChatTemplate.left_out`."""
        return list(self._call("left_out", messages, tools))

    def render_all(
        self, chats: Sequence[tuple[Sequence[Message], Sequence[Any], Sequence[int]]]
    ) -> list[Rendered | ValueError]:
        """Return `ChatTemplate.render_answers` of each (messages, tools, trained), or the error that it raises."""
        calls: list[Call] = []
        for messages, tools, trained in chats:
            calls.append(("render_answers", (messages, tools), {"trained": trained}))
        rendered: list[Rendered | ValueError] = []
        for kind, value in self._ask(calls):
            if kind == "refused":
                rendered.append(ValueError(value))
            else:
                rendered.append(Rendered(*value))

        return rendered

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        ((kind, value),) = self._ask([(method, arguments, options)])
        if kind == "refused":
            raise ValueError(value)
        return value

    def _ask(self, calls: list[Call]) -> list[Answer]:
        with _lock:
            answers = _process().ask(self._made, calls)
        for kind, value in answers:
            if kind == "invalid":
                raise ModelError(f"{self.name} chat template is not valid Jinja: {value}")
            if kind == "limit":
                raise ModelError(
                    f"{self.name} chat template needs more than {value}; set another "
                    "(`model.chat_template: chatml`, or a Jinja file)"
                )
        return answers


class _Process:
    """The process that renders, as seen by the one that asks. It ends when its input ends."""

    def __init__(self) -> None:
        try:
            self.child = subprocess.Popen(
                module("kubetune.data.text.turns.limited_template", MEMORY),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the process that asks
            )
        except OSError as error:
            raise EnvironmentFault(
                f"the process that renders chat templates cannot be started: {error}"
            ) from error

        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self._requests = self.child.stdin
        self._answers = self.child.stdout
        _widen(self._requests)
        _widen(self._answers)

    def ask(self, made: Made, calls: list[Call]) -> list[Answer]:
        # Processor time, so that a busy machine refuses no template.
        seconds = math.ceil(SECONDS + SECONDS_FOR_EACH * len(calls))
        try:
            _send(self._requests, pickle.dumps((seconds, made, calls)))
            # marshal makes only plain values. pickle could run code, and a template has influence on what comes back.
            return list(marshal.loads(_receive(self._answers)))
        except (OSError, EOFError) as error:
            # It has ended. A template that took too long was ended by SIGXCPU.
            code = self.child.wait()
            end()
            if code == -signal.SIGXCPU:
                conversations = counted(max(1, len(calls)), "conversation")
                return [("limit", f"{seconds} seconds of processor time for {conversations}")]
            raise EnvironmentFault(
                f"the process that renders chat templates was killed ({code}), probably for lack of memory; run the "
                "same command again"
            ) from error

    def close(self) -> None:
        """End the process; it has nothing to save."""
        self._close_pipes()
        self.child.kill()
        self.child.wait()

    def disown(self) -> None:
        """Let go of the process after a fork: it belongs to the parent."""
        self.child.returncode = 0  # or Python would wait for it
        self._close_pipes()

    def _close_pipes(self) -> None:
        for stream in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                stream.close()


# One process for all templates. It is started when it is first needed.
_current: _Process | None = None
_lock = threading.Lock()


def _process() -> _Process:
    global _current
    if _current is None:
        _current = _Process()
    return _current


def _start_anew() -> None:
    """Forget the process that renders after a fork, and a lock that a thread of the parent may hold."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.disown()
        _current = None


os.register_at_fork(after_in_child=_start_anew)


@atexit.register
def end() -> None:
    """End the process that renders, if there is one. Whoever needs it later starts another."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def _widen(stream: IO[bytes]) -> None:
    """Let a pipe hold a whole batch."""
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # users may have only so much memory in pipes
            fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _send(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(8))
    stream.write(content)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    # The length, then as many bytes.
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    content: bytes = stream.read(int.from_bytes(head))
    return content


@lru_cache(maxsize=16)
def _template(made: Made) -> ChatTemplate:
    source, special_tokens, name, date, tokens = made
    return ChatTemplate(source, dict(special_tokens), name, date, tokens)


def _answer_all(made: Made, calls: list[Call]) -> list[Answer]:
    """Return the answers to all calls, or only the limit that one of them exceeds."""
    try:
        template = _template(made)
    except MemoryError:
        return [_memory_limit()]
    except ValueError as error:
        return [("invalid", str(error))]

    answers: list[Answer] = []
    for method, arguments, options in calls:
        try:
            value = getattr(template, method)
            if callable(value):
                value = value(*arguments, **options)
        except MemoryError:
            return [_memory_limit()]
        except ValueError as error:
            answers.append(("refused", str(error)))
            continue

        if isinstance(value, Rendered):  # marshal knows no dataclasses
            value = tuple(getattr(value, field.name) for field in fields(Rendered))
        answers.append(("done", value))

    return answers


def _memory_limit() -> Answer:
    return "limit", f"{int(sys.argv[1]) >> 20:,} MiB of memory for one conversation"


def _allow(seconds: int) -> None:
    """Let the kernel end this process by SIGXCPU when it has used this much more processor time."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    # The kernel counts from the start of the process, so each request moves the limit on.
    limit = math.ceil(time.process_time()) + seconds
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, most))


def _limit_memory(more: int) -> None:
    """Let this process use so many bytes more than now."""
    with contextlib.suppress(OSError, ValueError):  # where there is no such limit or file
        # Its first number is the size of the address space in pages.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, most))


def _end_with(pipe: int) -> None:
    """End this process when the other end of the pipe is closed, even while a template is rendered."""
    watched = select.poll()
    watched.register(pipe, 0)  # no event is asked for, but the kernel always reports a closed pipe
    watched.poll()
    os._exit(0)


def main() -> None:
    """Answer requests on standard input until it ends."""
    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # SIGXCPU would leave a core file
    _limit_memory(int(sys.argv[1]))
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            seconds, made, calls = pickle.loads(_receive(sys.stdin.buffer))
            _allow(seconds)
            _send(sys.stdout.buffer, marshal.dumps(_answer_all(made, calls)))


if __name__ == "__main__":
    main()
