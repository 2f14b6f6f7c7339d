"""Answers that are no texts: a number, an object, a choice among several. What to run so that they can be learned."""

from __future__ import annotations

import json
import shlex
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final, assert_never

from kubetune.base.humanize import counted, shell_word
from kubetune.data.choices import Choices, choices_of, chosen_by_label, counted_from
from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    names_bad_answer,
    names_metadata,
    names_subject,
    words_of_name,
)
from kubetune.data.column_words import in_list
from kubetune.data.question_subjects import left_subjects
from kubetune.data.reading.fields import show
from kubetune.data.reading.refusals import VERDICTS
from kubetune.data.record_values import count_words, is_prose, key_of

Value = Mapping[str, Any]

# Names of columns that say which of several choices is right.
_CHOSEN: Final = ("answer", "label", "answerkey", "answer_key", "gold", "target", "correct")


def as_text(value: Value, columns: Mapping[str, str], path: str) -> str:
    """Return how an answer that is no text becomes one; empty for answers that are texts."""
    name = key_of(ANSWERS, value, columns)
    answer = value.get(name)
    if not name or isinstance(answer, str):
        return ""
    new = f"json.dumps(r[{json.dumps(name)}])"
    what = "no text"
    is_number = isinstance(answer, int) and not isinstance(answer, bool)
    for other, choices in value.items():
        if is_number and isinstance(choices, list) and answer in range(len(choices)):
            new = f"r[{json.dumps(other)}][r[{json.dumps(name)}]]"
            what = f"the number of one of `{other}`, counted from 0, and no text"
    text = f"{path}: `{name}` is {show(answer)}, {what}; answers are learned as texts"
    return f"{text}. {_command(path, {name: new})}"


def from_choices(values: Sequence[Value], path: str) -> str:
    """Return how the answers of records become texts that only a list or an object of them holds; empty for others.

    {"ctx": …, "endings": ["a", "b"], "label": "1"}                    →  r["endings"][int(r["label"])]
    {"question": …, "choices": {"text": [], "label": []}, "answerKey": "B"}
    {"question": …, "answers": {"text": ["Paris"], …}}                 →  r["answers"]["text"][0]
    """
    question = _question(values)
    if not question or any(isinstance(values[0].get(name), str) for name in ANSWERS):
        return ""
    news = {}
    if question not in PROMPTS:
        news["prompt"] = f"r[{json.dumps(question)}]"
    chosen = _choice(values)
    if chosen:
        name, choices, new = chosen
        text = f"{path} holds a multiple choice: `{name}` says which of `{choices}` is right"
        news["answer"] = new
        if name in VERDICTS:
            # Next to an answer it would say whether that is a good one.
            news[name] = "None"
        if isinstance(values[0][choices], dict):
            news[choices] = f'r[{json.dumps(choices)}]["text"]'
        elif not names_subject(choices):
            # The answer goes on with the text; the other endings are no part of it.
            news[choices] = "None"
        return f"{text}; answers are learned as texts. {_command(path, news)}"
    for name in values[0]:
        place = _first_text(values, name)
        if place and "answer" in words_of_name(name) and not names_bad_answer(name):
            news["answer"] = place
            text = (
                f"{path}: `{name}` holds the answer, and is no text; answers are learned as texts"
            )
            return f"{text}. {_command(path, news)}"
    return ""


def from_label(values: Sequence[Value], question: str, label: str, path: str) -> str:
    """Return how labels that choose one of several texts become answers; empty for labels that are classes.

    A classifier would see the question alone, and learn from it which place the right text has.

    {"question": "Where?", "opa": "Rome", "opb": "Paris", "cop": 1}
    →  {"question": "Where?\\nA. Rome\\nB. Paris", "answer": "Paris", …}
    """
    if not all(isinstance(value.get(question), str) for value in values):
        return ""
    chosen = chosen_by_label(values, question, label)
    # The same texts in each record are the names of classes.
    if len({choices.texts for _, choices in chosen}) < 2:
        return ""
    columns = chosen[0][1].columns
    right = _right_choice(chosen, label)
    if not right or any(choices.columns != columns for _, choices in chosen):
        return ""
    pairs = _pairs_of(chosen[0][1])
    text = f"{path} holds a multiple choice: `{label}` says which of {in_list(columns)} is right"
    joined = f'"\\n".join([r[{json.dumps(question)}], *("%s. %s" % c for c in {pairs})])'
    news = {question: joined}
    if question not in PROMPTS:
        news = {question: "None", "prompt": joined}
    # They would be a second copy of what question and answer say.
    news |= {**dict.fromkeys((*columns, label), "None"), "answer": right}
    return f"{text}; answers are learned as texts. {_command(path, news)}"


def _right_choice(chosen: Sequence[tuple[Any, Choices]], label: str) -> str:
    """Return the text that a label chooses, in Python; empty where it is neither a mark, a text nor a place of all."""
    of = f"r[{json.dumps(label)}]"
    pairs = _pairs_of(chosen[0][1])
    if all(str(answer).strip() in choices.texts for answer, choices in chosen):
        return of
    if all(str(answer).strip().upper() in choices.marks for answer, choices in chosen):
        return f"{{str(m).upper(): t for m, t in {pairs}}}[str({of}).strip().upper()]"
    start = counted_from(chosen)
    return "" if start is None else f"[t for _, t in {pairs}][int({of}) - {start}]"


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
    news = {question: f'"\\n".join([{parts}])', **dict.fromkeys(left, "None")}
    they = "they" if len(left) > 1 else "it"
    text = f"{path} has {in_list(left)} beside `{question}`, and {they} would be left out of the prompt"
    return f"{text}. {_command(path, news)}"


def _parts(
    values: Sequence[Value],
    question: str,
    names: Sequence[str],
    of_choices: Sequence[tuple[Any, Choices]],
) -> list[str]:
    """Return the parts of a whole question in Python: texts and tables, the question, choices with their marks."""
    before = []
    after = []
    for name in names:
        of = json.dumps(name)
        if of_choices and name == of_choices[0][1].columns[0]:
            after.append(f'*("%s. %s" % c for c in {_numbered_pairs(of_choices)})')
        elif all(isinstance(value.get(name, ""), str) for value in values):
            before.append(f'str(r.get({of}) or "")')
        else:
            before.append(f"json.dumps(r.get({of}), ensure_ascii=False)")
    return [*before, f"r[{json.dumps(question)}]", *after]


def _pairs_of(choices: Choices) -> str:
    """Return the pairs of a mark and a text of the choices of a record `r`, in Python."""
    of = f"r[{json.dumps(choices.columns[0])}]"
    match choices.form:
        case "columns":
            columns = json.dumps(list(zip(choices.marks, choices.columns, strict=True)))
            return f"[(m, r[k]) for m, k in {columns} if r.get(k) is not None]"
        case "texts":
            return f"zip({json.dumps(string.ascii_uppercase)}, {of})"
        case "lists":
            return f'zip({of}["label"], {of}["text"])'
        case "marked":
            return f"{of}.items()"
        case "objects":
            return f'[(c[{json.dumps(choices.mark_key)}], c["text"]) for c in {of}]'
        case _:
            assert_never(choices.form)


def _numbered_pairs(of_choices: Sequence[tuple[Any, Choices]]) -> str:
    """Return the marks and texts of choices in Python: with letters, or the numbers by which answers name them."""
    choices = max((choices for _, choices in of_choices), key=lambda choices: len(choices.texts))
    start = counted_from(of_choices)
    if start is None:
        return _pairs_of(choices)
    return f"enumerate((t for _, t in {_pairs_of(choices)}), {start})"


def _question(values: Sequence[Value]) -> str:
    """Return the column with the question of each record: by its name, else the text with the most words."""
    question = key_of(PROMPTS, values[0], {})
    if question:
        return question
    words = {}
    for name, text in values[0].items():
        if not isinstance(text, str) or names_metadata(name, count_words(text)):
            continue
        if is_prose(text):
            words[name] = sum(count_words(value.get(name)) for value in values)
    return max(words, key=lambda name: words[name], default="")


def _choice(values: Sequence[Value]) -> tuple[str, str, str] | None:
    """Return the column that chooses, that of the choices, and the right answer in Python; None if none chooses."""
    for name in values[0]:
        if name.lower() not in _CHOSEN:
            continue
        for choices in values[0]:
            key = json.dumps(name)
            of = json.dumps(choices)
            if all(_is_place(value.get(name), value.get(choices)) for value in values):
                return name, choices, f"r[{of}][int(r[{key}])]"
            if all(_is_mark(value.get(name), value.get(choices)) for value in values):
                new = f'r[{of}]["text"][r[{of}]["label"].index(r[{key}])]'
                return name, choices, new
    return None


def _is_place(value: Any, choices: Any) -> bool:
    """True for the number of a text in a list, counted from 0."""
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        return False
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        return False
    text = str(value)
    return text.isascii() and text.isdigit() and int(text) < len(choices)


def _is_mark(value: Any, choices: Any) -> bool:
    """True for one of the labels of texts, such as B of {"text": [], "label": ["A", "B"]}."""
    if not isinstance(choices, dict):
        return False
    labels = choices.get("label")
    texts = choices.get("text")
    if not isinstance(labels, list) or not isinstance(texts, list) or len(labels) != len(texts):
        return False
    return value in labels and all(isinstance(text, str) for text in texts)


def records_within(values: Sequence[Value], path: str) -> str:
    """Return how to get at the records of a file that is one object around them; empty if it is not.

    Such a file is `{"version": 1, "data": [{"question": …}, …]}`.
    """
    if len(values) != 1:
        return ""
    for name, inner in values[0].items():
        if isinstance(inner, list) and inner and all(isinstance(item, dict) for item in inner):
            made = f"{path.rpartition('.')[0]}-{name}.jsonl"
            code = f"import json, sys; [print(json.dumps(r)) for r in json.load(sys.stdin)[{json.dumps(name)}]]"
            command = f"python3 -c {shlex.quote(code)} < {shell_word(path)} > {shell_word(made)}"
            return (
                f"{path} is one object, and its `{name}` is a list of {counted(len(inner), 'object')}. Write these on a "
                f"line each, then give {made}: `{command}`"
            )
    return ""


def _first_text(values: Sequence[Value], name: str) -> str:
    """Return in Python where the first text of a column is, which is the same in all records; empty if it is not."""
    places = set()
    for value in values:
        places.add(_place_of_text(value.get(name), f"r[{json.dumps(name)}]"))
    return places.pop() if len(places) == 1 else ""


def _place_of_text(value: Any, place: str) -> str:
    """Return where the first text within a list or an object is; empty without one."""
    if isinstance(value, list) and value and isinstance(value[0], str):
        return f"{place}[0]"
    if isinstance(value, dict):
        for key, inner in value.items():
            within = f"{place}[{json.dumps(key)}]"
            if isinstance(inner, str) and inner:
                return within
            if isinstance(inner, list) and inner and isinstance(inner[0], str):
                return f"{within}[0]"
    return ""


def _command(path: str, news: Mapping[str, str]) -> str:
    """Return what makes the answers texts. `news`: columns, and their values in Python of a record r."""
    pairs = ", ".join(f"{json.dumps(name)}: {new}" for name, new in news.items())
    if not path.endswith(".jsonl"):
        # All of them at once: a column may be read for one and emptied by another.
        return f"Write `r.update({{{pairs}}})` for each record r in Python"
    made = f"{path.removesuffix('.jsonl')}-texts.jsonl"
    code = f"import json, sys; [print(json.dumps({{**r, {pairs}}})) for r in map(json.loads, sys.stdin)]"
    command = f"python3 -c {shlex.quote(code)} < {shell_word(path)} > {shell_word(made)}"
    return f"Make them so, then give {made}: `{command}`"
