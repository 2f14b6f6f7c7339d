"""A sweep as its page shows it: plain data, which the templates and the figure are made of."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from kubetune.base.humanize import counted, number
from kubetune.reporting.cards import Card

# States of a trial, in the order in which the page counts them, and what their lines look like.
STATES = {
    "done": "a line in the colour of its result",
    "stopped early": "dashed, at its last value",
    "running": "dotted, at its value so far",
    "waiting": "dotted, at its value so far",
    "failed": "red and dotted",
}


@dataclass(frozen=True)
class Setting:
    """A setting that is searched: numbers from `low` to `high`, or `choices`."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False  # searched on a logarithmic scale
    whole: bool = False  # integers only
    choices: tuple[str, ...] = ()  # in the order in which they were typed; empty for numbers
    importance: float | None = None  # a share of 1; None if unknown


@dataclass(frozen=True)
class RunLink:
    """A run of a trial."""

    name: str
    address: str = ""  # of its page; "" if it has none that this page could link to


@dataclass(frozen=True)
class TrialFacts:
    """A trial."""

    number: int
    state: str  # a key of STATES
    values: tuple[str | None, ...]  # of each setting, as text; None if the record lacks it
    value: float | None  # of the metric: the mean of its seeds
    spread: float | None  # standard deviation over its seeds
    steps: str
    why: str  # why it failed
    runs: tuple[RunLink, ...]

    @property
    def shown(self) -> list[str]:
        """The values as people read them: a long number with four digits, a dash for none."""
        return [_readable(text) for text in self.values]

    @property
    def result(self) -> float | None:
        """The value that is drawn; None without one, or if it is of a trial that failed."""
        if self.value is None or self.state == "failed" or not math.isfinite(self.value):
            return None
        return self.value


@dataclass(frozen=True)
class SweepFacts:
    """A sweep."""

    name: str
    state: str  # one of those that a run has, or `damaged`
    reason: str  # why nothing continues, "" if it does or is done
    lead: str  # a sentence on what is searched, and how
    metric: str
    greater: bool  # True if more of the metric is better
    settings: tuple[Setting, ...]
    trials: tuple[TrialFacts, ...]  # the best first, then those that are not done
    cards: tuple[Card, ...]
    best: TrialFacts | None
    advice: str  # how sure one can be of the best trial
    run_file: str  # path of the best trial's run file, "" before there is one
    importance: str  # how the importances were computed, or why there are none

    @property
    def labels(self) -> list[str]:
        """Names of the settings, short if that leaves them different: `dropout` for `lora.dropout`."""
        lasts = [setting.key.rpartition(".")[2] for setting in self.settings]
        labels = []
        for setting, last in zip(self.settings, lasts, strict=True):
            label = setting.key
            # Just `r` would say too little.
            if lasts.count(last) == 1 and len(last) > 3:
                label = last
            labels.append(label)
        return labels

    @property
    def summary(self) -> str:
        """A description of the figure, in words: nothing is left out without being counted."""
        if not self.trials:
            return "No trial has begun yet."
        states = Counter(trial.state for trial in self.trials)
        parts = []
        for state, look in STATES.items():
            if states[state]:
                parts.append(f"{states[state]} {state} ({look})")
        sentences = [f"{counted(len(self.trials), 'trial')}: {', '.join(parts)}."]

        without_result = 0
        partial = 0
        for trial in self.trials:
            without_result += trial.result is None
            partial += None in trial.values
        if without_result:
            sentences.append(f"Without a result: {without_result}, at the foot of the last axis.")
        if partial:
            sentences.append(
                f"Without a value of some setting in the record: {partial}, with a gap there."
            )
        return " ".join(sentences)


def _readable(text: str | None) -> str:
    """Return a value as the table shows it."""
    # 64 and 0.05 are short enough, and are shown as they were typed.
    if text is None or len(text) < 7:
        return text or "–"
    try:
        return number(float(text))
    except ValueError:
        return text
