"""Facts about records of which nothing is known: what their columns are called, and what is in each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubetune.data.column_facts import Columns
from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    QUESTIONS,
    RIGHT_ANSWERS,
    names_bad_answer,
    names_metadata,
    names_origin,
    names_question,
    names_subject,
)
from kubetune.data.column_uses import is_shown
from kubetune.data.media import medium_of
from kubetune.data.reading.fields import NOTHING
from kubetune.data.reading.labelled import pair_in
from kubetune.data.reading.record import Record
from kubetune.data.record_values import RecordValue, is_empty

# Texts that are asked about. Without another question they are what is asked.
_SUBJECTS_ALONE: Final = ("source", "context")
# What columns are called elsewhere: our name, and the others in the order in which they are believed.
_OTHER_NAMES: Final = {
    "messages": ("messages", "conversation", "dialog", "dialogue", "chat", "turns"),
    "chosen": ("chosen", "preferred", "winner", "accepted", "better", "response_chosen"),
    "rejected": ("rejected", "dispreferred", "loser", "worse", "response_rejected"),
    "image": ("image", "image_path", "image_file", "file_name", "filename", "img", "picture"),
    "prompt": (
        "prompt", *QUESTIONS, "input", "request", "user", "human", *_SUBJECTS_ALONE,
    ),
    "completion": (
        *ANSWERS, "reply", "assistant", "bot", "target", "summary", "highlights", "tldr", "translation",
        *RIGHT_ANSWERS, "best_answer", "correct_answer", "gold_answer", "a",
    ),
    "label": (
        "label", "labels", "gold_label", "gold", "class", "category", "sentiment", "intent", "topic", "rating", "stars",
    ),
    "text": ("text", "sentence", "review", "comment", "body", "content", "document", "article", "message"),
    "text_pair": ("text_pair",),
}  # fmt: skip
# Names that answers have in some data, and classes in others.
_UNSURE_ANSWERS: Final = ("target", "ground_truth")


@dataclass
class SeenRecords:
    """Facts about the records that were read."""

    records: Sequence[Record]
    names: Mapping[str, str]  # keys that hold something, by their names as one compares them
    by_name: dict[str, str | None]  # our name -> the key that stands for it
    facts: Columns  # what is in each column
    images: Sequence[str] = ()  # columns of images

    @classmethod
    def of(cls, records: Sequence[Record]) -> SeenRecords:
        """Look at records, of which there is at least one."""
        names = _names_in(records)
        facts = Columns()
        for record in records:
            for key in names.values():
                if record.value.get(key) not in (None, "", [], {}):
                    facts.note(key, record.value, {}, ())
        by_name = _by_our_names(names, records)
        images = [key for key in names.values() if _are_images(key, records)]
        if not by_name["image"] and len(images) == 1 and images[0] != "images":
            by_name["image"] = images[0]
        seen = cls(records, names, by_name, facts, images)
        # Many different labels are no classes, whatever their column is called.
        label = by_name["label"]
        if label is not None and not seen.may_be_class(label):
            by_name["label"] = None
        return seen

    @property
    def first(self) -> RecordValue:
        """The first record, as its file has it."""
        return self.records[0].value

    @property
    def compares_texts(self) -> bool:
        """True if two columns are called like texts that are compared."""
        return pair_in(self.names.values())

    def may_be_class(self, name: str) -> bool:
        """True if a column that is called like a label may be one."""
        facts = self.facts[name]
        is_sure = name.lower() in ("label", "labels", "class")
        return is_sure or facts.records < 30 or facts.is_short

    def is_class_for_answer(self, name: str) -> bool:
        """True if a column that is called like an answer says yes or no, or holds few values and may be called so."""
        facts = self.facts[name]
        if not isinstance(self.first.get(name), str) and facts.are_verdicts():
            return True
        is_question = self.by_name["prompt"] in PROMPTS
        is_unsure = name.lower() in _UNSURE_ANSWERS and not is_question
        return is_unsure and facts.is_class(name, records=len(self.records))

    def text_with_subject(self) -> tuple[str, str] | None:
        """Return a text and the one that it is about, such as a claim and its evidence; None unless these are all texts."""
        texts = self.texts()
        subjects = [name for name in texts if names_subject(name)]
        if len(texts) != 2 or len(subjects) != 1 or self.compares_texts:
            return None
        texts.remove(subjects[0])
        return texts[0], subjects[0]

    def classes(self) -> list[str]:
        """Return the columns that are classes by their values."""
        number = len(self.records)
        return [name for name, facts in self.facts.items() if facts.is_class(name, records=number)]

    def texts(self) -> list[str]:
        """Return the columns of texts that may be learned: no ids, no classes, no answers that are bad."""
        classes = self.classes()
        texts = []
        for name, facts in self.facts.items():
            holds_text = isinstance(self.first.get(name), str) and facts.words >= 2 * facts.records
            is_metadata = names_metadata(name, facts.mean_words())
            is_other = is_metadata or names_bad_answer(name) or name in classes
            if holds_text and not is_other:
                texts.append(name)
        return texts


def _names_in(records: Sequence[Record]) -> dict[str, str]:
    """Return the keys of records that hold something, by their names as one compares them.

    {"Question": …, "Final Answer": …}  →  {"question": "Question", "final_answer": "Final Answer"}
    """
    names: dict[str, str] = {}
    for record in records:
        for key, value in record.value.items():
            if value not in (None, "", [], {}):
                names.setdefault(key.strip().lower().replace(" ", "_").replace("-", "_"), key)
    return names


def _by_our_names(names: Mapping[str, str], records: Sequence[Record]) -> dict[str, str | None]:
    """Return the key that stands for each of our names."""
    by_name = {expected: _find(expected, names) for expected in _OTHER_NAMES}
    # `turns` may be their number, and a `chat` one text.
    talk = by_name["messages"] or ""
    if not any(_is_talk(record.value.get(talk)) for record in records):
        by_name["messages"] = None
    # A text is not asked while another column is called like the question about it.
    about = (None, *map(names.get, ("input", *_SUBJECTS_ALONE)))
    if by_name["prompt"] in about:
        asked = [key for key in names.values() if names_question(key)]
        if len(asked) == 1 and _is_text(records, asked[0]):
            by_name["prompt"] = asked[0]
    # A `filename` may be that of the text, too.
    image = by_name["image"]
    if image is not None:
        values = [record.value.get(image) for record in records]
        if not any(_is_image(value) for value in values):
            by_name["image"] = None
    return by_name


def _is_talk(value: Any) -> bool:
    """True for a list of messages, also as JSON, which tables hold."""
    is_json = isinstance(value, str) and re.match(r"\s*\[\s*[{\[]", value) is not None
    return isinstance(value, list) or is_json


def _is_text(records: Sequence[Record], name: str) -> bool:
    """True if the first value of a column is a text."""
    held = (record.value.get(name) for record in records)
    return isinstance(next((value for value in held if not is_empty(value)), None), str)


def _is_image(value: Any) -> bool:
    """True if a value may be an image: its path, its bytes, or a list of these."""
    return isinstance(value, (dict, list)) or medium_of(value) == "image"


def _are_images(name: str, records: Sequence[Record]) -> bool:
    """True if a column holds images and nothing else, whatever it is called."""
    values = [record.value.get(name) for record in records]
    held = [value for value in values if value not in NOTHING]
    return not names_origin(name) and all(map(is_shown, held))


def _find(expected: str, names: Mapping[str, str]) -> str | None:
    """Return the key that stands for one of our names; None where there is none."""
    # In the order in which they are believed.
    for name in _OTHER_NAMES[expected]:
        if name in names:
            return names[name]
    return None
