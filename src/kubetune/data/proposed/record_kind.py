"""The kind of records of which nothing is known: texts to write, pairs, verdicts, classes, prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kubetune.config.schema import RecordKind
from kubetune.data.column_names import ANSWERS, QUESTIONS, TALKS, names_thought
from kubetune.data.proposed.seen_records import SeenRecords
from kubetune.data.proposed.trial_reading import can_be_read
from kubetune.data.reading.preferences import likely_kind
from kubetune.data.reading.prompts import right_answer
from kubetune.data.record_values import RecordValue, is_prose, is_thought


def kind_of(seen: SeenRecords, columns: Mapping[str, str]) -> RecordKind:
    """Return the kind of the records."""
    by_name = seen.by_name
    # Two answers to compare, or answers that are judged.
    if by_name["chosen"] and by_name["rejected"]:
        return "pair"

    kinds: Counter[RecordKind] = Counter()
    # A record with a column that is named as the text has a class too, whatever else it holds.
    names = {} if "text" in columns else columns
    for record in seen.records:
        named = {key: record.value.get(name) for key, name in names.items()}
        kinds[likely_kind({**record.value, **named})] += 1
    kind = kinds.most_common(1)[0][0]
    # Other numbers than 0 and 1 are no verdicts.
    if kind == "judged" and len(kinds) > 1:
        kind = "text"
    if kind != "text":
        return kind

    if "label" in columns:
        return "labelled"
    if columns:
        return "text"
    if all(_lacks_answer(record.value) for record in seen.records):
        return "prompt"
    _take_class_for_answer(seen)
    if _has_answer_or_image(seen):
        return "text"
    changes = _class_columns(seen)
    if changes is not None:
        by_name.update(changes)
        return "labelled"
    # Neither of two texts that are compared is the text to learn.
    if seen.compares_texts:
        by_name["text"] = None
    return "text"


def _take_class_for_answer(seen: SeenRecords) -> None:
    """Note in `seen.by_name` that the column of answers holds classes, if it does."""
    answer = seen.by_name["completion"]
    if answer is not None and seen.is_class_for_answer(answer):
        seen.by_name["completion"] = None
        seen.by_name["label"] = seen.by_name["label"] or answer


def _has_answer_or_image(seen: SeenRecords) -> bool:
    """True if records have more than texts and classes: a conversation, an answer or an image."""
    by_name = seen.by_name
    is_talk = by_name["messages"] is not None or "conversations" in seen.first
    return is_talk or by_name["completion"] is not None or by_name["image"] is not None


def _class_columns(seen: SeenRecords) -> dict[str, str | None] | None:
    """Return what texts with classes change in `seen.by_name`; None if records are no such texts."""
    by_name = seen.by_name
    classes = [name for name in seen.classes() if name != by_name["text"]]
    label = by_name["label"]
    if not label and len(classes) == 1:
        label = classes[0]

    about = seen.text_with_subject()
    if about is not None and label is not None:
        return {"text": about[0], "text_pair": about[1], "label": label}

    has_label = by_name["label"] and by_name["text"]
    if has_label or can_be_read(seen.records[0], "labelled"):
        return {}

    # Two texts that are compared, whatever the column with the verdict is called.
    if seen.compares_texts:
        return None if label is None else {"label": label, "text": None}

    texts = [by_name["text"]] if by_name["text"] else seen.texts()
    if len(classes) == 1 and len(texts) == 1:
        return {"label": classes[0], "text": texts[0]}
    return None


def _lacks_answer(value: RecordValue) -> bool:
    """True for a conversation that does not end with an answer, and for a prompt with at most a right answer.

    A right answer with the thoughts that lead to it is an answer to learn.
    """
    for key in TALKS:
        turns = value.get(key)
        if isinstance(turns, list) and turns and isinstance(turns[-1], Mapping):
            speaker = turns[-1].get("role", turns[-1].get("from"))
            return speaker in ("user", "human", "tool", "observation")

    if any(value.get(key) not in (None, "", [], {}) for key in ("text", *TALKS, *ANSWERS)):
        return False
    prompt = value.get("prompt")
    if isinstance(prompt, list):
        return bool(prompt)

    if any(names_thought(key) and is_thought(item) for key, item in value.items()):
        return False
    asks = any(is_prose(value.get(key)) for key in (*QUESTIONS, "prompt"))
    return asks and right_answer(value) is not None
