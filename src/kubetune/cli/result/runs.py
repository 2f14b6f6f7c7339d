"""`kubetune runs`: the runs below a folder of this machine, one a line."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.humanize import ago, sparkline, visible
from kubetune.base.logs import scrub
from kubetune.base.terminal import BLUE, GREEN, PURPLE, RED, YELLOW, coloured, folded
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.tables import GAP, NARROWEST_SENTENCE, print_table, table
from kubetune.config.metric_names import main_metric
from kubetune.errors import ConfigError
from kubetune.library.listing import facts, find_runs, in_order, is_like
from kubetune.rundir.status import curves

# A terminal alone shows it: the reward of a run that has one, else its loss.
_CURVE = "CURVE"
_CELLS = 10  # of a curve
_HEAD = (
    "RUN", "STATE", "STEP", "LOSS", "EVALUATION", "TASK", "MODEL", "METHOD", "STARTED", "WHY"
)  # fmt: skip

# Columns in the order in which they are left out of a narrow terminal. Losses of two tasks cannot be compared.
_LEAST_FIRST = ("METHOD", "MODEL", "LOSS", "STARTED", _CURVE, "TASK", "STEP", "EVALUATION", "WHY")
# Characters that a column is counted with at most: what is longer continues below itself.
_WIDEST = {"RUN": NARROWEST_SENTENCE, "TASK": 12, "WHY": NARROWEST_SENTENCE}
_REASON = 20  # characters of a reason that is cut, at least
# By state.
_COLOURS = {
    "done": GREEN,
    "running": BLUE,
    "starting": BLUE,
    "waiting": YELLOW,
    "stopped": PURPLE,
    "failed": RED,
    "damaged": RED,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("outputs"),
        metavar="DIR",
        help="where to look (default outputs)",
    )
    parser.add_argument(
        "--sort", default="started", metavar="KEY", help="started (default; the newest last, as kubectl sorts), path, "
        "state, step, loss, hours, price, or a metric such as eval_loss; runs without it come last",
    )  # fmt: skip
    parser.add_argument("--reverse", action="store_true", help="the largest, or the latest, first")
    parser.add_argument(
        "--filter",
        default="",
        metavar="WORDS",
        help="only runs with all of these words in path, model, method, tags or why",
    )
    parser.add_argument(
        "--state",
        default="",
        help="runs of this state, such as done, running or failed; archived: those archived on the page",
    )
    parser.add_argument(
        "--failed",
        dest="state",
        action="store_const",
        const="failed",
        help="the same as --state failed",
    )
    add_json(parser, "as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """List the runs. Raise ConfigError if there is no such folder, or no run has what to sort by."""
    if not args.folder.is_dir():
        raise ConfigError(
            f"{args.folder}: no such folder; give the one that holds the run directories"
        )
    # Each run is read for its facts, also those that the filter leaves out.
    runs = []
    for run_dir in find_runs(args.folder):
        run_facts = facts(run_dir)
        if is_like(run_facts, args.filter, args.state):
            runs.append(run_facts)
    runs = in_order(runs, args.sort, reverse=args.reverse)

    def show() -> None:
        if runs:
            _print(runs, cuts_reasons=not args.state)
            return
        chosen = ""
        if args.filter or args.state:
            chosen = " with this --filter and --state"
        print(f"no runs below {args.folder}{chosen}")

    return Answer(runs, show)


def _print(runs: Sequence[dict[str, Any]], *, cuts_reasons: bool) -> None:
    """Print the runs: to a pipe all columns, on a terminal those that fit beside each other, with colour.

    `cuts_reasons`: where the table is higher than the terminal, a reason takes no line of its own.
    """
    if not sys.stdout.isatty():
        print_table(_HEAD, [_row(run_facts) for run_facts in runs])
        return
    rows = []
    for run_facts in runs:
        cells = dict(zip(_HEAD, _row(run_facts), strict=True))
        cells["STARTED"] = ago(run_facts["started"])
        cells[_CURVE] = _curve(Path(run_facts["path"]))
        rows.append(cells)

    width, height = shutil.get_terminal_size()
    lines, notes = _laid_out(rows, width, cuts_reasons=False)
    if cuts_reasons and len(lines) > height:
        lines, notes = _laid_out(rows, width, cuts_reasons=True)
    for line in lines:
        print(_coloured(visible(scrub(line))))
    for note in notes:
        print(folded(note, sys.stdout))


def _laid_out(
    rows: Sequence[dict[str, str]], width: int, *, cuts_reasons: bool
) -> tuple[list[str], list[str]]:
    """Return the lines of the table in this width, and what to say of its columns."""
    # Columns that say least of a run go first. What is left may still fold at a very narrow terminal.
    head = list(_HEAD)
    head.insert(head.index("EVALUATION"), _CURVE)
    if not any(cells["WHY"] for cells in rows):
        head.remove("WHY")
    spare = 0
    if cuts_reasons and "WHY" in head:
        spare = max(0, _width(rows, "WHY") - len(GAP) - _REASON)
    left_out = _leave_out(head, rows, width + spare)
    notes = []
    if left_out:
        notes.append(f"left out at this width: {', '.join(left_out)}; a pipe and --json have them")
    if cuts_reasons and _cut_reasons(head, rows, width):
        notes.append("reasons are cut; --failed and --state have them whole")
    cells_of_rows = [[cells[name] for name in head] for cells in rows]
    return list(table(head, cells_of_rows, width, "WHY", "RUN")), notes


def _leave_out(head: list[str], rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Take columns out of the head, the least needed first, until the rest fits. Return them."""
    left_out = []
    for name in _LEAST_FIRST:
        if sum(_width(rows, column) for column in head) - len(GAP) <= width:
            break
        if name in head:
            head.remove(name)
            left_out.append(name)
    return left_out


def _cut_reasons(head: Sequence[str], rows: Sequence[dict[str, str]], width: int) -> bool:
    """Cut reasons that are longer than the room beside the other columns. Return whether any was."""
    if "WHY" not in head:
        return False
    room = max(_REASON, width - sum(_width(rows, name) for name in head if name != "WHY"))
    is_cut = False
    for cells in rows:
        if len(cells["WHY"]) > room:
            cells["WHY"] = f"{cells['WHY'][: room - 1].rstrip()}…"
            is_cut = True
    return is_cut


def _width(rows: Sequence[Mapping[str, str]], name: str) -> int:
    """Return the characters that a column takes with the gap after it."""
    longest = max(len(cells[name]) for cells in rows)
    longest = min(longest, _WIDEST.get(name, longest))
    return max(longest, len(name)) + len(GAP)


def _curve(run_dir: Path) -> str:
    """Return the reward of a run, or its loss, as blocks; empty before two steps."""
    of_run = curves(run_dir, _CELLS)
    values = of_run.get("reward") or of_run.get("loss") or []
    return sparkline(values, _CELLS)


def _coloured(line: str) -> str:
    """Return a line of the table with its state in colour."""
    # The state is the second column: after a gap, and before another or the end.
    return re.sub(
        rf"(?<={GAP})({'|'.join(_COLOURS)})(?={GAP}|$)",
        lambda match: coloured(match[1], _COLOURS[match[1]]),
        line,
        count=1,
    )


def _row(run_facts: dict[str, Any]) -> tuple[str, ...]:
    """Return the line of a run in the table."""
    # A damaged run has none of its facts.
    step = ""
    loss = ""
    if run_facts["step"] is not None:
        step = f"{run_facts['step']:,}"
        if run_facts["step"] != run_facts["steps"]:
            step += f"/{run_facts['steps'] or '?'}"
    if run_facts["loss"] is not None:
        loss = f"{run_facts['loss']:.4f}"
    started = run_facts["started"] or ""
    why = run_facts["why"] or ""
    return (
        run_facts["path"],
        run_facts["state"],
        step,
        loss,
        _evaluation(run_facts),
        _task(run_facts["task"] or ""),
        run_facts["model"] or "",
        run_facts["method"] or "",
        started[:16].replace("T", " "),
        visible(why.partition("\n")[0]),
    )


def _task(name: str) -> str:
    """Return a task as words, each of which fits into a narrow column."""
    if name == "sequence_classification":
        return "classifier"
    return name.replace("_", " ")


def _evaluation(run_facts: dict[str, Any]) -> str:
    """Return the metric that the run is about, by its name, as two runs may have different ones."""
    evaluation = run_facts["evaluation"] or {}
    name = main_metric(evaluation, run_facts["metric"], run_facts["task"])
    if name is None:
        return ""
    return f"{name.removeprefix('eval_')} {evaluation[name]:.4g}"
