"""What a task needs that only its records tell: the task itself, a reward, a kind of labels, what an evaluation asks."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from kubetune.base.humanize import counted
from kubetune.config.schema import RecordKind
from kubetune.data.column_facts import MOST_CLASSES
from kubetune.data.proposed.proposal import Compared, ReasonedChoice
from kubetune.data.proposed.trial_reading import is_chat
from kubetune.data.reading.examples import Chat, Example, Labelled, Pair, images_of
from kubetune.data.reading.prompts import NO_ANSWER
from kubetune.data.text.answer_targets import without_thoughts
from kubetune.data.text.numbers import SHORT, read_number
from kubetune.data.text.words import pieces_of
from kubetune.errors import DataError

_CLASSES_NAMED: Final = 6
# Characters of the end of an answer that a message shows.
_ENDING: Final = 40

_TASKS: Final[dict[RecordKind, ReasonedChoice]] = {
    "prompt": ReasonedChoice(
        "grpo", "prompts with right answers: answers are drawn, and rewarded if they are right"
    ),
    "pair": ReasonedChoice("preference", "each row has a better and a worse answer"),
    "judged": ReasonedChoice("preference", "each answer has a label that says whether it is good"),
    "labelled": ReasonedChoice(
        "sequence_classification", "each row has a text and a label: a classifier"
    ),
}


def task_for(kind: RecordKind, examples: Sequence[Example]) -> ReasonedChoice:
    """Return the task, and why."""
    if kind in _TASKS:
        return _TASKS[kind]
    if any(images_of(example) for example in examples):
        return ReasonedChoice("vision_language", "the rows have images")
    if is_chat(examples[0]):
        return ReasonedChoice("causal_lm", "conversations: the answers are learned")
    if isinstance(examples[0], Pair):
        return ReasonedChoice("causal_lm", "prompts and answers: the answers are learned")
    return ReasonedChoice("causal_lm", "plain texts: every token is learned")


def answers_to_compare(examples: Sequence[Example]) -> Compared | None:
    """Return what an evaluation compares with the answers of the data; None for texts without questions.

    A few words are right or wrong; of longer answers the words that both have are counted, since hardly any answer is
    the same to the letter.
    """
    texts = []
    words = []
    for example in examples:
        answer = None
        thoughts = ""
        if isinstance(example, Pair):
            answer = example.completion
        elif isinstance(example, Chat) and not example.images:
            answer = example.messages[-1].get("content")
            thoughts = example.messages[-1].get("reasoning_content") or ""
        if isinstance(answer, str) and answer.strip():
            texts.append(f"{thoughts}{answer}")
            words.append(len(pieces_of(without_thoughts(answer))))
    if not texts:
        return None
    metric = ReasonedChoice("exact_match", "short answers: right or wrong")
    if statistics.median(words) > SHORT:
        reason = "long answers: the words that they share with the right one"
        metric = ReasonedChoice("token_f1", reason)
    return Compared(metric, texts)


def reward_for(examples: Sequence[Example], path: str) -> ReasonedChoice:
    """Return the reward that right answers allow. Raise DataError where none of the built-in ones can be got."""
    answers = []
    for example in examples:
        if isinstance(example, Chat):
            answers.append(example.messages[-1]["content"])
        elif isinstance(example, Pair):
            answers.append(example.completion)
    answers = [without_thoughts(answer) for answer in answers if answer != NO_ANSWER]
    advice = (
        "a function of yours can reward answers: begin with `kubetune init --task grpo -o run.yaml` and write "
        "`rewards: [{file: rewards.py, function: score}]` (docs/grpo.md). Nothing was written."
    )
    if not answers:
        talks = [example.messages[:-1] for example in examples if isinstance(example, Chat)]
        if any(message["role"] == "assistant" for talk in talks for message in talk):
            raise DataError(
                f"{path} holds conversations that end with a message of the user. `--task causal_lm` learns the answers "
                f"within them; if answers to the last message are to be drawn, {advice}"
            )
        raise DataError(
            f"{path} holds prompts without right answers, so none can be compared; {advice}"
        )
    return _reward_of(answers, path, advice)


def _reward_of(answers: Sequence[str], path: str, advice: str) -> ReasonedChoice:
    """Return the reward that compares all that these right answers say. Raise DataError, with advice, without one."""
    ends = [_number_at_end(answer) for answer in answers]
    if all(isinstance(end, Fraction) for end in ends):
        return ReasonedChoice("numeric", "the right answers end with a number, which is compared")
    words = sum(len(pieces_of(answer)) for answer in answers) / len(answers)
    if words <= SHORT:
        reason = "right answers are rewarded; others, and functions of yours: docs/grpo.md"
        return ReasonedChoice("exact_match", reason)
    if None not in ends:
        reason = "the right answers end with a number, a time or the like, which is compared"
        return ReasonedChoice("numeric", reason)
    without = answers[ends.index(None)].strip()
    raise DataError(
        f"{path} has right answers of {words:.0f} words on average, which no answer equals word by word, and "
        f"{ends.count(None):,} of {len(answers):,} end with no number that could be compared, such as the one that ends "
        f"with {without[-_ENDING:]!r}; {advice}"
    )


def _number_at_end(answer: str) -> Fraction | str | None:
    """Return what `numeric` compares of `72`, and of steps that end with `#### 72`; None if that is not all of the end."""
    number = read_number(answer)
    is_last = re.search(r"\d\S{0,3}\s*$", answer) is not None
    if number is None or not number.is_whole or not is_last:
        return None
    return number.value


def problem_type_of(examples: Sequence[Example]) -> ReasonedChoice | None:
    """Return regression for labels that are numbers to predict, None for classes."""
    labels = [example.label for example in examples if isinstance(example, Labelled)]
    numbers = {label for label in labels if isinstance(label, (int, float))}
    texts = [label for label in labels if isinstance(label, str)]
    numbers |= {float(text) for text in texts if re.fullmatch(r"-?\d+(\.\d+)?", text)}
    has_fraction = any(number != int(number) for number in numbers)
    is_count = bool(numbers) and numbers == set(range(len(numbers)))
    is_many = len(numbers) > MOST_CLASSES and not is_count
    if not (has_fraction or is_many) or 2 * len(numbers) <= len({str(label) for label in labels}):
        return None
    reason = (
        f"{counted(len(numbers), 'number')} from {min(numbers):g} to {max(numbers):g}: no classes"
    )
    return ReasonedChoice("regression", reason)


def labels_in_words(examples: Sequence[Example], problem_type: ReasonedChoice | None) -> str:
    """Return in words what the labels are."""
    if problem_type is not None:
        return f"The labels are numbers to predict: {problem_type.reason}"
    labels: Counter[str] = Counter()
    for example in examples:
        if isinstance(example, Labelled):
            labels[str(example.label)] += 1
    most_common = [f"{name} × {number:,}" for name, number in labels.most_common(_CLASSES_NAMED)]
    more = f" and {len(labels) - _CLASSES_NAMED:,} more" if len(labels) > _CLASSES_NAMED else ""
    return f"{counted(len(labels), 'label')}: {', '.join(most_common)}{more}"
