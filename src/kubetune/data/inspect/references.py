"""Looks whether the answers of evaluation rows hold what a run will compare answers with: a number, a label word, JSON.

A run refuses to begin where none does. The check of data says so before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kubetune.config.schema.evaluation import GenerateConfig
from kubetune.data.findings.finding import Finding
from kubetune.data.text.answers import TARGETS, lacks_target, last_answer
from kubetune.data.text.tokenizer import Tokenizer


class References:
    """Give it the sequences of evaluation rows; `findings` says then what no reference holds."""

    def __init__(self, wanted: GenerateConfig | None, tokenizer: Tokenizer) -> None:
        self._wanted = wanted
        self._tokenizer = tokenizer
        self._number = 0  # references so far, as long as each was looked at
        # Measures that have found nothing to compare with yet. Most find something in the first reference.
        self._waiting: list[str] = []
        if wanted is not None:
            self._waiting = [name for name in wanted.metric if name in TARGETS]

    @property
    def is_complete(self) -> bool:
        """True if other sequences would change nothing."""
        return self._wanted is None or (self._number > 0 and not self._waiting)

    def add(
        self,
        ids: Sequence[int],
        trained: bytes,
        answer: str,
    ) -> None:
        """Look at the last answer of a row's first sequence, which of a pair has the chosen one.

        `trained`: a 1 for each id that is trained, else a 0. `answer`: "bad" where somebody judged it so.
        """
        place = last_answer(trained)
        if self._wanted is None or place is None or answer == "bad":
            return

        begin, is_whole = place
        # A text that is trained whole asks nothing.
        if is_whole:
            return
        self._number += 1

        # As an evaluation decodes it, without special tokens.
        reference = self._tokenizer.decode(list(ids[begin:])).strip()
        # One reference with a number is enough for `numeric`, and so for each measure.
        still_waiting = []
        for name in self._waiting:
            if lacks_target(name, reference, self._wanted.labels):
                still_waiting.append(name)
        self._waiting = still_waiting

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
                f"evaluation.generate.metric: {name} finds no {TARGETS[name]} in any of the {self._number:,} "
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
