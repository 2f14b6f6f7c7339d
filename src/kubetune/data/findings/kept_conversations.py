"""Conversations of its data that a run keeps, so that a server can be asked later what ids it makes of them.

They are chosen to differ: one with tools, one with calls, one with thoughts, one with a system text, one with several turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kubetune.base import files, logs
from kubetune.data.column_names import REASONING
from kubetune.data.reading.examples import Chat, parts_of
from kubetune.data.reading.formats import convert
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.data.text.encode import trained_messages
from kubetune.errors import KubetuneError
from kubetune.rundir import shapes

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.data.spec import DataSpec

KEPT: Final = "conversations.json"
# Records of each source that are looked at, and conversations that are kept at most.
_LOOKED_AT: Final = 1000
_MOST: Final = 8
# Characters of a conversation with its tools. Longer ones are left out.
_LONGEST: Final = 20_000
# Conversations that are kept though they have nothing that others lack.
_FEWEST: Final = 3


@dataclass(frozen=True)
class Conversation:
    """What is before an answer, and the tools that the model may call."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] = ()

    def traits(self) -> set[str]:
        """Return what it has that a chat template may write in its own way."""
        roles = [message["role"] for message in self.messages]
        keys = {key for message in self.messages for key, value in message.items() if value}
        traits = {
            "tools": bool(self.tools),
            "calls": "tool_calls" in keys,
            "thoughts": not keys.isdisjoint(REASONING),
            "system": "system" in roles,
            "turns": roles.count("user") > 1,
        }
        return {name for name, is_so in traits.items() if is_so}


def keep(run_dir: Path, prepared: Prepared) -> None:
    """Write conversations of the data into the run directory, unless they are there or the data are no conversations."""
    path = run_dir / KEPT
    if path.exists() or prepared.tokenizer.chat is None:
        return
    try:
        chosen = _chosen(_conversations(prepared.spec))
    except (KubetuneError, OSError) as error:
        # The rows may be prepared, and their files gone since.
        reason = " ".join(str(error).split())
        logs.DATA.info("no conversations are kept for `serve --check`: %s", reason)
        return
    if chosen:
        content = json.dumps(
            {"conversations": [asdict(conversation) for conversation in chosen]}, default=str
        )
        files.write_atomic(path, content, within=run_dir)


def read(run_dir: Path) -> tuple[Conversation, ...]:
    """Return the conversations that a run keeps. Raise EnvironmentFault if the file is damaged."""
    path = run_dir / KEPT
    if not path.is_file():
        return ()
    conversations = []
    for kept in shapes.read(path)["conversations"]:
        conversations.append(Conversation(tuple(kept["messages"]), tuple(kept["tools"])))
    return tuple(conversations)


def _conversations(spec: DataSpec) -> Iterator[Conversation]:
    """Yield what is before the last answer of the first records of each source."""
    for source in spec.splits["train"]:
        for record in islice(read_source(source, Problems()), _LOOKED_AT):
            try:
                example = convert(
                    record.value, source.format, source.columns, kind=spec.record_kind
                )
            except ValueError:
                continue  # training has counted it
            chat = parts_of(example)[0]
            if not isinstance(chat, Chat) or chat.images:
                continue
            answers = trained_messages(chat)
            if answers and answers[-1] > 0:
                yield Conversation(chat.messages[: answers[-1]], chat.tools)


def _chosen(conversations: Iterator[Conversation]) -> Sequence[Conversation]:
    """Return the first conversations, and those with something that none before them has."""
    chosen: list[Conversation] = []
    known: set[str] = set()
    for conversation in conversations:
        traits = conversation.traits()
        if len(chosen) >= _FEWEST and traits <= known:
            continue
        if len(json.dumps(asdict(conversation), default=str)) > _LONGEST:
            continue
        chosen.append(conversation)
        known |= traits
        if len(chosen) == _MOST:
            break
    return chosen
