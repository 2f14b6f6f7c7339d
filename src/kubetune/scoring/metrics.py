"""Measures of an answer against a reference: a number for each row, and one for all of them.

Each is a function of (answer, reference), 1.0 for right and 0.0 for wrong if it is not a share. They never see the
thoughts before an answer. BLEU and chrF are sacrebleu's, of all rows together (0 to 100), ROUGE-L is rouge-score's
F-measure (0 to 1): their own packages compute them, and are asked for at the start.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from kubetune.config.schema.evaluation import METRICS, GenerateConfig, packages_of
from kubetune.data.text.answer_targets import (
    INVALID,
    label_pattern,
    normalised,
    parse_json,
    without_thoughts,
)
from kubetune.data.text.numbers import read_number
from kubetune.data.text.words import pieces_of, words_of
from kubetune.extras import require
from kubetune.scoring.statistics import interval

Measure = Callable[[str, str], float]


def exact_match(answer: str, reference: str) -> float:
    """Return 1 if the normalised texts are equal."""
    return float(normalised(answer) == normalised(reference))


def contains(answer: str, reference: str) -> float:
    """Return 1 if the normalised answer contains the normalised reference."""
    return float(normalised(reference) in normalised(answer))


def token_f1(answer: str, reference: str) -> float:
    """Return the F1 of the words that both have, as SQuAD has it: words as often as they occur in both, in any order.

    Of scripts without spaces, characters are counted.
    """
    # "the cat sat" and "a cat sat down" share 2 words of 3 and of 4: 2 · 2 / (3 + 4).
    ours = pieces_of(normalised(answer))
    theirs = pieces_of(normalised(reference))
    if not ours or not theirs:
        return float(ours == theirs)
    common = Counter(ours) & Counter(theirs)
    return 2 * common.total() / (len(ours) + len(theirs))


def numeric(answer: str, reference: str) -> float:
    """Return 1 if the last numbers of both are equal, exactly. A text without a number is wrong."""
    # "The sum is 1,250." and "1250" are equal: prose is before the result.
    ours = read_number(answer)
    theirs = read_number(reference)
    if ours is None or theirs is None:
        return 0.0
    return float(ours.value == theirs.value)


def regex(pattern: str) -> Measure:
    """Return a measure that is 1 if a pattern matches the same in both: its first group or, without one, all of it.

    A reference that the pattern does not match is itself what the answer must match.
    """
    # `#### (\d+)` compares only the digits.
    compiled = re.compile(pattern)
    group = 1 if compiled.groups else 0

    def measure(answer: str, reference: str) -> float:
        ours = find(answer)
        theirs = find(reference)
        if theirs is None:
            theirs = reference
        return float(ours is not None and normalised(ours) == normalised(theirs))

    def find(text: str) -> str | None:
        match = compiled.search(text)
        # A group that takes no part in a match is None too.
        return match[group] if match else None

    return measure


def label(labels: Sequence[str]) -> Measure:
    """Return a measure that is 1 if the first label word is the same in both."""
    pattern = label_pattern(labels)

    def measure(answer: str, reference: str) -> float:
        ours = pattern.search(normalised(answer))
        theirs = pattern.search(normalised(reference))
        return float(ours is not None and theirs is not None and ours[0] == theirs[0])

    return measure


def json_valid(answer: str, reference: str) -> float:
    """Return 1 if the answer, or the code block that it is, is JSON."""
    return float(parse_json(answer) is not INVALID)


def json_equal(answer: str, reference: str) -> float:
    """Return the share of keys with equal values, among the keys of either object; of other values, 1 if equal."""
    ours = parse_json(answer)
    theirs = parse_json(reference)
    # {"a": 1, "b": 2} and {"a": 1, "c": 3} have three keys, of which one has equal values: 1/3.
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = ours.keys() | theirs.keys()
        if not keys:
            return 1.0
        common = ours.keys() & theirs.keys()
        equal = sum(_same(ours[key], theirs[key]) for key in common)
        return equal / len(keys)

    return float(ours is not INVALID and _same(ours, theirs))


def _same(ours: Any, theirs: Any) -> bool:
    """True if both are equal as JSON has it: `true` is not 1, though Python says so.

    Answers may nest deeper than functions can call themselves, so this is a loop.
    """
    # Pairs that are still to be compared; lists and objects add their items.
    pairs = [(ours, theirs)]
    while pairs:
        ours, theirs = pairs.pop()
        if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            pairs += zip(ours, theirs, strict=True)
        elif isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
            pairs += [(ours[key], theirs[key]) for key in ours]
        # True == 1 in Python, and lists and objects that came here differ in their kind, length or keys.
        elif isinstance(ours, (bool, list, dict)) or isinstance(theirs, (bool, list, dict)):
            if ours is not theirs:
                return False
        elif ours != theirs:
            return False

    return True


def _rouge_l(_: GenerateConfig) -> Measure:
    """Return ROUGE-L's F-measure, without stemming, of the words of any script."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import Tokenizer

    class Words(Tokenizer):  # type: ignore[misc]
        def tokenize(self, text: str) -> list[str]:
            return words_of(text)

    scorer = RougeScorer(["rougeL"], tokenizer=Words())
    return lambda answer, reference: float(scorer.score(reference, answer)["rougeL"].fmeasure)


def _bleu(_: GenerateConfig) -> Measure:
    # Without it short sentences, which have no 4-gram, would have no score.
    return _of_sentence(_sacrebleu("bleu", effective_order=True))


def _chrf(_: GenerateConfig) -> Measure:
    return _of_sentence(_sacrebleu("chrf"))


def _of_sentence(metric: Any) -> Measure:
    return lambda answer, reference: float(metric.sentence_score(answer, [reference]).score)


def _plain(measure: Measure) -> Callable[[GenerateConfig], Measure]:
    """Return what makes a measure that has no settings."""
    return lambda _: measure


# Name of a metric → what makes its measure from the settings. `config/schema/evaluation.METRICS` says what it needs.
MAKERS: Final[dict[str, Callable[[GenerateConfig], Measure]]] = {
    "exact_match": _plain(exact_match),
    "contains": _plain(contains),
    "regex": lambda wanted: regex(wanted.pattern or ""),
    "numeric": _plain(numeric),
    "json_valid": _plain(json_valid),
    "json_equal": _plain(json_equal),
    "label": lambda wanted: label(wanted.labels),
    "token_f1": _plain(token_f1),
    "rouge_l": _rouge_l,
    "bleu": _bleu,
    "chrf": _chrf,
}


def measures_of(
    wanted: GenerateConfig, key: str = "evaluation.generate.metric"
) -> dict[str, Measure]:
    """Return the built-in measures that a config asks for, by name. Raise MissingExtra that names the key."""
    require(key, *packages_of(wanted.metric))
    measures: dict[str, Measure] = {}
    for name in wanted.metric:
        if name != "reward":
            measures[name] = _behind_thoughts(MAKERS[name](wanted))
    return measures


def _behind_thoughts(measure: Measure) -> Measure:
    """Return a measure that compares what is after the thoughts of both texts."""
    return lambda answer, reference: measure(without_thoughts(answer), without_thoughts(reference))


def _is_of_all_rows(name: str) -> bool:
    # A user's own metric is the mean of its rows.
    return name in METRICS and METRICS[name].is_of_all_rows


def of_all(
    name: str,
    scores: Sequence[float],
    answers: Sequence[str],
    references: Sequence[str],
) -> float:
    """Return one number for all rows: the mean, but for BLEU and chrF, which are measured over the whole corpus."""
    # Their counts of n-grams are added up before they are divided, so no mean of rows equals them.
    if _is_of_all_rows(name):
        return float(_corpus_score(name, answers, references).score)
    return math.fsum(scores) / len(scores) if scores else math.nan


def bounds(
    name: str,
    scores: Sequence[float],
    answers: Sequence[str],
    references: Sequence[str],
) -> tuple[float, float]:
    """Return the 95 % interval of `of_all`; of BLEU and chrF by sacrebleu's bootstrap of the corpus, the same each time."""
    if not _is_of_all_rows(name):
        return interval(scores)
    # sacrebleu holds all samples at once, so of many rows fewer are drawn.
    num_samples = min(1000, max(100, 2**21 // len(answers)))
    score = _corpus_score(name, answers, references, n_bootstrap=num_samples)
    # The bounds are sacrebleu's own, which it prints and has no other names for.
    low = float(score._mean - score._ci)
    high = float(score._mean + score._ci)
    return max(0.0, low), min(100.0, high)


def _corpus_score(
    name: str,
    answers: Sequence[str],
    references: Sequence[str],
    **settings: Any,
) -> Any:
    """Return sacrebleu's score of all answers together, without their thoughts."""
    texts = [without_thoughts(answer) for answer in answers]
    expected = [without_thoughts(reference) for reference in references]
    return _sacrebleu(name).corpus_score(texts, [expected], **settings)


def _sacrebleu(name: str, **settings: Any) -> Any:
    from sacrebleu import metrics

    # The classes are called BLEU and CHRF.
    return getattr(metrics, name.upper())(**settings)
