"""The few numbers of a run that a reader wants first: its state, and a card for each number."""

from __future__ import annotations

from dataclasses import dataclass

from kubetune.base.humanize import duration, number, share, short, size
from kubetune.reporting.point import measure, point
from kubetune.reporting.reading import RunRecord
from kubetune.rundir import exit_status, metrics
from kubetune.rundir.cautions import cautions
from kubetune.rundir.status import launched_at, ranks, state_of


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


def cautions_of(run: RunRecord) -> list[str]:
    """Return a sentence for each reason to doubt the numbers of the run, as lists of runs have them too."""
    rewards = [reward.title for reward in run.config.rewards]
    last_step = run.numbers.totals.last
    return cautions(run.report, run.data, rewards, last_step, run.of_best or {})


def cards(run: RunRecord) -> list[Card]:
    """Return the cards of a run, in the order of the page."""
    return [*_progress(run), *_work(run), *_machine_use(run)]


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


def measured_cards(run: RunRecord) -> list[Card]:
    """Return a card for each metric of the checkpoint that its user gets; that which the run is about is first."""
    about = point(run)
    line = run.of_best
    if line is None:
        return []
    names = [about.name] if about else []
    names += [name for name in line if name.startswith("eval_") and _says_quality(name)]
    shown = []
    for name in dict.fromkeys(names):
        value = measure(run, line, name)
        if value is not None:
            shown.append(
                Card(
                    value.label,
                    value.texts[1],
                    value.interval_text,
                    value.after,
                    value.better,
                    value.interval,
                )
            )
    return shown


def _says_quality(name: str) -> bool:
    """True for metrics that say how good a checkpoint is, not what it is made of: sources, functions, sides of a pair."""
    return "/" not in name and not name.endswith(
        ("perplexity", "_std", "_unjudged", "_chosen", "_rejected", "_kl")
    )
