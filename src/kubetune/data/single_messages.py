"""Records that are one message of a conversation each, and conversations that are written as one text.

{"text": "Who?", "role": "prompter", "message_id": "a", "parent_id": null}      a row of a tree of messages
{"utterance": "Who?", "speaker": "user", "dialogue_id": 3}                      a row of a conversation
{"chat": "USER: Who?\\nASSISTANT: He."}                                          a conversation as a text
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kubetune.data.column_names import words_of_name
from kubetune.data.column_words import in_words, in_yaml
from kubetune.data.record_values import RecordValue

# Last words of names of columns that say who wrote a message.
_SPEAKER_NAMES: Final = frozenset(("role", "speaker", "sender", "from"))
# Who speaks in conversations with a model.
_SPEAKERS: Final = frozenset(
    ("user", "human", "prompter", "assistant", "gpt", "chatgpt", "chatbot", "bot")
)
# Who speaks in others; the same names have roles in texts of other kinds.
_OTHER_SPEAKERS: Final = frozenset(
    ("agent", "customer", "client", "operator", "system", "model", "ai", "support")
)
# Words of names of columns that say which conversation a message is of, or where in it.
_PLACES: Final = frozenset(
    ("parent", "conversation", "dialogue", "dialog", "thread", "turn", "session", "tree")
)
# The columns that `kubetune data convert` reads trees by.
TREE_KEYS: Final = frozenset(("message_id", "parent_id", "role", "text"))
_ASKED: Final = r"(?im)^\W*(user|human|prompter|customer)\W{0,3}:"
_ANSWERED: Final = r"(?im)^\W*(assistant|gpt|chatgpt|bot|chatbot|ai|agent)\W{0,3}:"


def speaker_column(value: RecordValue) -> str:
    """Return the column that says who wrote the text of a record; empty if none does."""
    has_place = any(not _PLACES.isdisjoint(words_of_name(name)) for name in value)
    speakers = _SPEAKERS | _OTHER_SPEAKERS if has_place else _SPEAKERS
    for name, speaker in value.items():
        words = words_of_name(name)
        is_called = bool(words) and words[-1] in _SPEAKER_NAMES
        if is_called and isinstance(speaker, str) and speaker.strip().lower() in speakers:
            return name
    return ""


def require_whole_conversation(
    value: RecordValue, names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ValueError for a `text` that is one message of a conversation. `names`: the file's, by those of the record."""
    speaker = speaker_column(value)
    if not speaker:
        return
    text = names.get("text", "text")
    # Such rows become conversations by one command.
    if value.keys() >= TREE_KEYS and not names:
        how = "`kubetune data convert FILE -o train.jsonl` makes conversations of such rows"
    else:
        how = "write all messages of a conversation into one record, as `messages` with `role` and `content`"
    raise ValueError(
        f"has `{speaker}: {str(value[speaker])[:40]}` beside `{text}`, so it is one message of a conversation, and would be "
        f"learned as a text by itself; {how}, or give `{in_yaml({'text': text})}` to learn each message by itself"
    )


def written_talk(value: RecordValue) -> str:
    """Return the column whose text is a conversation, with the names of who speaks; empty without one."""
    for name, text in value.items():
        if isinstance(text, str) and re.search(_ASKED, text) and re.search(_ANSWERED, text):
            return name
    return ""


def talk_in_words(name: str) -> str:
    """Return what is said of a conversation that is written as one text."""
    return (
        f"`{name}` is a conversation written as one text: make it `messages` with `role` and `content`, of "
        f"which only the assistant's are learned, or give `{in_yaml({'text': name})}` (`{in_words({'text': name})}` of "
        "`kubetune init`) to learn all of it"
    )
