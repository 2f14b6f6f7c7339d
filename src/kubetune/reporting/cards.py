"""The few numbers of a run that a reader wants first: its state, and a card for each number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kubetune.base.humanize import duration, number, share, short, size
from kubetune.config.metric_names import is_greater_better
from kubetune.reporting.look.measured import interval, measured
from kubetune.reporting.reading import RunRecord
from kubetune.reporting.verdict_lines import verdict
from kubetune.rundir import exit_status, metrics
from kubetune.rundir.status import launched_at, ranks, state_of

EVALUATION_LOSS = "Evaluation loss"


@dataclass(frozen=True)
class Card:
    """One number with a label."""

    label: str
    value: str  # as the page writes it
    about: str = ""  # a remark below the number
    order: float | None = None  # the number that a table of several runs is sorted by
    # 1 if more is better, -1 if less is; 0 for what says nothing of quality, such as time, speed and memory
    better: int = 0
    interval: tuple[float, float] | None = None  # of 95 %, where answers were judged


def status(run: RunRecord) -> tuple[str, str]:
    """Return the state of the run in one word, and the reason."""
    if run.exit_status is None and run.report.get("finished"):
        return "done", ""  # started without an agent, so nobody wrote exit.json
    if run.exit_status is None:
        # The same words as in `kubetune runs` and `watch`.
        return state_of(None, ranks(run.path), launched_at(run.events))

    # The reason of a run that is "done, but …" is "but …": its state says the rest.
    reason = run.exit_status.reason.removeprefix(exit_status.DONE).removeprefix(", ")
    return run.exit_status.state, reason


def best_evaluation(run: RunRecord) -> dict[str, Any] | None:
    """Return the evaluation with the best value of `metric_for_best_model`, or None."""
    name = run.config.training.metric_for_best_model
    # The value is None if it was not finite; such an evaluation is never the best.
    measured = [line for line in run.evaluations if isinstance(line.get(name), int | float)]
    if not measured:
        return None

    if run.config.training.prefers_greater:
        return max(measured, key=lambda line: line[name])
    return min(measured, key=lambda line: line[name])


def last_step(run: RunRecord) -> int:
    """Return the last step that anything in the run directory knows of, though its numbers may be lost."""
    steps = [run.report.get("steps") or 0, int(run.numbers.totals.last.get("step", 0))]
    steps += [checkpoint.step for checkpoint in run.checkpoints]

    # Checkpoints are kept when lines of metrics are lost, and the other way round.
    return max(steps)


def damage(run: RunRecord) -> list[str]:
    """Return a sentence for each part of the run that the page lacks, because it is damaged or lost."""
    sentences = list(run.damage)
    last = last_step(run)
    lost = last - run.numbers.totals.steps
    # While a long file is still being read, what is missing is not lost.
    if lost > 0 and not run.numbers.unread:
        sentences.append(
            f"{metrics.METRICS} lacks {lost:,} of {last:,} steps, and so do the curves"
        )
    return sentences


def cards(run: RunRecord) -> list[Card]:
    """Return the cards of a run, in the order of the page."""
    return [*_progress(run), *_best_metric(run), *_work(run), *_machine_use(run)]


def _progress(run: RunRecord) -> list[Card]:
    """Return steps and training loss."""
    totals = run.numbers.totals
    steps = last_step(run)
    planned = ""
    if run.plan and run.plan.num_steps:
        planned = f"of {run.plan.num_steps:,} planned"

    loss = totals.last.get("loss")
    first_loss = ""
    if totals.steps:
        first_loss = f"{number(totals.first.get('loss'))} at first"
    return [
        Card("Steps", number(steps), planned, steps),
        Card("Training loss", number(loss), first_loss, loss),
    ]


def _best_metric(run: RunRecord) -> list[Card]:
    """Return the best value of the metric that chooses the best checkpoint, after what it was before training."""
    best = best_evaluation(run)
    if best is None:
        return []
    name = run.config.training.metric_for_best_model
    label = name.removeprefix("eval_").replace("_", " ")
    about = f"evaluation at step {best['step']:,}"
    value = measured(best[name], name)
    if name in run.base:
        value = f"{measured(run.base[name], name)} → {value}"
        about = f"before training → step {best['step']:,}"
    better = 1 if run.config.training.prefers_greater else -1
    # A run that is judged by something else has its loss in the same column.
    title = EVALUATION_LOSS if name == "eval_loss" else f"Best {label}"
    return [Card(title, value, about, best[name], better)]


def work_done(run: RunRecord) -> tuple[float, int, int]:
    """Return the seconds of all steps, their tokens, and how many of these are trained."""
    totals = run.numbers.totals
    if run.report.get("steps") == last_step(run):
        # The report also counts steps without lines, which the disk has lost.
        report = run.report
        return (
            report.get("seconds") or 0,
            report.get("tokens") or 0,
            report.get("trained_tokens") or 0,
        )
    return totals.seconds, totals.tokens, totals.trained_tokens


def _work(run: RunRecord) -> list[Card]:
    """Return tokens, time and speed."""
    seconds, tokens, trained = work_done(run)
    # A classifier's loss is of the whole sample, not of some of its tokens.
    trained_share = ""
    if tokens and run.config.task != "sequence_classification":
        trained_share = f"{share(trained / tokens)} of them trained"

    speed = tokens / seconds if seconds else None
    return [
        Card("Tokens", short(tokens), trained_share, tokens),
        Card("Time in steps", duration(seconds), "", seconds),
        Card("Tokens/s", number(speed), "without padding", speed),
    ]


def _machine_use(run: RunRecord) -> list[Card]:
    """Return the share of the GPUs' arithmetic that was used (MFU), if it is known, and memory."""
    shown = []
    throughput = run.report.get("throughput") or {}
    mfu = throughput.get("mfu")
    if mfu is not None:
        source = throughput["peak_source"].partition(":")[0]
        about = f"of {throughput['peak_tflops']:,.3g} TFLOP/s, {source}"
        shown.append(Card("MFU", share(mfu), about, mfu))

    # Lines of timings are rank 0's. The report has the highest of all, but only at the end.
    peak = run.report.get("peak_memory_bytes") or run.numbers.peak_memory_bytes
    whose = "highest of all ranks" if run.report else "rank 0"
    return [*shown, Card("Peak memory", size(peak), whose, peak)]


def evaluation_loss(run: RunRecord) -> list[Card]:
    """Return the loss of the last evaluation, unless the best checkpoint is chosen by it and has a card."""
    if run.config.training.metric_for_best_model == "eval_loss":
        return []
    for line in reversed(run.evaluations):
        loss = line.get("eval_loss")
        if isinstance(loss, int | float):
            return [Card(EVALUATION_LOSS, number(loss), f"at step {line['step']:,}", loss, -1)]
    return []


def judged_cards(run: RunRecord) -> list[Card]:
    """Return a card for each metric of the best checkpoint's answers that has an interval."""
    judgement = verdict(run.verdict, run.benchmarks)
    if judgement is None:
        return []
    shown = []
    for row in judgement["rows"]:
        if "after_interval" not in row:
            continue
        label = row["name"].removeprefix("eval_").replace("_", " ")

        low, high = row["after_interval"]
        about = f"95 %: {interval(row['after_interval'], row['name'])}"
        better = 1 if is_greater_better(row["name"]) else -1
        shown.append(
            Card(label, measured(row["best"], row["name"]), about, row["best"], better, (low, high))
        )

    return shown
