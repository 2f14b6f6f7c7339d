"""How a column that nothing reads would be used: by which `columns` it is part of a prompt, an answer, thoughts.

Each function returns all `columns` that a run file would have then; none if the record has no place for the column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    names_subject,
    names_test,
    names_thought,
    words_of_name,
)
from kubetune.data.record_values import RecordValue, is_prose, joined_texts, key_of


def use_of(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a column of a record is used, in the first way that its name and its text allow."""
    if names_thought(name):
        return _as_thought(name, value, columns)
    return (
        _as_system(name, value, columns)
        or with_subject(name, value, columns)
        or _as_answer(name, value, columns)
    )


def with_subject(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text of a record becomes part of its prompt; none if no columns can do that."""
    question = key_of(PROMPTS, value, columns)
    text = joined_texts(value.get(name))
    is_taken = "input" in columns or (value.get("input") is not None and question != "input")
    if not question or is_taken or not isinstance(text, str):
        return {}
    # A conversation has its prompt in its messages, a classifier its texts as they are.
    if key_of(TALKS, value, columns) or not columns.keys().isdisjoint(("text", "label")):
        return {}
    if question == name or names_answer(name) or not isinstance(value[question], str):
        return {}
    # One of several choices is not what a question is about, nor are choices without the letters that name them.
    right = value.get(key_of(ANSWERS, value, columns))
    choices = choices_of(value, question, right)
    if choices is not None and name in choices.columns:
        is_whole = len(choices.columns) == 1 and right in choices.texts
        if not is_whole:
            return {}
    chosen = {"instruction": question, "input": name}
    answer = key_of(ANSWERS, value, columns)
    if key_of(("chosen", "rejected"), value, columns):
        answer = ""
    if answer:
        chosen["output"] = answer
    return _whole(chosen, columns)


def _as_thought(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which thoughts are read before the answer of a record; none where messages hold it.

    A prompt with its completion becomes a question with its answer, whose thoughts have a place.
    """
    question = key_of(PROMPTS, value, columns)
    answer = key_of(ANSWERS, value, columns)
    is_other = key_of((*TALKS, "chosen", "rejected"), value, columns) or "label" in value
    if is_other or not question or not answer or question == answer:
        return {}
    chosen = {"instruction": question, "output": answer}
    if not columns and question in QUESTIONS:
        # These names are known, whichever of them the record has.
        chosen = {}
    return _whole({**chosen, "reasoning_content": name}, columns)


def _as_answer(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text is learned as the answer to what is beside it; none without a question.

    It is the answer to a plain text, or takes the place of another answer.
    """
    question = key_of(PROMPTS, value, columns)
    texts = (value.get(question), value[name])
    is_chat = key_of((*TALKS, "chosen", "rejected"), value, columns)
    if name in ANSWERS and not is_chat and all(isinstance(text, str) for text in texts):
        # Both are named, whatever they are called: there are two answers.
        chosen = {"instruction": question, "output": name}
        return {**_whole(chosen, columns), **chosen}
    others = (*PROMPTS, *ANSWERS, *TALKS, "chosen", "label", "labels")
    if columns or not isinstance(value.get("text"), str) or key_of(others, value, {}):
        return {}
    if (
        not isinstance(value[name], str)
        or not is_prose(value[name])
        or names_test(name)
        or names_form(name)
    ):
        return {}
    return {"prompt": "text", "completion": name}


def _as_system(name: str, value: RecordValue, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the `columns` by which a text becomes the message of the system; none by another name, or if there is one."""
    words = re.findall(r"[a-z]+", name.lower())
    is_called = not {"sys", "system", "persona"}.isdisjoint(words)
    if not is_called or not isinstance(value[name], str) or not is_prose(value[name]):
        return {}
    if key_of(TALKS, value, columns):
        return with_system(name, value)
    question = key_of(PROMPTS, value, columns)
    answer = key_of(ANSWERS, value, columns)
    has_system = key_of(("system", "system_prompt"), value, columns)
    if has_system or not question or not answer or key_of(("chosen", "rejected"), value, columns):
        return {}
    # A plain prompt has no place for it.
    chosen = {"instruction": question, "output": answer}
    return _whole({**chosen, "system": name}, columns)


def with_system(name: str, value: RecordValue) -> dict[str, str]:
    """Return the `columns` by which a text beside a conversation becomes its system message; none if it has one."""
    turns = value.get(key_of(TALKS, value, {}))
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], Mapping):
        return {}
    speaker = turns[0].get("role", turns[0].get("from"))
    has_system = speaker in ("system", "developer") or key_of(
        ("system", "system_prompt"), value, {}
    )
    return {} if has_system or not isinstance(value.get(name), str) else {"system": name}


def _whole(chosen: Mapping[str, str], columns: Mapping[str, str]) -> dict[str, str]:
    """Return all `columns` of a run file that gets these, beside those that it has for other columns of the record."""
    whole = {key: column for key, column in chosen.items() if key != column}
    for key, column in columns.items():
        is_answer = "output" in chosen and key in ANSWERS
        if key not in chosen and column not in chosen.values() and not is_answer:
            whole[key] = column
    return whole


def likely_columns(value: RecordValue) -> dict[str, str]:
    """Return the columns of a record that may be its prompt, its answer and the thoughts before it; none in doubt."""
    texts = []
    thoughts = []
    for name, text in value.items():
        if names_thought(name) and isinstance(text, str) and is_prose(text):
            thoughts.append(name)
        is_aside = names_metadata(name) or names_bad_answer(name) or names_thought(name)
        if (
            isinstance(text, str)
            and is_prose(text)
            and not is_aside
            and not text.lstrip().startswith(("[", "{"))
        ):
            texts.append(name)
    by_name = {name.lower(): name for name in texts}
    prompt = next((by_name[name] for name in PROMPTS if name in by_name), "")
    others = [name for name in texts if name != prompt and not names_subject(name)]
    completion = next((by_name[name] for name in ANSWERS if name in by_name), "")
    if not completion and len(others) == 1 and prompt:
        completion = others[0]
    is_answer = bool(others) and not set(ANSWERS).isdisjoint(
        words_of_name(re.sub(r"\d", "", others[0]))
    )
    # A number beside two texts may be what they are compared by.
    rest = [name for name in value if name not in texts and not names_metadata(name)]
    if not prompt and not completion and len(others) == 2 and not is_answer and not rest:
        prompt = others[0]
        completion = others[1]
    if not prompt or not completion:
        return {}
    columns = {"prompt": prompt, "completion": completion}
    # A plain prompt has no place for thoughts.
    if len(thoughts) == 1:
        columns = {
            "instruction": prompt,
            "output": completion,
            "reasoning_content": thoughts[0],
        }
    return {key: name for key, name in columns.items() if key != name}
