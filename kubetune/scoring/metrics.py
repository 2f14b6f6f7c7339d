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


def normalised(text: str) -> str:
    """Text without what two right answers may differ in: case, width of letters, spaces, and a full stop at the end."""
    return (
        " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".").rstrip()
    )


def exact_match(answer: str, reference: str) -> float:
    """Equality of the normalised texts."""
    return float(normalised(answer) == normalised(reference))


def contains(answer: str, reference: str) -> float:
    """Presence of the normalised reference in the normalised answer."""
    return float(normalised(reference) in normalised(answer))


def numeric(answer: str, reference: str) -> float:
    """Equality of the last numbers of both; commas group thousands. A text without a number is wrong."""
    ours, theirs = _last_number(answer), _last_number(reference)
    return float(
        ours is not None
        and theirs is not None
        and math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-9)
    )


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text.replace("\u2212", "-"))  # the minus sign of typeset text
    return float(found[-1].replace(",", "")) if found else None


def regex(pattern: str) -> Measure:
    """Equality of what a pattern finds in both: its first group or, without one, all of the match.

    A reference in which it finds nothing is what is to be found itself.
    """
    compiled = re.compile(pattern)

    def found(text: str) -> str | None:
        match = compiled.search(text)
        return None if match is None else match[1 if compiled.groups else 0]

    def measure(answer: str, reference: str) -> float:
        ours, theirs = found(answer), found(reference)
        return float(
            ours is not None
            and normalised(ours) == normalised(reference if theirs is None else theirs)
        )

    return measure


def label(labels: Sequence[str]) -> Measure:
    """Equality of the first label word in both. Longer ones are looked for first: `not good` is not `good`."""
    pattern = _label_pattern(labels)

    def measure(answer: str, reference: str) -> float:
        ours, theirs = (pattern.search(normalised(text)) for text in (answer, reference))
        return float(ours is not None and theirs is not None and ours[0] == theirs[0])

    return measure


def _label_pattern(labels: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds a label word in a normalised text."""
    words = sorted(map(normalised, labels), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w)")


def json_valid(answer: str, reference: str) -> float:
    """Validity as JSON, also between the fences of a code block that is all of the answer; NaN is none."""
    return float(_parse(answer) is not _INVALID)


def json_equal(answer: str, reference: str) -> float:
    """Share of keys with equal values, among the keys of either object; of other values, equality."""
    ours, theirs = _parse(answer), _parse(reference)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = ours.keys() | theirs.keys()
        equal = sum(key in ours and key in theirs and _same(ours[key], theirs[key]) for key in keys)
        return equal / len(keys) if keys else 1.0
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
    fence = _FENCE.fullmatch(text.strip())
    try:
        return json.loads(fence[1] if fence else text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return _INVALID


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _same(ours: Any, theirs: Any) -> bool:
    """Equality as JSON has it: `true` is not 1, though Python says so. Answers may nest deeper than functions can."""
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
    """ROUGE-L's F-measure, without stemming."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return lambda answer, reference: float(scorer.score(reference, answer)["rougeL"].fmeasure)


def _sentence(metric: Any) -> Measure:
    return lambda answer, reference: float(metric.sentence_score(answer, [reference]).score)


def measures_of(wanted: GenerateConfig) -> dict[str, Measure]:
    """The built-in measures that a config asks for, by name. Raises ConfigError for packages that are missing."""
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
    if name in OF_ALL_ROWS:
        # Of sentences one at a time, short ones would have no 4-gram and so no score.
        return _sentence(
            _sacrebleu(name, effective_order=True) if name == "bleu" else _sacrebleu(name)
        )
    if name == "regex":
        return regex(wanted.pattern or "")
    if name == "label":
        return label(wanted.labels)
    return rouge_l() if name == "rouge_l" else plain[name]


def of_all(
    name: str, scores: Sequence[float], answers: Sequence[str], references: Sequence[str]
) -> float:
    """One number for all rows: the mean of theirs, but for BLEU and chrF, which are measured over the whole corpus."""
    if name not in OF_ALL_ROWS:
        return math.fsum(scores) / len(scores) if scores else math.nan
    return float(_sacrebleu(name).corpus_score(list(answers), [list(references)]).score)


def bounds(
    name: str, scores: Sequence[float], answers: Sequence[str], references: Sequence[str]
) -> tuple[float, float]:
    """The 95 % interval of `of_all`; of BLEU and chrF by sacrebleu's bootstrap of the corpus, the same each time."""
    if name not in OF_ALL_ROWS:
        return interval(scores)
    drawn = min(
        1000, max(100, 2**21 // len(answers))
    )  # all at once: fewer of many rows, for the memory's sake
    found = _sacrebleu(name).corpus_score(list(answers), [list(references)], n_bootstrap=drawn)
    return max(0.0, float(found._mean - found._ci)), min(100.0, float(found._mean + found._ci))


def _sacrebleu(name: str, **settings: Any) -> Any:
    from sacrebleu import metrics

    return getattr(metrics, name.upper())(**settings)
