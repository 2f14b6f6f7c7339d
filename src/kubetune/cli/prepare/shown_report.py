"""A report of `kubetune data check` on a terminal: counts, lengths, rendered rows, and what is wrong."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import counted, visible

if TYPE_CHECKING:
    from rich.console import Console

    from kubetune.data.inspect.check import Report, Sample
    from kubetune.data.reading.record_problems import Problems


CLASSES_SHOWN = 20
# Characters of the longest bar of a histogram.
WIDEST_BAR = 40
# A row's stretches that are trained, and those between them, of which a terminal shows so many.
MOST_PIECES = 24


def show(report: Report, console: Console) -> None:
    """Print a report for people."""
    from rich.text import Text

    from kubetune.data.findings.finding import OF_RUN
    from kubetune.data.inspect.check import histogram

    has_share = report.labels is None and not report.draws_answers
    for split, stats in report.stats.items():
        console.print(Text.assemble((split, "bold"), f": {counts_of(stats, has_share=has_share)}"))
        # A split of one source has nothing to compare.
        if len(stats["sources"]) > 1:
            for source in stats["sources"]:
                line = f"  {visible(source['path'])}: {counts_of(source, has_share=has_share)}"
                console.print(line, markup=False)
        if stats["classes"]:
            console.print(f"  labels: {_classes(Counter(stats['classes']))}", markup=False)
        _show_histogram(histogram(report.lengths[split]), console)

    _show_samples(report, console)
    if report.date:
        console.print(
            f"the chat template writes a date: {report.date} (data.date)", highlight=False
        )
    if report.saved_share:
        share = f"{report.saved_share:.0%} of the tokens, as far as the first rows show"
        console.print(
            f"shared beginnings: {share}, computed once (data.share_prefixes)", highlight=False
        )

    # What is wrong comes last, where a terminal still shows it.
    _show_findings(report, console)
    _show_problems(report.problems, console)
    console.print()
    is_warned = any(finding.id == OF_RUN for finding in report.findings)
    if report.ok and is_warned:
        console.print(
            "[bold yellow]ready to train, except for what this machine lacks[/bold yellow]"
        )
    elif report.ok:
        console.print("[bold green]ready to train[/bold green]")
    else:
        console.print("[bold red]not ready to train[/bold red]")


def _show_problems(problems: Problems, console: Console) -> None:
    """Print the first records that cannot be used, each with its line, and the number of the others."""
    from kubetune.data.reading.record_problems import SHOWN

    sentences = problems.sentences()
    for text in sentences[:SHOWN]:
        console.print(text, markup=False)
    if len(sentences) > SHOWN:
        console.print(f"and {len(sentences) - SHOWN:,} more")


_COLOURS = {"error": "red", "warning": "yellow", "note": "default"}


def _show_findings(report: Report, console: Console) -> None:
    from rich.text import Text

    from kubetune.data.findings.finding import NOTHING_FOUND
    from kubetune.data.findings.sentences import BAD_RECORDS

    console.print()
    for finding in report.findings:
        # The lines of bad records follow, so nobody needs to be told where to find them.
        line = finding.sentence if finding.id == BAD_RECORDS else finding.line
        console.print(Text(f"{finding.severity}: {line}", style=_COLOURS[finding.severity]))
    if not report.findings:
        console.print(NOTHING_FOUND)


def _classes(rows: Counter[str]) -> str:
    """Return the classes with the most rows and their numbers."""
    classes = []
    for name, count in rows.most_common(CLASSES_SHOWN):
        classes.append(f"{visible(name, keep='')} × {count:,}")
    if len(rows) > CLASSES_SHOWN:
        classes.append(f"{len(rows) - CLASSES_SHOWN:,} more")
    return ", ".join(classes)


def _show_samples(report: Report, console: Console) -> None:
    number = 0
    for sample, answer in zip(report.samples, report.sample_answers, strict=True):
        # The rejected answer belongs to the row of the chosen one before it.
        if answer != "rejected":
            number += 1
        pieces = [(visible(text), is_trained) for text, is_trained in shortened(sample)]
        _show_sample(number, answer, pieces, console)


def _show_sample(number: int, answer: str, sample: Sample, console: Console) -> None:
    from rich.text import Text

    what = "what is trained"
    if answer:
        what = f"the {answer} answer"

    # Answers to a prompt are drawn, so nothing of its row is trained.
    if answer == "none":
        console.print(
            f"\n[bold]row {number}[/bold] (a prompt: answers to it are drawn, and rewarded)"
        )
        prompt = "".join(text for text, is_trained in sample if not is_trained)
        console.print(Text(prompt))
        return

    # Brackets mark what is trained:  Question: 2+2? ⟦4⟧. Colours repeat it, as not everybody sees them.
    has_colour = console.color_system and not console.no_color
    colour = ""
    if has_colour:
        colour = "red" if answer in ("rejected", "bad") else "green"
    console.print(f"\n[bold]row {number}[/bold] ({what} stands between ⟦ and ⟧)")
    marked = Text()
    for text, is_trained in sample:
        if is_trained:
            marked.append(f"⟦{text}⟧", colour)
        else:
            marked.append(text, "dim" if has_colour else "")
    console.print(marked)


def shortened(sample: Sample, most: int = 400) -> Sample:
    """Return a row for a terminal: without the middle of long pieces, and without the middle ones of many pieces."""
    half = most // 2
    pieces = []
    for text, is_trained in sample:
        if len(text) > most:
            text = f"{text[:half]} … {len(text) - most:,} characters … {text[-half:]}"
        pieces.append((text, is_trained))

    # The first and the last pieces stay, with a gap that says how many it stands for.
    left_out = len(pieces) - MOST_PIECES
    if left_out <= 0:
        return pieces
    gap = (f"\n… {counted(left_out, 'piece')} …\n", False)
    return [*pieces[: MOST_PIECES // 2], gap, *pieces[-MOST_PIECES // 2 :]]


def counts_of(stats: dict[str, Any], *, has_share: bool) -> str:
    """Return rows, records and tokens of a split or a source; `has_share`: with the share of these that is trained."""
    rows = counted(stats["rows"], "row")
    records = counted(stats["records"], "record")
    text = f"{rows} of {records}, {counted(stats['tokens'], 'token')}"
    if not has_share:
        return text
    share = stats["trained_tokens"] / max(1, stats["tokens"])
    return f"{text}, {share:.1%} trained"


def _show_histogram(bars: Any, console: Console) -> None:
    """Print a bar for each range of lengths; several ranges without rows become an ellipsis."""
    counts = dict(bars)
    most_rows = max(counts.values(), default=0)
    # Neighbours with rows are one group, those without another:   [5 2] [0 0 0] [1]
    for has_rows, group in groupby(counts.items(), key=lambda bar: bar[1] > 0):
        neighbours = list(group)
        if not has_rows and len(neighbours) > 1:
            console.print(f"  {'…':>13}")
            continue
        for label, count in neighbours:
            # Rounded up, so that a range with few rows shows too.
            blocks = "█" * math.ceil(WIDEST_BAR * count / most_rows)
            console.print(f"  {label:>13} tokens {blocks} {count:,}")
