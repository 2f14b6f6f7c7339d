"""Questions with several choices: what to run so that the choices are asked, and the right one is learned."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, Final, assert_never

from kubetune.data.choices import (
    Choices,
    RightChoice,
    are_marked,
    choices_of,
    chosen_by_label,
    counted_from,
    right_choice,
)
from kubetune.data.column_names import ANSWERS, PROMPTS, names_metadata, words_of_name
from kubetune.data.column_words import in_list
from kubetune.data.proposed.programs import literal, program
from kubetune.data.proposed.text_places import Place
from kubetune.data.question_subjects import left_subjects
from kubetune.data.reading.refusals import VERDICTS
from kubetune.data.record_values import key_of

Value = Mapping[str, Any]
# Label and choices of each record.
Chosen = Sequence[tuple[Any, Choices]]

# Words of names of columns that say which of several choices is right.
_CHOSEN: Final = frozenset(
    ("answer", "answerkey", "label", "gold", "target", "correct", "right", "solution")
)


def from_label(values: Sequence[Value], question: str, label: str, path: str) -> str:
    """Return how labels that choose one of several texts become answers; empty for labels that are classes.

    A classifier would see the question alone, and learn from it which place the right text has.

    {"question": "Where?", "opa": "Rome", "opb": "Paris", "cop": 1}
    →  {"question": "Where?\\nA. Rome\\nB. Paris", "answer": "Paris", …}
    """
    place = Place((question,))
    if not all(isinstance(place.of(value), str) for value in values):
        return ""
    chosen = chosen_by_label(values, question, label)
    # The same texts in each record are the names of classes.
    if len({choices.texts for _, choices in chosen}) < 2:
        return ""
    right = right_choice(chosen)
    return "" if right is None else _with_choices(values, chosen, right, place, label, path)


def from_choices(values: Sequence[Value], question: Place, path: str) -> str:
    """Return how choices beside a question are asked with it, and the right one becomes its answer; empty without any.

    Any column may say which is right, if no other one says something else.
    """
    by_column: dict[str, tuple[Chosen, RightChoice]] = {}
    for label in values[0]:
        is_named = not _CHOSEN.isdisjoint(words_of_name(label))
        if label == question.column or (names_metadata(label) and not is_named):
            continue
        # Classes beside a list of texts that is called like anything may be of the question.
        if not is_named and choices_of(values[0], question.column, None) is None:
            continue
        chosen: Chosen = chosen_by_label(values, question.column, label)
        right = right_choice(chosen) if chosen else None
        if right is not None and label not in chosen[0][1].columns:
            by_column[label] = chosen, right

    named = [name for name in by_column if not _CHOSEN.isdisjoint(words_of_name(name))]
    labels = named or list(by_column)
    answers = {by_column[name][1].texts for name in labels}
    if len(answers) == 1:
        chosen, right = by_column[labels[0]]
        return _with_choices(values, chosen, right, question, labels[0], path)

    choices = choices_of(values[0], question.column, None)
    if choices is None:
        return ""
    return (
        f"{path} has the choices {in_list(choices.columns)} beside `{question.column}`, and no column tells for sure which "
        f"is right. Write them into `{question.column}`, and the right one as `answer`"
    )


def _with_choices(
    values: Sequence[Value],
    chosen: Chosen,
    right: RightChoice,
    question: Place,
    label: str,
    path: str,
) -> str:
    """Return the program that writes choices into the question, and the right one as its answer; empty without one."""
    choices = chosen[0][1]
    if any(other.columns != choices.columns for _, other in chosen):
        return ""
    columns = choices.columns
    joined = f'"\\n".join([{question.code}, {_lines_of(chosen, _pairs_of(choices))}])'
    if question.keys[0] in PROMPTS:
        new_columns = {question.column: joined}
    elif len(question.keys) == 1:
        new_columns = {question.column: "None", "prompt": joined}
    else:
        new_columns = {"prompt": joined}
    # They would be a second copy of what question and answer say.
    new_columns |= dict.fromkeys((*columns, label), "None")
    # Next to an answer it would say whether that is a good one.
    new_columns |= dict.fromkeys((name for name in VERDICTS if name in values[0]), "None")
    new_columns["answer"] = _code_of(chosen, right, label)
    numbering = f", counted from {right.first}," if right.by == "number" else ""
    text = f"{path} holds a multiple choice: `{label}` says{numbering} which of {in_list(columns)} is right"
    return f"{text}; answers are learned as texts. {program(path, new_columns)}"


def _code_of(chosen: Chosen, right: RightChoice, label: str) -> str:
    """Return the right choice of a record in Python."""
    code = f"r[{literal(label)}]"
    choices = chosen[0][1]
    pairs = _pairs_of(choices)
    match right.by:
        case "text":
            return code
        case "mark":
            return f"{{str(m).upper(): t for m, t in {pairs}}}[str({code}).strip().upper()]"
        case "number":
            place = f"int({code}) - {right.first}" if right.first else f"int({code})"
            if choices.form == "texts":
                return f"r[{literal(choices.columns[0])}][{place}]"
            return f"[t for _, t in {pairs}][{place}]"
        case _:
            assert_never(right.by)


def into_question(values: Sequence[Value], names: Mapping[str, str], path: str) -> str:
    """Return how texts that the questions of records are about get into these; empty where a program cannot do it.

    `values` have our names of columns; `names`: the file's, by ours.

    {"question": "Which?", "A": "Paris", "B": "Rome", …}  →  {"question": "Which?\\nA. Paris\\nB. Rome", …}
    """
    question = key_of(PROMPTS, values[0], {})
    if not question or not all(isinstance(value.get(question), str) for value in values):
        return ""
    # The longest of a kind: some records have a choice more.
    groups: dict[str, tuple[str, ...]] = {}
    of_choices: list[tuple[Any, Choices]] = []
    for value in values:
        answer = value.get(key_of(ANSWERS, value, {}))
        choices = choices_of(value, question, answer)
        for group in left_subjects(value, {}, needs_answer=False):
            groups[group[0]] = max(group, groups.get(group[0], ()), key=len)
            if choices is not None and group == choices.columns:
                of_choices.append((answer, choices))
    left = [name for group in groups.values() for name in group]
    if not left:
        return ""
    question = names.get(question, question)
    parts = ", ".join(_parts(values, question, tuple(groups), of_choices))
    # They would be a second copy of what the question says.
    new_columns = {question: f'"\\n".join([{parts}])', **dict.fromkeys(left, "None")}
    they = "they" if len(left) > 1 else "it"
    text = f"{path} has {in_list(left)} beside `{question}`, and {they} would be left out of the prompt"
    return f"{text}. {program(path, new_columns)}"


def _parts(
    values: Sequence[Value],
    question: str,
    names: Sequence[str],
    of_choices: Chosen,
) -> list[str]:
    """Return the parts of a whole question in Python: texts and tables, the question, choices with their marks."""
    before = []
    after = []
    for name in names:
        key = literal(name)
        if of_choices and name == of_choices[0][1].columns[0]:
            after.append(_lines_of(of_choices, _numbered_pairs(of_choices)))
        elif all(isinstance(value.get(name, ""), str) for value in values):
            before.append(f'str(r.get({key}) or "")')
        else:
            before.append(f"json.dumps(r.get({key}), ensure_ascii=False)")
    return [*before, f"r[{literal(question)}]", *after]


def _lines_of(chosen: Chosen, pairs: str) -> str:
    """Return the lines of choices in Python: each with its mark, which its text may begin with."""
    if all(are_marked(choices) for _, choices in chosen):
        return f"*(t for _, t in {pairs})"
    return f'*("%s. %s" % c for c in {pairs})'


def _pairs_of(choices: Choices) -> str:
    """Return the pairs of a mark and a text of the choices of a record `r`, in Python."""
    code = f"r[{literal(choices.columns[0])}]"
    match choices.form:
        case "columns":
            columns = literal(list(zip(choices.marks, choices.columns, strict=True)))
            return f"[(m, r[k]) for m, k in {columns} if r.get(k) is not None]"
        case "texts":
            return f"zip({literal(string.ascii_uppercase)}, {code})"
        case "lists":
            return f'zip({code}["label"], {code}["text"])'
        case "marked":
            return f"{code}.items()"
        case "objects":
            return f'[(c[{literal(choices.mark_key)}], c["text"]) for c in {code}]'
        case _:
            assert_never(choices.form)


def _numbered_pairs(of_choices: Chosen) -> str:
    """Return the marks and texts of choices in Python: with letters, or the numbers by which answers name them."""
    choices = max((choices for _, choices in of_choices), key=lambda choices: len(choices.texts))
    start = counted_from(of_choices)
    if start is None:
        return _pairs_of(choices)
    return f"enumerate((t for _, t in {_pairs_of(choices)}), {start})"
