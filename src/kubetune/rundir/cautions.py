"""What the user of a run should know before its numbers are trusted: rewards that failed, rows that were lost, a loss
that ran away. The list of runs and the page of a run say it beside the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kubetune.base.humanize import share
from kubetune.rundir.totals import nothing_learnt_line, runaway_line

# Warnings about rows are told from this share of the records on: two repeated ones of five hundred change no result.
_MANY = 0.01
# Findings whose count is one of labels or of tokens, not of records.
_NOT_OF_RECORDS = ("labels_without_rows", "positions", "unknown_ids")


def cautions(
    report: Mapping[str, Any],
    data: Mapping[str, Any],
    rewards: Sequence[str],
    last_step: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> list[str]:
    """Return a sentence for each reason to doubt the numbers of a run, the gravest first.

    `rewards`: their titles. `last_step`: the line of the last step. `evaluation`: that which the run stands for.
    """
    return [
        *_of_report(report),
        *_of_rewards(rewards, last_step, evaluation),
        *_of_data(data),
    ]


def _of_report(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the first sentence on a run from which nothing was learned, or whose loss ran away."""
    for key, in_words in (("nothing_learnt", nothing_learnt_line), ("loss_runaway", runaway_line)):
        facts = report.get(key)
        if isinstance(facts, dict):
            # What can be done about it is in the history of the run.
            yield in_words(facts).partition(". ")[0]


def _of_rewards(
    rewards: Sequence[str], last_step: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> Iterator[str]:
    """Yield which rewards judged nothing. A sum without them looks like a bad answer, and is none."""
    # A lone reward is the sum, and has no part of its own.
    parts = rewards if len(rewards) > 1 else ()
    is_judged = any(name.startswith("eval_reward") for name in evaluation)
    for title in parts:
        if is_judged and evaluation.get(f"eval_reward/{title}") is None:
            yield f"reward {title} failed on all held-out prompts, so the held-out reward is without it"
        elif "reward" in last_step and last_step.get(f"reward/{title}") is None:
            yield f"reward {title} failed on all prompts of the last step, so the reward is without it"
    for line, name, what in (
        (evaluation, "eval_unjudged", "held-out answers"),
        (last_step, "unjudged", "answers of the last step"),
    ):
        part = line.get(name)
        if part:
            yield f"no reward could judge {share(part)} of the {what}"


def _of_data(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings about rows: those that were cut or left out, that repeat, or that are held out and trained on."""
    splits = data.get("splits") or {}
    for finding in data.get("findings") or ():
        if finding["severity"] == "note":
            continue
        records = (splits.get(finding.get("split")) or {}).get("records") or 0
        is_many = finding.get("count", records) >= _MANY * records
        if is_many or finding.get("id") in _NOT_OF_RECORDS:
            yield finding.get("sentence") or finding["line"]
