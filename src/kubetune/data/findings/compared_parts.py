"""Counts of the references that are compared in part: numbers beside others, and answers that are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kubetune.data.findings.finding import Finding
from kubetune.data.text.answer_targets import without_thoughts
from kubetune.data.text.numbers import read_number

# Characters of a reference that a sentence shows.
_SHOWN: Final = 40


class ReadNumbers:
    """Give it references of `numeric`; `findings` says then which it compares in part, or as they are written."""

    def __init__(self) -> None:
        self._number = 0
        self._in_part: list[str] = []
        self._as_texts: list[str] = []

    def add(self, reference: str) -> None:
        """Look at a reference. One without a digit is no matter of this."""
        reference = without_thoughts(reference).strip()
        self._number += 1
        number = read_number(reference)
        if number is None:
            return
        if not number.is_whole:
            self._in_part.append(reference)
        elif isinstance(number.value, str):
            self._as_texts.append(reference)

    def findings(
        self,
        key: str,
        split: str,
        what: str,
    ) -> Iterator[Finding]:
        """Yield a warning for each kind of them. `key`: of the run file. `what`: the references, in words."""
        of_all = f"of {self._number:,} {what}"
        if self._in_part:
            sentence = (
                f"{key}: numeric reads only the last number of {len(self._in_part):,} {of_all}, such as "
                f"{_ending(self._in_part[0])!r}"
            )
            advice = "Answers that have this number and others before it count as right; exact_match compares all"
            number = len(self._in_part)
            yield Finding("numbers_in_part", "warning", split, sentence, number, advice=advice)
        if self._as_texts:
            sentence = (
                f"{key}: {len(self._as_texts):,} {of_all} are no single number, such as "
                f"{_ending(self._as_texts[0])!r}, so numeric compares them as they are written"
            )
            advice = "Write decimals with a point, or take another metric where that is too strict"
            number = len(self._as_texts)
            yield Finding("numbers_as_texts", "warning", split, sentence, number, advice=advice)


class CutAnswers:
    """Give it the tokens of answers; `findings` says then how many are longer than answers of an evaluation may be."""

    def __init__(self) -> None:
        self._number = 0
        self._cut = 0
        self._longest = 0

    def add(self, tokens: int, most: int) -> None:
        """Count an answer of so many tokens, of which `most` are generated."""
        self._number += 1
        self._cut += tokens > most
        self._longest = max(self._longest, tokens)

    def findings(self, most: int) -> Iterator[Finding]:
        """Yield a warning if some are longer."""
        if not self._cut:
            return
        sentence = (
            f"evaluation.generate.max_new_tokens is {most:,}, and {self._cut:,} of {self._number:,} answers of eval are "
            f"longer, up to {self._longest:,} tokens, so right answers to these are cut"
        )
        advice = f"Set it to {self._longest:,}, or expect less of the metrics"
        yield Finding("cut_answers", "warning", "eval", sentence, self._cut, advice=advice)


def _ending(reference: str) -> str:
    """Return the end of a reference, where its last number is."""
    return reference if len(reference) <= _SHOWN else f"…{reference[-_SHOWN:]}"
