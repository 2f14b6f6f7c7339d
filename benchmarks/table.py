"""Results as Markdown: printed, and with --write put into docs/performance.md and beside the results file.

    python -m benchmarks.table [FILE …] [--write]

Without FILE each table is made of the newest results of its machine that have it, quick ones aside. No number in the
documentation is typed by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import summary
from benchmarks.cases import CASES, QUICK, TRAINERS, Case
from benchmarks.classification_table import TRAINED, side_by_side, trained
from benchmarks.corpus import token_pairs, token_rows
from benchmarks.flops import peak_flops, training_flops
from benchmarks.models import SHAPES
from benchmarks.results import FOLDER, ROOT, Results, read_results
from benchmarks.summary import Measurement, Spread, grouped, is_measured
from kubetune.base.files import write_atomic
from kubetune.rundir.machine import slug

BEGIN = "<!-- results: begin, written by benchmarks.table -->"
END = "<!-- results: end -->"
PAGE = ROOT / "docs" / "performance.md"
# Results that other modules make tables of, or that nobody should quote.
OTHERS = ("-quick", "-memory", "-answers", "-hybrids", "-experts")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of results files and, if asked, write them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.table", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "files", nargs="*", type=Path, help="results files; left out: the newest with each table"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write docs/performance.md and the .md beside each file",
    )
    args = parser.parse_args(argv)
    all_results = [read_results(path) for path in args.files] or newest()
    text = "\n".join(map(render, all_results))
    print(text)
    if args.write:
        for results in all_results:
            # All of a file, also the tables that newer files have on the page.
            path = results.path
            own_text = f"# Results of {path.stem}\n\n{render(read_results(path))}"
            write_atomic(path.with_suffix(".md"), own_text)
        write_atomic(PAGE, fill(PAGE.read_text(), text))


def newest(folder: Path = FOLDER) -> list[Results]:
    """Return full results, newest first, each without the tables that newer results of its machine have.

    Raise SystemExit if there are none.
    """
    chosen = []
    shown: set[tuple[str, ...]] = set()  # tables of newer files
    for path in sorted(folder.glob("*.json"), reverse=True):
        if path.stem.endswith(OTHERS):
            continue
        results = read_results(path)
        measurements = []
        has_table = False
        for measurement in results.measurements:
            is_ceiling = measurement["suite"] == "ceiling"  # belongs to the tables of its file
            if is_ceiling or _table_of(results, measurement) not in shown:
                measurements.append(measurement)
                has_table = has_table or not is_ceiling
        if has_table:
            chosen.append(Results(path, {**results.data, "measurements": measurements}))
        shown.update(_table_of(results, measurement) for measurement in results.measurements)
    if not chosen:
        raise SystemExit("benchmarks/results holds no results yet; run scripts/benchmark")
    return chosen


def _table_of(results: Results, measurement: Measurement) -> tuple[str, ...]:
    return slug(results.data["machine"]), measurement["suite"], str(measurement.get("case"))


def fill(page: str, text: str) -> str:
    """Return the page with the text between its two marks. Raise ValueError if it has no marks."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"{PAGE.name} lacks the marks {BEGIN!r} and {END!r}")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END, 1)[1]}"


def render(results: Results) -> str:
    """Return all tables of a results file, with the machine and the date above them."""
    machine = results.data["machine"]
    parts = [f"Measured on {results.data['started'][:10]}: {describe(machine)}."]
    cases = {**CASES, QUICK.name: QUICK}
    for suite in ("sft", "preference"):
        groups = grouped(_suite(results, suite), ("case", "threads"))
        for (name, threads), measurements in groups.items():
            limit = ceiling(results, cases[name])
            parts.append(case_table(cases[name], measurements, limit, threads, machine["gpu"]))
    for make in (bench_table, scaling_table, startup_table, pairs_startup_table, tokenize_table):
        parts.append(make(results))
    for title, head, rows in side_by_side(results.measurements):
        parts.append(titled(title, head, rows))
    parts.append(
        titled("### SST-2 trained from random weights", TRAINED, trained(results.measurements))
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def titled(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with its title; nothing if it has no rows."""
    if not rows:
        return ""
    return f"{title}\n\n{markdown(head, rows)}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. All columns but the first are aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def describe(machine: dict[str, Any]) -> str:
    """Return the machine in one sentence."""
    text = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    if machine["instructions"]:
        text += f" ({', '.join(machine['instructions'])})"
    if machine["gpu"]:
        text = f"{machine['gpu']}; {text}"
    return text


def bench_table(results: Results) -> str:
    """Return the cases of `kubetune bench`, which brings its results from machines of others."""
    rows = []
    for measurement in _suite(results, "bench"):
        name = measurement["case"]
        if "tokens_per_second" not in measurement:
            # Files of bench have the reason under `said`.
            reason = measurement.get("failed") or measurement.get("said")
            rows.append([name, f"not measured: {reason}", "", "", ""])
            continue
        tflops = ""
        if "tflops" in measurement:
            tflops = f"{measurement['tflops']:,.3g}"
        share = ""
        if measurement.get("peak_tflops"):
            share = f"{measurement['tflops'] / measurement['peak_tflops']:.0%}"
        speed = f"{measurement['tokens_per_second']:,.0f}"
        peak = f"{measurement['peak_bytes'] / 2**20:,.0f}"
        rows.append([name, speed, tflops, share, peak])
    return titled("### `kubetune bench`", ["case", "tokens/s", "TFLOP/s", "MFU", "peak MB"], rows)


def ceiling(results: Results, case: Case) -> float | None:
    """Return the FLOP/s of bare matrix products in the shapes of the case's model; None if they were not measured."""
    measurement = results.find("ceiling", {"model": case.model})
    if measurement is None:
        return None
    speed: float = measurement["flops_per_second"]
    return speed


def flops_per_token(case: Case) -> float:
    """Return the model's FLOPs of an epoch, divided by its tokens."""
    shape = SHAPES[case.model]
    if case.pairs:
        rows = []
        for pair in token_pairs(case.corpus, shape.vocab_size):
            rows += pair.sequences
    else:
        rows = token_rows(case.corpus, shape.vocab_size)
    lengths = [len(row.ids) for row in rows]
    labels = sum(len(row.ids) - row.prompt for row in rows)
    return training_flops(shape, case.adapt, lengths, labels) / sum(lengths)


def case_table(
    case: Case,
    measurements: Sequence[Measurement],
    ceiling: float | None,
    threads: int,
    gpu: str | None,
) -> str:
    """Return the table of one case: a row for each trainer.

    Ratios are those of the trainer of ours that it is set beside, repeat by repeat.
    """
    # CPU-seconds do not suffer from what else runs, and are counted over all threads. So they are compared where one
    # thread trains, and only there with the ceiling, which is of one thread.
    by_wall = bool(gpu) or threads > 1
    head = [
        "trainer",
        "tokens/s" if by_wall else "tokens/CPU-s",
        "kubetune is faster by",
        "share of ceiling",
        "peak MB (above start)",
        "first step s",
        "loss, first → last epoch",
    ]
    if gpu:
        head.append("MFU")
    limit = None if threads > 1 and not gpu else ceiling
    flops = flops_per_token(case)
    by_trainer = {trainer: runs for (trainer,), runs in grouped(measurements, ["trainer"]).items()}
    rows = []
    for trainer in TRAINERS:
        if trainer in by_trainer:
            rows.append(_trainer_row(trainer, by_trainer, flops, limit, gpu, by_wall=by_wall))
    rows = [row + [""] * (len(head) - len(row)) for row in rows]

    place = "" if gpu else f", {_threads(threads)}"
    unit = "pairs" if case.pairs else "sequences"
    note = f"{case.corpus.rows} {'pairs' if case.pairs else 'rows'}, {case.sequences_per_step} {unit} per step, "
    note += f"{flops / 1e9:.3g} GFLOP per token"
    if ceiling:
        note += f", ceiling {ceiling / 1e12:.3g} TFLOP/s"
    return f"### {case.model}: {_method(case)}{place}\n\n{note}.\n\n{markdown(head, rows)}"


def _method(case: Case) -> str:
    """Return how a case trains: `DPO, LoRA r=16, attention`."""
    text = "full fine-tuning" if case.adapt == "full" else f"LoRA r=16, {case.adapt}"
    if case.pairs:
        text = f"DPO, {text}"
    if case.corpus.shared:
        text += f", rows that begin with the same {case.corpus.shared:,} tokens"
    return text


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _trainer_row(
    trainer: str,
    by_trainer: dict[str, list[Measurement]],
    flops: float,
    limit: float | None,
    gpu: str | None,
    *,
    by_wall: bool,
) -> list[str]:
    """Return the cells of one trainer. `flops`: of a token; `limit`: FLOP/s that its share of is shown."""
    runs = by_trainer[trainer]
    label = TRAINERS[trainer].label
    measured = [run for run in runs if is_measured(run)]
    if not measured:
        return [label, _reason(runs[0])]
    speed = summary.tokens_per_second if by_wall else summary.tokens_per_cpu_second
    spread = Spread.of(map(speed, measured))
    assert spread is not None
    flops_per_second = flops * spread.median
    ours = by_trainer.get(TRAINERS[trainer].beside, [])
    faster = ""
    if ours is not runs:
        faster = _times(Spread.of(summary.ratios(ours, runs, speed)))
    first_step = _median(measured, lambda run: run["first_step_seconds"])
    first_loss, last_loss = summary.epoch_losses(measured[0])
    row = [
        label + _batch(measured[0]),
        _spread(spread),
        faster,
        f"{flops_per_second / limit:.0%}" if limit else "",
        _memory(measured),
        f"{first_step:.1f}",
        f"{first_loss:.3f} → {last_loss:.3f}",
    ]
    if gpu:
        peak = peak_flops(gpu)
        row.append(f"{flops_per_second / peak:.0%}" if peak else "")
    return row


def scaling_table(results: Results) -> str:
    """Return tokens per second by the wall for each number of processes and threads, against one of each."""
    measured = [run for run in _suite(results, "scaling") if is_measured(run)]
    groups = grouped(measured, ("trainer", "processes", "threads"))
    rows = []
    for (trainer, processes, threads), runs in groups.items():
        spread = Spread.of(map(summary.tokens_per_second, runs))
        single = groups.get((trainer, 1, 1), [])
        gain = Spread.of(summary.ratios(runs, single, summary.tokens_per_second))
        label = TRAINERS[trainer].label
        rows.append([label, str(processes), str(threads), _spread(spread), _times(gain)])
    head = ["trainer", "processes", "threads each", "tokens/s", "against one"]
    return titled("### One process and two", head, rows)


def startup_table(results: Results) -> str:
    """Return seconds from the command to the end of the first step, and to the answer of verbs that train nothing."""
    measurements = _suite(results, "startup")
    of_trainers = [m for m in measurements if "trainer" in m]
    rows = []
    for (trainer, count), runs in grouped(of_trainers, ("trainer", "rows")).items():
        rows.append(
            (
                count,
                [f"{count:,}", _command(trainer), _measured_spread(runs, "first_step_seconds", 1)],
            )
        )
    rows.sort(key=lambda row: row[0])
    first_step = titled(
        "### Time to the first step", ["rows", "trainer", "seconds"], [cells for _, cells in rows]
    )
    answers = []
    for (verb,), runs in grouped([m for m in measurements if "verb" in m], ["verb"]).items():
        answers.append([f"`kubetune {verb}`", _measured_spread(runs, "seconds", 2)])
    answer = titled("### Time to an answer", ["verb", "seconds"], answers)
    return "\n\n".join(filter(None, (first_step, answer)))


def pairs_startup_table(results: Results) -> str:
    """Return seconds to the end of the first step of DPO, by the wall and in CPU time.

    At the first start the reference's log-probabilities have to be computed; at the second they are kept.
    """
    rows = []
    groups = grouped(_suite(results, "preference-start"), ("rows", "trainer"))
    for (count, trainer), all_runs in groups.items():
        cells = [f"{count:,}", _command(trainer)]
        for kept in (False, True):
            runs = [run for run in all_runs if run["kept"] is kept]
            for name in ("first_step_seconds", "first_step_cpu_seconds"):
                cells.append(_measured_spread(runs, name, 1))
        rows.append(cells)
    head = [
        "pairs",
        "trainer",
        "seconds, first start",
        "CPU-seconds",
        "seconds, second start",
        "CPU-seconds",
    ]
    return titled("### Time to the first step of DPO", head, rows)


def tokenize_table(results: Results) -> str:
    """Return rows per second from text to ids and labels."""
    rows = []
    groups = grouped(_suite(results, "tokenize"), ("path", "rows", "processes"))
    for (path, count, processes), runs in groups.items():
        speed = Spread.of(run["rows"] / run["seconds"] for run in runs if is_measured(run))
        cell = _spread(speed) if speed else _reason(runs[0])
        rows.append([path, f"{count:,}", str(processes), cell])
    return titled("### Tokenising", ["path", "rows", "processes", "rows/s"], rows)


def _suite(results: Results, suite: str) -> list[Measurement]:
    return [m for m in results.measurements if m["suite"] == suite]


def _command(trainer: str) -> str:
    return "`kubetune train`" if trainer == "kubetune" else TRAINERS[trainer].label


def _measured_spread(runs: Sequence[Measurement], name: str, digits: int) -> str:
    """Return the spread of a number of some runs, or why there is none; nothing for a number that they lack."""
    values = [run[name] for run in runs if is_measured(run) and run.get(name) is not None]
    spread = Spread.of(values)
    if spread is not None:
        return _spread(spread, digits)
    if not runs or is_measured(runs[0]):
        return ""  # earlier results have no CPU time
    return _reason(runs[0])


def _median(runs: Iterable[Measurement], quantity: Callable[[Measurement], float]) -> float:
    spread = Spread.of(map(quantity, runs))
    assert spread is not None
    return spread.median


def _memory(measured: Sequence[Measurement]) -> str:
    if "peak_device_bytes" in measured[0]:
        return f"{_median(measured, lambda m: m['peak_device_bytes']) / 2**20:,.0f} on the GPU"
    peak = _median(measured, lambda m: m["peak_bytes"]) / 2**20
    above = _median(measured, lambda m: m["peak_above_start_bytes"]) / 2**20
    return f"{peak:,.0f} ({above:,.0f})"


def _batch(measurement: Measurement) -> str:
    """Return which of the batches that were tried is this one, the fastest; nothing if none was looked for."""
    batch = measurement.get("batch")
    if batch is None:
        return ""
    return f"; batch {batch}, its fastest"


def _reason(measurement: Measurement) -> str:
    """Return why there is no measurement, without marks that would end a cell."""
    if "missing" in measurement:
        return f"not measured: {measurement['missing']} is not installed"
    return f"failed: {re.sub(r'[|`]', ' ', measurement['failed'])}"


def _spread(spread: Spread | None, digits: int = 0) -> str:
    """Return `750 (500–1,000)`, or the median alone if there is one value."""
    assert spread is not None
    text = f"{spread.median:,.{digits}f}"
    if spread.least == spread.most:
        return text
    return f"{text} ({spread.least:,.{digits}f}–{spread.most:,.{digits}f})"


def _times(spread: Spread | None) -> str:
    """Return `3.00× (2.00–4.00)`; nothing if there is nothing to compare with."""
    if spread is None:
        return ""
    text = f"{spread.median:.2f}×"
    if spread.least == spread.most:
        return text
    return f"{text} ({spread.least:.2f}–{spread.most:.2f})"


if __name__ == "__main__":
    main()
