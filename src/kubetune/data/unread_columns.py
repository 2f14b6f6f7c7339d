"""Columns that hold texts, classes or images, and that nothing reads: what is said of each, and what would use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kubetune.base.humanize import counted, shell_word
from kubetune.data.column_facts import Meaning
from kubetune.data.column_names import (
    ANSWERS,
    PROMPTS,
    names_answer,
    names_origin,
    names_split,
    names_test,
    names_truth,
    names_weight,
)
from kubetune.data.column_words import in_words, in_yaml
from kubetune.data.left_media import NAMES
from kubetune.data.verdict_names import says_bad, turned

# What `Columns.to_json` holds of one column.
Facts = Mapping[str, Any]


class LeftOut(NamedTuple):
    """A column that holds texts or classes, and that nothing reads."""

    name: str
    meaning: Meaning
    what: str  # in words: `a text`
    advice: str  # what would use it
    is_decisive: bool = False  # answers may be about it, or it is what a text is learned for
    use: Mapping[str, str] = MappingProxyType({})  # `columns` by which thoughts are read


def left_out(
    facts: Mapping[str, Facts], path: str, *, is_rewarded: bool = False
) -> Iterator[LeftOut]:
    """Yield the columns that nothing reads, of what `Columns.to_json` returns. `path`: of the data.

    `is_rewarded`: the records are prompts, whose columns functions of the user's may read.
    """
    for name, of_column in facts.items():
        meaning: Meaning = of_column["meaning"]
        if is_rewarded and meaning not in ("subject", "medium"):
            yield _left_of_prompt(name, of_column)
        else:
            yield _MEANT[meaning](name, of_column, path)


def _left_of_prompt(name: str, of_column: Facts) -> LeftOut:
    """Return what is said of a column beside a prompt whose answers are rewarded."""
    meaning: Meaning = of_column["meaning"]
    advice = "A function of yours in `rewards` is given all columns: docs/grpo.md"
    what = "texts"
    if meaning in ("class", "group"):
        what = f"{of_column['values']} values"
    elif meaning == "thought":
        what = "thoughts"
        advice += "; `task: causal_lm` learns thoughts before an answer"
    return LeftOut(name, meaning, what, advice)


def _left_text(name: str, of_column: Facts, path: str) -> LeftOut:
    """Return what is said of a text, or of one that a question is about."""
    meaning: Meaning = of_column["meaning"]
    is_answer = name in ANSWERS or names_truth(name)
    is_decisive = meaning == "subject" or name in PROMPTS or is_answer
    what = "a text" if of_column["is_plain"] else "texts in lists or objects"
    if name in PROMPTS:
        differing = of_column["records"] - of_column["repeated"]
        what = f"a text that differs from the others in {counted(differing, 'record')}"
    advice = _use_of_text(name, of_column, is_decisive=is_decisive)
    return LeftOut(name, meaning, what, advice, is_decisive)


def _use_of_text(name: str, of_column: Facts, *, is_decisive: bool) -> str:
    """Return what would use a text: `columns` by which it is an answer or part of the prompt, or the user's own hand."""
    use = of_column["use"]
    if name in (use.get("completion"), use.get("output")):
        advice = f"`data.train.{in_yaml(use)}` (`{in_words(use)}` of `kubetune init`) learns it as the answer"
        if of_column["answer"] in ("", name):
            return advice
        return f"{advice}, in place of `{of_column['answer']}`"
    if use:
        advice = f"`data.train.{in_yaml(use)}` makes it part of the prompt"
        return advice if is_decisive else f"{advice}, if the question is about it"
    if names_test(name):
        return "If it tests answers, a function of yours in `rewards` of `task: grpo` is given it: docs/grpo.md"
    if names_answer(name):
        return "Write it into the answer, if it is to be learned"
    return "Write it into the texts that are read, if they need it"


def _left_thoughts(name: str, of_column: Facts, path: str) -> LeftOut:
    """Return what is said of thoughts."""
    use = of_column["use"]
    advice = "Write them into the messages, as `reasoning_content` of the assistant's, if they are to be learned"
    if use:
        advice = (
            f"`data.train.{in_yaml(use)}` reads them before the answer of a conversation, if the model's chat "
            "template writes thoughts"
        )
    return LeftOut(name, "thought", "thoughts", advice, True, use)


def _left_classes(name: str, of_column: Facts, path: str) -> LeftOut:
    """Return what is said of a column of few values."""
    meaning: Meaning = of_column["meaning"]
    is_decisive = meaning == "class" and bool(of_column["text"]) and not of_column["answer"]
    advice = _use_of_classes(name, of_column, path)
    return LeftOut(name, meaning, f"{of_column['values']} values", advice, is_decisive)


def _use_of_classes(name: str, of_column: Facts, path: str) -> str:
    """Return what would use a column of few values: a verdict on the answer, a class of the text, or a part of the data."""
    is_class = of_column["meaning"] == "class"
    if is_class and of_column["answer"] and of_column["are_verdicts"]:
        if says_bad(name):
            return (
                "`task: preference` with `preference.loss: kto` learns which answers are good by a `label` that is true "
                f"for these, and `{name}` seems to be true for bad ones: {turned(name, path)}"
            )
        return (
            f"`data.train.{in_yaml({'label': name})}`, `task: preference` and `preference.loss: kto` learn by it which "
            "answers are good, if it says that"
        )
    if names_split(name):
        return "A file for each of its values can be given as `data.train` or `data.eval`"
    # Beside an answer it may be a grade of it, which no class of its prompt is.
    if of_column["text"] and not of_column["answer"]:
        columns = {"text": of_column["text"]}
        if name != "label":
            columns["label"] = name
        words = f"--task sequence_classification {in_words(columns)}"
        return f"`kubetune init {shell_word(path)} {words}` makes a classifier"
    return "A file for each of its values, as sources of `data.train`, would have a `weight` and an `eval_loss` of its own"


def _left_numbers(name: str, of_column: Facts, path: str) -> LeftOut:
    """Return what is said of numbers: weights of rows beside an answer, or what a text may be learned for."""
    if of_column["answer"]:
        advice = "Every row counts the same; a whole source of `data.train` may have a `weight`"
        return LeftOut(name, "number", "numbers", advice, is_decisive=names_weight(name))
    words = in_words({"text": of_column["text"], "label": name})
    advice = (
        f"`kubetune init {shell_word(path)} --task sequence_classification {words}` learns to "
        "predict them"
    )
    return LeftOut(name, "number", "numbers", advice)


def _left_media(name: str, of_column: Facts, path: str) -> LeftOut:
    """Return what is said of images, sounds and the like, which answers may be about."""
    medium = of_column["medium"]
    what = NAMES[medium][1]
    use = of_column["use"]
    if medium != "image":
        advice = f"A model is shown texts and images here, no {what}; write what they say into the texts that are read"
    elif of_column["is_on_web"]:
        advice = (
            "Nothing is loaded from the web: download them, and name their files under `image`, for "
            "`task: vision_language`"
        )
    elif use:
        advice = f"`data.train.{in_yaml(use)}` shows them to the model of `task: vision_language`"
    else:
        advice = (
            "`task: vision_language` reads images under `image`, or as a list under `images`, beside a question and its "
            "answer, such as `Describe it.` with a caption"
        )
    return LeftOut(name, "medium", what, advice, is_decisive=not names_origin(name))


# `Columns.to_json` leaves out what is called "other".
_MEANT: Final[Mapping[Meaning, Callable[[str, Facts, str], LeftOut]]] = {
    "subject": _left_text,
    "text": _left_text,
    "thought": _left_thoughts,
    "class": _left_classes,
    "group": _left_classes,
    "number": _left_numbers,
    "medium": _left_media,
}
