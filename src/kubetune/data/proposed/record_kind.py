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
    # A column that is named as the text has a class beside it, whatever else the record holds.
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
    if not columns and all(_lacks_answer(record.value) for record in seen.records):
        return "prompt"
    if _are_labelled(seen, columns):
        return "labelled"
    return "text"


def _are_labelled(seen: SeenRecords, columns: Mapping[str, str]) -> bool:
    """Return True for texts with classes, and note in `seen.by_name` which columns these are."""
    by_name = seen.by_name
    answer = by_name["completion"]
    if answer is not None and not columns and seen.is_class_for_answer(answer):
        by_name["completion"] = None
        by_name["label"] = by_name["label"] or answer

    # A label beside a text, with nothing that is an answer: the classes of a classifier.
    talks = by_name["messages"] or by_name["completion"] or "conversations" in seen.first
    if talks or columns or by_name["image"]:
        return False

    classes = [name for name in seen.classes() if name != by_name["text"]]
    label = by_name["label"]
    if not label and len(classes) == 1:
        label = classes[0]
    about = seen.text_with_subject()
    if about is not None and label is not None:
        by_name["text"], by_name["text_pair"] = about
        by_name["label"] = label
        return True

    has_label = by_name["label"] and by_name["text"]
    if has_label or can_be_read(seen.records[0], "labelled"):
        return True

    # Two texts that are compared, whatever the column with the verdict is called.
    if seen.compares_texts:
        by_name["label"] = label
        by_name["text"] = None
        return label is not None

    if len(classes) == 1 and (by_name["text"] or len(seen.texts()) == 1):
        by_name["label"] = classes[0]
        by_name["text"] = by_name["text"] or seen.texts()[0]
        return True
    return False


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
