"""Texts that a question is about, such as a passage or choices: a record whose reading would leave one out is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kubetune.data.choices import choices_of
from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    TALKS,
    names_answer,
    names_metadata,
    names_subject,
    names_thought,
    words_of_name,
)
from kubetune.data.column_uses import with_subject, with_system
from kubetune.data.column_words import in_list, in_words, in_yaml
from kubetune.data.media import medium_of
from kubetune.data.record_values import RecordValue, count_words, is_empty, is_held, key_of, leaves

# Words of names of lists of objects that are about an answer, or that a model is given in another way.
_NO_TABLES: Final = frozenset((
    "meta", "metadata", "info", "extra", "entity", "entitie", "span", "mention", "annotation", "citation", "label", "reward",
    "tool", "function", "call", "history", "image", "rating",
))  # fmt: skip


def left_subjects(
    value: RecordValue, columns: Mapping[str, str], *, needs_answer: bool
) -> list[tuple[str, ...]]:
    """Return the columns that a question is about and that would be left out; none if `columns` decide.

    Columns that hold a choice each stand together: [("article",), ("A", "B", "C", "D")].
    """
    # Whoever names a question, an answer or the text to learn has seen the other columns.
    named = (*PROMPTS, *ANSWERS, *TALKS, "chosen", "rejected", "text")
    is_decided = not columns.keys().isdisjoint(named)
    question = key_of((*TALKS, *PROMPTS), value, {})
    answer = key_of(ANSWERS, value, {})
    is_talk = question in TALKS
    if is_decided or not question or (needs_answer and not answer and not is_talk):
        return []
    left = []
    choices = None if is_talk else choices_of(value, question, value.get(answer))
    if choices is not None and not is_held(
        list(choices.texts), [value[question], value.get("input")]
    ):
        left.append(choices.columns)
    of_choices = choices.columns if choices is not None else ()
    for name, item in value.items():
        if name in (question, answer, "input", *of_choices):
            continue
        # By its name alone: a list of numbers is as much of a context as a text; the path of a document is none.
        is_subject = names_subject(name) and not is_empty(item) and medium_of(item) is None
        if name == "text" and not is_talk:
            is_subject = _is_passage(item, value[question], value.get(answer))
        if not is_subject and not is_talk:
            is_subject = _is_table(name, item, value.get(answer))
        if is_subject and not is_held(item, [value[question], value.get("input")]):
            left.append((name,))
    return left


def _is_passage(text: Any, question: Any, answer: Any) -> bool:
    """True for a `text` that a question is about: one that is not the question with its answer, written out as a whole.

    An answer alone does not show that, since a passage holds the answers that are taken from it.
    """
    if not isinstance(text, str) or is_empty(text):
        return False
    # A conversation, or a text.
    asked = question
    if isinstance(question, list):
        asked = [turn.get("content") if isinstance(turn, Mapping) else turn for turn in question]
    whole = [" ".join(text.split())]
    parts = [" ".join(part.split()) for part in leaves([asked, answer])]
    return count_words(asked) < 2 or not is_held(parts, whole)


def _is_table(name: str, value: Any, answer: Any) -> bool:
    """True for a list of objects or rows, or an object of such, that holds the answer of a record."""
    if not isinstance(answer, str) or len(answer.strip()) < 3:
        return False
    parts = list(value.values()) if isinstance(value, Mapping) else [value]
    are_rows = any(
        isinstance(part, list) and part and isinstance(part[0], (list, Mapping)) for part in parts
    )
    if not are_rows or name in (*PROMPTS, *TALKS):
        return False
    is_metadata = names_metadata(name, count_words(value))
    if is_metadata or names_answer(name) or names_thought(name):
        return False
    if not _NO_TABLES.isdisjoint(words_of_name(name)):
        return False
    return any(answer.strip() in leaf for leaf in leaves(value))


def subject_columns(
    left: Sequence[tuple[str, ...]], value: RecordValue, columns: Mapping[str, str]
) -> dict[str, str]:
    """Return the `columns` by which what `left_subjects` returned becomes part of the prompt; none if none can do that."""
    if len(left) != 1 or len(left[0]) != 1:
        return {}
    (name,) = left[0]
    if key_of(TALKS, value, {}):
        return with_system(name, value)
    return with_subject(name, value, columns)


def require_subjects(
    value: RecordValue,
    columns: Mapping[str, str],
    *,
    needs_answer: bool,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise ValueError for a text that a question is about, and that would be left out.

    `columns`: of the run file. `names`: the file's, by those of the record, where somebody else than the user chose them.
    """
    left = left_subjects(value, columns, needs_answer=needs_answer)
    answer = key_of(ANSWERS, value, columns)
    # If the answer is no text, the reader says so: no columns make a text of it.
    is_text = isinstance(value.get(answer, ""), str)
    if not left or (needs_answer and not is_text):
        return
    question = key_of((*TALKS, *PROMPTS), value, {})
    left_names = [name for group in left for name in group]
    asked = names.get(question, question)
    it = "it" if len(left_names) == 1 else "they"
    has = f"has {in_list(left_names)} beside `{asked}`, and {it} would be left out"
    use = subject_columns(left, value, {})
    if use:
        use = {key: names.get(name, name) for key, name in use.items()}
        use = use if "input" in use else {**names, **use}
    if use and left_names == ["text"] and needs_answer:
        raise ValueError(
            f"has `text` beside `{asked}` and `{names.get(answer, answer)}`, and either would be lost; give "
            f"`{in_yaml(use)}` (`{in_words(use)}` beside `--data`) if the question is about it, or `format: text` to "
            "learn the text alone"
        )
    if use:
        raise ValueError(
            f"{has} of the prompt; give `{in_yaml(use)}` "
            f"(`{in_words(use)}` beside `--data`), or name only the other columns to leave it out"
        )
    into = f"`{asked}`"
    decided = _without_subjects(value, question, names)
    if question in TALKS:
        into = "a message"
    its = "its text"
    them = "it"
    if len(left_names) > 1:
        its = "their texts"
        them = "them"
    raise ValueError(
        f"{has} of the prompt; write {its} into {into} (`kubetune init FILE` gives a program where it can), or give "
        f"`{in_yaml(decided)}` to leave {them} out"
    )


def _without_subjects(
    value: RecordValue, question: str, names: Mapping[str, str]
) -> dict[str, str]:
    """Return the `columns` by which only the question and its answer are read."""
    answer = key_of(ANSWERS, value, {})
    # Messages stay under the name that says so.
    if question in TALKS or not isinstance(value[question], str):
        return {question: question, **names}
    decided = {"instruction": names.get(question, question)}
    if answer:
        decided["output"] = names.get(answer, answer)
    return decided
