"""Measures of an answer against a reference: a number for each row, and one for all of them.

Each is a function of (answer, reference), 1.0 for right and 0.0 for wrong where it is not a share. BLEU and chrF are
sacrebleu's, of all rows together (0 to 100), ROUGE-L is rouge-score's F-measure (0 to 1): their own packages compute
them, and are asked for at the start.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kubetune.config.schema.evaluation import GenerateConfig
from kubetune.extras import require
from kubetune.scoring.statistics import interval

Measure = Callable[[str, str], float]

PACKAGES: Final = {"rouge_l": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}
"""Packages that measures are computed by: the extra `evaluation`."""
TARGETS: Final = {
    "numeric": "number",
    "label": "word of evaluation.generate.labels",
    "json_equal": "JSON",
}
"""What measures look for in a reference, of those that find nothing in some."""
OF_ALL_ROWS: Final = ("bleu", "chrf")
"""Measures that are no mean of rows."""

_NUMBER = re.compile(r"(?:(?<!\d)-)?(?:\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+)")
"""A number with its sign; a minus directly behind a digit is none, but part of a range or a date."""
_FENCE = re.compile(r"```\w*\s*\n(.*?)\n?```", re.DOTALL)
_REASONING = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
"""What some models write before each answer; Qwen3's chat template has them write it without a thought in it too."""


def normalised(text: str) -> str:
    """Return a text without what right answers may differ in: case, width of letters, spaces, a full stop at the end."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).removesuffix(".").rstrip()


def exact_match(answer: str, reference: str) -> float:
    """Return 1 if the normalised texts are equal."""
    return float(normalised(answer) == normalised(reference))


def contains(answer: str, reference: str) -> float:
    """Return 1 if the normalised answer contains the normalised reference."""
    return float(normalised(reference) in normalised(answer))


def numeric(answer: str, reference: str) -> float:
    """Return 1 if the last numbers of both are equal; commas group thousands. A text without a number is wrong."""
    ours = _last_number(answer)
    theirs = _last_number(reference)
    if ours is None or theirs is None:
        return 0.0
    return float(math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-9))


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text.replace("\u2212", "-"))  # the minus sign of typeset text
    return float(numbers[-1].replace(",", "")) if numbers else None


def regex(pattern: str) -> Measure:
    """Return a measure that is 1 if a pattern matches the same in both: its first group or, without one, all of it.

    A reference that the pattern does not match is itself what the answer must match.
    """
    compiled = re.compile(pattern)
    group = 1 if compiled.groups else 0

    def measure(answer: str, reference: str) -> float:
        in_answer = compiled.search(answer)
        in_reference = compiled.search(reference)
        # A group that takes no part in a match is None.
        ours = in_answer[group] if in_answer else None
        theirs = in_reference[group] if in_reference else None
        if theirs is None:
            theirs = reference
        return float(ours is not None and normalised(ours) == normalised(theirs))

    return measure


def label(labels: Sequence[str]) -> Measure:
    """Return a measure that is 1 if the first label word is the same in both.

    Longer words are looked for first: `not good` is not `good`.
    """
    pattern = _label_pattern(labels)

    def measure(answer: str, reference: str) -> float:
        ours = pattern.search(normalised(answer))
        theirs = pattern.search(normalised(reference))
        return float(ours is not None and theirs is not None and ours[0] == theirs[0])

    return measure


def _label_pattern(labels: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds a label word in a normalised text."""
    words = sorted(map(normalised, labels), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)")


def json_valid(answer: str, reference: str) -> float:
    """Return 1 if the answer, or the code block that it is, is JSON; NaN is not. Reasoning before it does not count."""
    return float(_parse(answer) is not _INVALID)


def json_equal(answer: str, reference: str) -> float:
    """Return the share of keys with equal values, among the keys of either object; of other values, 1 if equal."""
    ours = _parse(answer)
    theirs = _parse(reference)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = ours.keys() | theirs.keys()
        if not keys:
            return 1.0
        common = ours.keys() & theirs.keys()
        equal = sum(_same(ours[key], theirs[key]) for key in common)
        return equal / len(keys)
    return float(ours is not _INVALID and _same(ours, theirs))


def lacks_target(name: str, reference: str, labels: Sequence[str]) -> bool:
    """True if a measure compares with something that this reference does not hold, so that each answer is wrong."""
    if name == "numeric":
        return _last_number(reference) is None
    if name == "label":
        return _label_pattern(labels).search(normalised(reference)) is None
    if name == "json_equal":
        return _parse(reference) is _INVALID
    return False


_INVALID = object()


def _parse(text: str) -> Any:
    if reasoning := _REASONING.match(text):
        text = text[reasoning.end() :]
    fence = _FENCE.fullmatch(text.strip())
    try:
        return json.loads(fence[1] if fence else text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return _INVALID


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _same(ours: Any, theirs: Any) -> bool:
    """True if both are equal as JSON has it: `true` is not 1, though Python says so.

    Answers may nest deeper than functions can call themselves, so this is a loop.
    """
    pairs = [(ours, theirs)]
    while pairs:
        ours, theirs = pairs.pop()
        if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
            pairs += zip(ours, theirs, strict=True)
        elif isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
            pairs += [(ours[key], theirs[key]) for key in ours]
        elif isinstance(ours, (bool, list, dict)) or isinstance(theirs, (bool, list, dict)):
            if ours is not theirs:
                return False
        elif ours != theirs:
            return False
    return True


def rouge_l() -> Measure:
    """Return ROUGE-L's F-measure, without stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return lambda answer, reference: float(scorer.score(reference, answer)["rougeL"].fmeasure)


def _sentence(metric: Any) -> Measure:
    return lambda answer, reference: float(metric.sentence_score(answer, [reference]).score)


def measures_of(wanted: GenerateConfig) -> dict[str, Measure]:
    """Return the built-in measures that a config asks for, by name. Raises ConfigError for packages that are missing."""
    packages = {PACKAGES[name] for name in wanted.metric if name in PACKAGES}
    require("evaluation.generate.metric", *sorted(packages))
    return {name: _measure(name, wanted) for name in wanted.metric}


def _measure(name: str, wanted: GenerateConfig) -> Measure:
    plain: Mapping[str, Measure] = {
        "exact_match": exact_match,
        "contains": contains,
        "numeric": numeric,
        "json_valid": json_valid,
        "json_equal": json_equal,
    }
    if name == "bleu":
        # Without it short sentences, which have no 4-gram, would have no score.
        return _sentence(_sacrebleu(name, effective_order=True))
    if name == "chrf":
        return _sentence(_sacrebleu(name))
    if name == "regex":
        return regex(wanted.pattern or "")
    if name == "label":
        return label(wanted.labels)
    return rouge_l() if name == "rouge_l" else plain[name]


def of_all(
    name: str, scores: Sequence[float], answers: Sequence[str], references: Sequence[str]
) -> float:
    """Return one number for all rows: the mean, but for BLEU and chrF, which are measured over the whole corpus."""
    if name not in OF_ALL_ROWS:
        return math.fsum(scores) / len(scores) if scores else math.nan
    return float(_sacrebleu(name).corpus_score(list(answers), [list(references)]).score)


def bounds(
    name: str, scores: Sequence[float], answers: Sequence[str], references: Sequence[str]
) -> tuple[float, float]:
    """Return the 95 % interval of `of_all`; of BLEU and chrF by sacrebleu's bootstrap of the corpus, the same each time."""
    if name not in OF_ALL_ROWS:
        return interval(scores)
    # sacrebleu holds all samples at once, so of many rows fewer are drawn.
    num_samples = min(1000, max(100, 2**21 // len(answers)))
    score = _sacrebleu(name).corpus_score(
        list(answers), [list(references)], n_bootstrap=num_samples
    )
    low = float(score._mean - score._ci)
    high = float(score._mean + score._ci)
    return max(0.0, low), min(100.0, high)


def _sacrebleu(name: str, **settings: Any) -> Any:
    from sacrebleu import metrics

    return getattr(metrics, name.upper())(**settings)
