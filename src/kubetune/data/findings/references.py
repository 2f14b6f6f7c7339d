"""Looks whether the data hold what a run will compare answers with: a number, a label word, JSON, a right answer.

A run refuses to begin if none does. The check of data and the plan say so before, in the same words, and warn of
answers that are compared in part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from kubetune.config.metric_names import LANGUAGE_METRICS
from kubetune.config.schema import RewardConfig, SourceConfig
from kubetune.config.schema.evaluation import (
    METRICS,
    EvaluationConfig,
    GenerateConfig,
)
from kubetune.data.column_names import COMPLETIONS, RIGHT_ANSWERS
from kubetune.data.findings.compared_parts import CutAnswers, ReadNumbers
from kubetune.data.findings.finding import Finding
from kubetune.data.findings.reward_columns import compares
from kubetune.data.reading.examples import Chat, Pair
from kubetune.data.reading.formats import convert
from kubetune.data.reading.prompts import NO_ANSWER, right_answer
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.taken import read_taken
from kubetune.data.text.answer_targets import TARGETS, lacks_target, last_answer
from kubetune.data.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from kubetune.data.prepared.rows import Rows


# References that are looked at, if each may count.
LOOKED_AT: Final = 1_000


class References:
    """Give it the sequences of evaluation rows; `findings` says then what no reference holds, `warnings` what few do."""

    def __init__(self, wanted: GenerateConfig | None, tokenizer: Tokenizer) -> None:
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._number = 0  # references so far, as long as each was looked at
        # Measures that have found nothing to compare with yet. Most find something in the first reference.
        self._waiting: list[str] = []
        if wanted is not None:
            self._waiting = [name for name in wanted.metric if name in TARGETS]
        self._numbers = ReadNumbers()
        self._cut = CutAnswers()

    @property
    def is_complete(self) -> bool:
        """True if other sequences would change nothing, or enough of them were looked at."""
        return self._wanted is None or (self._number >= LOOKED_AT and not self._waiting)

    def add(
        self,
        ids: Sequence[int],
        trained: bytes,
        answer: str,
    ) -> None:
        """Look at the last answer of a row's first sequence, which of a pair has the chosen one.

        `trained`: a 1 for each id that is trained, else a 0. `answer`: "bad" if somebody judged it so.
        """
        place = last_answer(trained)
        if self._wanted is None or place is None or answer == "bad":
            return

        begin, is_whole = place
        # A text that is trained whole asks nothing.
        if is_whole:
            return
        self._number += 1
        # The last token that is trained ends the answer.
        self._cut.add(trained.count(1, begin) - 1, self._wanted.max_new_tokens)
        reads_numbers = "numeric" in self._wanted.metric
        if not self._waiting and not reads_numbers:
            return

        # As an evaluation decodes it, without special tokens.
        reference = self._tokenizer.decode(list(ids[begin:])).strip()
        # One reference with a number is enough for `numeric`, and so for each measure.
        still_waiting = []
        for name in self._waiting:
            if lacks_target(name, reference, self._wanted.labels):
                still_waiting.append(name)
        self._waiting = still_waiting
        if reads_numbers:
            self._numbers.add(reference)

    def add_rows(self, rows: Rows) -> None:
        """Look at prepared rows, as far as that changes anything."""
        # Of judged answers, targets are verdicts; of pairs they are margins.
        verdicts = None if rows.splits is not None else rows.targets
        for index in range(len(rows)):
            if self.is_complete:
                return
            is_bad = verdicts is not None and not verdicts[index].any()
            ids, trained = rows.sequences(index)[0]
            self.add(ids.tolist(), trained.tobytes(), "bad" if is_bad else "")

    def findings(self) -> Iterator[Finding]:
        """Yield an error for each thing that a run would refuse."""
        if self._wanted is None:
            return
        if not self._number:
            sentence = (
                "evaluation.generate: no row of the evaluation data has a prompt and an answer"
            )
            advice = "Give data.eval conversations, or prompts with completions"
            yield Finding(
                "no_questions",
                "error",
                "eval",
                sentence,
                advice=advice,
            )
            return

        for name in self._waiting:
            sentence = (
                f"evaluation.generate.metric: {name} finds no {TARGETS[name].title} in any of the {self._number:,} "
                "references of eval, so every answer would count as wrong"
            )
            advice = "Take another metric, or other evaluation data"
            yield Finding(
                "no_targets",
                "error",
                "eval",
                sentence,
                self._number,
                advice=advice,
            )

    def warnings(self) -> Iterator[Finding]:
        """Yield a warning for references that are compared in part, and for answers that are longer than allowed."""
        # Where rewards judge, a right answer is nothing that is to be written.
        if self._wanted is None or not self._number or "reward" in self._wanted.metric:
            return
        yield from self._numbers.findings(
            "evaluation.generate.metric", "eval", "references of eval"
        )
        yield from self._cut.findings(self._wanted.max_new_tokens)


def read_in_part(
    sources: Sequence[SourceConfig],
    rewards: Sequence[RewardConfig],
    seed: int,
) -> Iterator[Finding]:
    """Yield a warning if the reward `numeric` compares right answers in part. The first records are looked at."""
    for reward in rewards:
        if reward.is_code or reward.name != "numeric":
            continue
        numbers = ReadNumbers()
        for source in sources:
            for record in islice(read_taken(source, seed, Problems(0)), LOOKED_AT):
                answer = _answer_to(record.value, source, reward)
                if answer is not None:
                    numbers.add(answer)
        yield from numbers.findings("rewards", "train", "right answers of train")


def unanswered(
    sources: Sequence[SourceConfig],
    rewards: Sequence[RewardConfig],
    seed: int,
) -> Iterator[Finding]:
    """Yield an error for each reward of which no right answer of training has what it compares with.

    Records are read until each reward has found one, so mostly only the first.
    """
    waiting = [reward for reward in rewards if compares(reward)]
    # Titles of rewards that have an answer, if not one that they can compare with.
    answered: set[str] = set()
    for source in sources:
        if not waiting:
            return
        for record in read_taken(source, seed, Problems(0)):
            still_waiting = []
            for reward in waiting:
                answer = _answer_to(record.value, source, reward)
                if answer is None or _lacks_target(reward, answer):
                    still_waiting.append(reward)
                if answer is not None:
                    answered.add(reward.title)
            waiting = still_waiting
            if not waiting:
                break
    for reward in waiting:
        say = lacks_targets if reward.title in answered else lacks_answers
        yield Finding("no_answers", "error", "train", say(sources[0].path, reward))


def without_answers(
    rows: int,
    unanswered_rows: int,
    evaluation: EvaluationConfig,
    best_metric: str,
) -> Iterator[Finding]:
    """Yield an error if metrics compare with right answers, which prompts of the evaluation data do not have.

    `rows`: of the evaluation data; `unanswered_rows`: of these, the ones without a right answer.
    """
    comparing = [name for name in evaluation.answer_measures if METRICS[name].compares]
    if best_metric in LANGUAGE_METRICS:
        comparing.append(best_metric)
    if not unanswered_rows or not comparing:
        return
    sentence = (
        f"data.eval: {unanswered_rows:,} of {rows:,} rows have no right answer, and {', '.join(comparing)} compares "
        "with it"
    )
    advice = "Leave out those rows, or these metrics: the rewards alone judge answers too"
    yield Finding("no_answers", "error", "eval", sentence, unanswered_rows, advice=advice)


def lacks_answers(path: str, reward: RewardConfig) -> str:
    """Return the sentence about data in which no record has what a reward compares with. `path`: of the data."""
    names = ", ".join(f"`{name}`" for name in dict.fromkeys((*COMPLETIONS, *RIGHT_ANSWERS)))
    where = "an answer"
    remedy = f"expected one of {names}"
    if reward.column:
        where = f"a column {reward.column}"
        remedy = f"name another one, or leave `column` out if the answer is in one of {names}"
    elif not reward.is_code:
        remedy += "; or name the column that holds it by `column` in the reward"
    return f"{path}: reward {reward.title} compares with the right answer, and no record has {where}; {remedy}"


def lacks_targets(path: str, reward: RewardConfig) -> str:
    """Return the sentence about data of which no right answer holds what a reward compares. `path`: of the data."""
    target = TARGETS[reward.title].title
    if reward.title == "label":
        target = "word of its labels"
    return (
        f"{path}: reward {reward.title} finds no {target} in any right answer, so every answer would be rewarded alike; "
        "take another reward, or name the column that holds it by `column` in the reward"
    )


def _lacks_target(reward: RewardConfig, answer: str) -> bool:
    """True if a right answer lacks what a reward compares with: a number, a label word, JSON."""
    if reward.is_code or reward.title not in TARGETS:
        return False
    labels = reward.settings.get("labels", ())
    assert isinstance(labels, tuple)
    return lacks_target(reward.title, answer, labels)


def _answer_to(record: Mapping[str, Any], source: SourceConfig, reward: RewardConfig) -> str | None:
    """Return the right answer that a record has for a reward."""
    try:
        asked = asked_of(record, source)
    except ValueError:
        return None  # it is named among the records that cannot be used
    return asked.answer if reward.column is None else right_answer(asked.record, reward.column)


@dataclass(frozen=True)
class Asked:
    """A record of data whose prompts a model answers itself."""

    prompt: Any  # a text, or the messages of a conversation
    answer: str | None  # the right one
    # Columns by the names that the file has, and by those that `columns` gives them.
    record: dict[str, Any]


def asked_of(record: Mapping[str, Any], source: SourceConfig) -> Asked:
    """Return prompt and right answer of a record. Raise ValueError for one that cannot be used."""
    example = convert(record, source.format, source.columns, kind="prompt")
    prompt: Any = ""
    answer: str | None = None
    # A conversation ends with the right answer, as a pair does.
    if isinstance(example, Chat):
        prompt = [dict(message) for message in example.messages[:-1]]
        answer = example.messages[-1]["content"]
    elif isinstance(example, Pair):
        prompt = example.prompt
        answer = example.completion
    if answer == NO_ANSWER:
        answer = None
    renamed = {name: record.get(column) for name, column in source.columns.items()}
    return Asked(prompt, answer, {**record, **renamed})
