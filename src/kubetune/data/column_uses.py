"""How a column that nothing reads would be used: by which `columns` it is part of a prompt, an answer, thoughts.

Each function returns all `columns` that a run file would have then; none if the record has no place for the column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kubetune.data.choices import choices_of
from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    QUESTIONS,
    TALKS,
    names_answer,
    names_bad_answer,
    names_form,
    names_metadata,
    names_origin,
    names_question,
    names_subject,
    names_test,
    names_thought,
    names_truth,
    words_of_name,
)
from kubetune.data.media import is_on_web, medium_of
from kubetune.data.record_values import (
    RecordValue,
    count_words,
    is_empty,
    is_number,
    is_prose,
    is_thought,
    joined_texts,
    key_of,
    renamed,
)
from kubetune.data.right_answers import two_answers

# Names of what a text is judged or marked as, which no question is about.
_LABELS: Final = ("label", "labels")


class Roles(NamedTuple):
    """The columns of a record that training reads already, by what they are; empty for what none is."""

    question: str
    answer: str
    talk: str  # a conversation
    compared: str  # one of two answers to compare
    system: str

    @classmethod
    def of(cls, value: RecordValue, columns: Mapping[str, str]) -> Roles:
        """Find them by their names, or by the `columns` of a run file."""
        return cls(
            question=key_of(PROMPTS, value, columns),
            answer=key_of(ANSWERS, value, columns),
            talk=key_of(TALKS, value, columns),
            compared=key_of(("chosen", "rejected"), value, columns),
            system=key_of(("system", "system_prompt"), value, columns),
        )


def use_of(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a column of a record is used, in the first way that its name and its text allow."""
    if medium_of(value[name]) is not None:
        return _as_image(name, value, columns)
    if names_thought(name):
        return _as_thought(name, value, columns)
    for way in (_as_system, with_subject, _as_another_answer, _as_answer_to_text):
        use = way(name, value, columns)
        if use:
            return use
    return {}


def _as_image(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which an image is shown beside a question; none for a sound, or if another is shown."""
    roles = Roles.of(value, columns)
    has_other = "image" in columns or key_of(("images", "image"), value, columns)
    if has_other or not (roles.question or roles.talk) or not is_shown(value[name]):
        return {}
    return {**columns, "image": name}


def is_shown(value: Any) -> bool:
    """True if a value is an image that a model can be shown: a file, or its bytes, and not one on the web."""
    return medium_of(value) == "image" and not is_on_web(value)


def with_subject(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text of a record becomes part of its prompt; none if no columns can do that."""
    roles = Roles.of(value, columns)
    question = roles.question
    has_input = "input" in columns or (value.get("input") is not None and question != "input")
    # A conversation has its prompt in its messages, a classifier its texts as they are.
    is_classifier = not columns.keys().isdisjoint(("text", "label"))
    if not question or has_input or roles.talk or is_classifier:
        return {}
    are_texts = isinstance(value[question], str) and isinstance(joined_texts(value.get(name)), str)
    if not are_texts or question == name or names_answer(name) or name.lower() in _LABELS:
        return {}

    if _is_choice(name, value, roles):
        return {}
    chosen = {"instruction": question, "input": name}
    if roles.answer and not roles.compared:
        chosen["output"] = roles.answer
    return _whole(chosen, columns)


def _is_choice(name: str, value: RecordValue, roles: Roles) -> bool:
    """True for one of several choices, and for choices without the letters that name them: no question is about these."""
    right = value.get(roles.answer)
    choices = choices_of(value, roles.question, right)
    if choices is None or name not in choices.columns:
        return False
    is_whole = len(choices.columns) == 1 and right in choices.texts
    return not is_whole


def _as_thought(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which thoughts are read before the answer of a record; none if messages hold it.

    A prompt with its completion becomes a question with its answer, whose thoughts have a place.
    """
    roles = Roles.of(value, columns)
    if roles.talk or roles.compared or "label" in value:
        return {}
    if not roles.question or not roles.answer or roles.question == roles.answer:
        return {}

    chosen = {"instruction": roles.question, "output": roles.answer}
    if not columns and roles.question in QUESTIONS:
        # These names are known, whichever of them the record has.
        chosen = {}
    return _whole({**chosen, "reasoning_content": name}, columns)


def _as_another_answer(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which an answer takes the place of the one that is learned; none without a question."""
    roles = Roles.of(value, columns)
    are_texts = isinstance(value.get(roles.question), str) and isinstance(value[name], str)
    is_answer = name in ANSWERS or names_truth(name)
    if not is_answer or roles.talk or roles.compared or not are_texts:
        return {}

    # Both are named, whatever they are called: there are two answers.
    chosen = {"instruction": roles.question, "output": name}
    return {**_whole(chosen, columns), **chosen}


def _as_answer_to_text(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text is learned as the answer to the plain text beside it; none for other records."""
    others = (*PROMPTS, *ANSWERS, *TALKS, "chosen", "label", "labels")
    if columns or not isinstance(value.get("text"), str) or key_of(others, value, {}):
        return {}
    if not _is_text(value[name]) or names_test(name) or names_form(name):
        return {}
    return {"prompt": "text", "completion": name}


def _as_system(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text becomes the message of the system; none by another name, or if there is one."""
    words = re.findall(r"[a-z]+", name.lower())
    is_called = not {"sys", "system", "persona"}.isdisjoint(words)
    if not is_called or not _is_text(value[name]):
        return {}

    roles = Roles.of(value, columns)
    if roles.talk:
        return with_system(name, value)
    if roles.system or roles.compared or not roles.question or not roles.answer:
        return {}

    # A plain prompt has no place for it.
    chosen = {"instruction": roles.question, "output": roles.answer}
    return _whole({**chosen, "system": name}, columns)


def with_system(name: str, value: RecordValue) -> dict[str, str]:
    """Return the `columns` by which a text beside a conversation becomes its system message; none if it has one."""
    roles = Roles.of(value, {})
    turns = value.get(roles.talk)
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], Mapping):
        return {}
    speaker = turns[0].get("role", turns[0].get("from"))
    if roles.system or speaker in ("system", "developer"):
        return {}
    if not isinstance(value.get(name), str):
        return {}
    return {"system": name}


def _whole(chosen: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return all `columns` of a run file that gets these, with those that it has for other columns of the record."""
    whole = {key: column for key, column in chosen.items() if key != column}
    for key, column in columns.items():
        is_answer = "output" in chosen and key in ANSWERS
        if key not in chosen and column not in chosen.values() and not is_answer:
            whole[key] = column
    return whole


def likely_columns(value: RecordValue) -> dict[str, str]:
    """Return the columns of a record that may be its prompt, its answer and the thoughts before it; none in doubt."""
    prompt, completion = _likely_pair(value)
    if not prompt or not completion:
        return {}
    columns = {"prompt": prompt, "completion": completion}
    if two_answers(renamed(value, columns), {}) is not None:
        return {}
    subjects = []
    for name, item in value.items():
        if names_subject(name) and not is_empty(item) and medium_of(item) is None:
            subjects.append(name)
    if subjects:
        columns = with_subject(subjects[0], value, columns)
    if len(subjects) > 1 or not columns:
        return {}

    thoughts = []
    for name, text in value.items():
        if names_thought(name) and is_thought(text) and not is_number(text):
            thoughts.append(name)
    if len(thoughts) == 1:
        # A plain prompt has no place for them.
        about = {key: name for key, name in columns.items() if key == "input"}
        columns = {"instruction": prompt, **about, "output": completion}
        columns["reasoning_content"] = thoughts[0]
    images = [name for name, item in value.items() if is_shown(item) and not names_origin(name)]
    if len(images) == 1:
        columns["image"] = images[0]
    return {key: name for key, name in columns.items() if key != name}


def _likely_pair(value: RecordValue) -> tuple[str, str]:
    """Return the columns of a record that may be its prompt and its answer; empty in doubt."""
    texts = [name for name, text in value.items() if _may_be_learned(name, text)]
    by_name = {name.lower(): name for name in texts}
    prompt = next((by_name[name] for name in PROMPTS if name in by_name), "")
    if not prompt:
        asked = [name for name in texts if names_question(name)]
        prompt = asked[0] if len(asked) == 1 else ""
    completion = next((by_name[name] for name in ANSWERS if name in by_name), "")
    others = [name for name in texts if name != prompt and not names_subject(name)]
    if prompt and not completion and len(others) == 1:
        completion = others[0]

    # A number beside two texts may be what they are compared by.
    is_alone = all(
        name in texts or names_metadata(name, count_words(value[name])) for name in value
    )
    if not prompt and not completion and len(others) == 2 and is_alone:
        words = words_of_name(re.sub(r"\d", "", others[0]))
        if set(ANSWERS).isdisjoint(words):
            return others[0], others[1]
    return prompt, completion


def _may_be_learned(name: str, text: Any) -> bool:
    """True for a text that may be a prompt or an answer: no id, no thoughts, no bad answer, nothing in JSON."""
    if names_bad_answer(name) or names_thought(name) or medium_of(text) is not None:
        return False
    if names_metadata(name, count_words(text)):
        return False
    return _is_text(text) and not text.lstrip().startswith(("[", "{"))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_prose(value)
