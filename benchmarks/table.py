"""Results as Markdown: printed, and with --write put into docs/performance.md and beside the results file.

    python -m benchmarks.table [FILE …] [--write]

Without FILE each table is made of the newest results of its machine that have it, quick ones aside. No number in the
documentation is typed by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import summary
from benchmarks.cases import CASES, QUICK, TRAINERS, Case
from benchmarks.classification_table import TRAINED, side_by_side, trained
from benchmarks.corpus import token_pairs, token_rows
from benchmarks.flops import peak_flops, training_flops
from benchmarks.models import SHAPES
from benchmarks.results import FOLDER, ROOT, Results, read_results, slug
from benchmarks.summary import Measurement, Spread
from kubetune.base.files import write_atomic

BEGIN, END = "<!-- results: begin, written by benchmarks.table -->", "<!-- results: end -->"
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
    shown = [read_results(path) for path in args.files] or newest()
    text = "\n".join(map(render, shown))
    print(text)
    if args.write:
        for path in (results.path for results in shown):
            write_atomic(
                path.with_suffix(".md"), f"# Results of {path.stem}\n\n{render(read_results(path))}"
            )
        write_atomic(PAGE, fill(PAGE.read_text(), text))


def newest(folder: Path = FOLDER) -> list[Results]:
    """Full results, newest first, each without the tables that newer results of its machine have.

    Raises SystemExit when there are none.
    """
    found, shown = [], set[tuple[str, ...]]()
    for path in sorted(folder.glob("*.json"), reverse=True):
        if path.stem.endswith(OTHERS):
            continue
        results = read_results(path)
        kept = [
            m
            for m in results.measurements
            if m["suite"] == "ceiling" or _table_of(results, m) not in shown
        ]
        if any(m["suite"] != "ceiling" for m in kept):
            found.append(Results(path, {**results.data, "measurements": kept}))
        shown.update(_table_of(results, m) for m in results.measurements)
    if not found:
        raise SystemExit("benchmarks/results holds no results yet; run scripts/benchmark")
    return found


def _table_of(results: Results, measurement: Measurement) -> tuple[str, ...]:
    return slug(results.data["machine"]), measurement["suite"], str(measurement.get("case"))


def fill(page: str, text: str) -> str:
    """The page with the text between its two marks. Raises ValueError when it has no marks."""
    if BEGIN not in page or END not in page:
        raise ValueError(f"{PAGE.name} lacks the marks {BEGIN!r} and {END!r}")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END, 1)[1]}"


def render(results: Results) -> str:
    """All tables of a results file, with the machine and the date above them."""
    machine = results.data["machine"]
    parts = [f"Measured on {results.data['started'][:10]}: {describe(machine)}."]
    cases = {**CASES, QUICK.name: QUICK}
    for suite in ("sft", "preference"):
        for name, threads in _distinct(results.measurements, suite, ("case", "threads")):
            found = [
                m for m in _suite(results, suite) if (m["case"], m["threads"]) == (name, threads)
            ]
            parts.append(
                case_table(
                    cases[name], found, ceiling(results, cases[name]), threads, machine["gpu"]
                )
            )
    tables = (bench_table, scaling_table, startup_table, pairs_startup_table, tokenize_table)
    parts += [table for make in tables if (table := make(results))]
    parts += [
        f"{title}\n\n{markdown(head, rows)}"
        for title, head, rows in side_by_side(results.measurements)
    ]
    if rows := trained(results.measurements):
        parts.append(f"### SST-2 trained from random weights\n\n{markdown(TRAINED, rows)}")
    return "\n\n".join(parts) + "\n"


def bench_table(results: Results) -> str | None:
    """Cases of `kubetune bench`, which brings its results from machines of others."""
    found = _suite(results, "bench")
    rows = []
    for each in found:
        if "tokens_per_second" not in each:
            rows.append(
                [
                    each["case"],
                    f"not measured: {each.get('failed') or each.get('said')}",
                    "",
                    "",
                    "",
                ]
            )
            continue
        share = f"{each['tflops'] / each['peak_tflops']:.0%}" if each.get("peak_tflops") else ""
        speed, peak = f"{each['tokens_per_second']:,.0f}", f"{each['peak_bytes'] / 2**20:,.0f}"
        rows.append(
            [each["case"], speed, f"{each['tflops']:,.3g}" if "tflops" in each else "", share, peak]
        )
    head = ["case", "tokens/s", "TFLOP/s", "MFU", "peak MB"]
    return f"### `kubetune bench`\n\n{markdown(head, rows)}" if rows else None


def describe(machine: dict[str, Any]) -> str:
    """The machine in one sentence."""
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    instructions = f" ({', '.join(machine['instructions'])})" if machine["instructions"] else ""
    return f"{machine['gpu']}; {cpu}{instructions}" if machine["gpu"] else cpu + instructions


def ceiling(results: Results, case: Case) -> float | None:
    """FLOP/s of bare matrix products in the shapes of the case's model."""
    found = results.find("ceiling", {"model": case.model})
    return found["flops_per_second"] if found else None


def flops_per_token(case: Case) -> float:
    """Model FLOPs of an epoch divided by its tokens."""
    shape = SHAPES[case.model]
    if case.pairs:
        rows = [
            row for pair in token_pairs(case.corpus, shape.vocab_size) for row in pair.sequences
        ]
    else:
        rows = token_rows(case.corpus, shape.vocab_size)
    lengths = [len(row.ids) for row in rows]
    labels = sum(len(row.ids) - row.prompt for row in rows)
    return training_flops(shape, case.adapt, lengths, labels) / sum(lengths)


def case_table(
    case: Case, found: list[Measurement], ceiling: float | None, threads: int, gpu: str | None
) -> str:
    """One case: a row for each trainer. Ratios are those of the trainer of ours it is set beside, repeat by repeat."""
    speed = summary.tokens_per_second if gpu or threads > 1 else summary.tokens_per_cpu_second
    unit = "tokens/s" if gpu or threads > 1 else "tokens/CPU-s"
    place = "" if gpu else f", {threads} thread{'s' if threads > 1 else ''}"
    what = "DPO, " * case.pairs + (
        "full fine-tuning" if case.adapt == "full" else f"LoRA r=16, {case.adapt}"
    )
    what += (
        f", rows that begin with the same {case.corpus.shared:,} tokens"
        if case.corpus.shared
        else ""
    )
    # CPU-seconds are counted over all threads, so the ceiling of one thread is comparable with one thread only.
    limit = ceiling if gpu or threads == 1 else None
    flops = flops_per_token(case)
    head = [
        "trainer",
        unit,
        "kubetune is faster by",
        "share of ceiling",
        "peak MB (above start)",
        "first step s",
    ]
    head += ["loss, first → last epoch"] + (["MFU"] if gpu else [])
    rows = []
    for trainer in dict.fromkeys(
        m["trainer"] for m in sorted(found, key=lambda m: list(TRAINERS).index(m["trainer"]))
    ):
        runs = [m for m in found if m["trainer"] == trainer]
        measured = [m for m in runs if summary.is_measured(m)]
        if not measured:
            rows.append([TRAINERS[trainer].label, _reason(runs[0]), *[""] * (len(head) - 2)])
            continue
        middle = Spread.of(speed(m) for m in measured)
        assert middle is not None
        share = flops * middle.median
        ours = [m for m in found if m["trainer"] == TRAINERS[trainer].beside]
        row = [
            TRAINERS[trainer].label + _batch(measured[0]),
            _spread(middle),
            "" if ours == runs else _times(Spread.of(summary.ratios(ours, runs, speed))),
            f"{share / limit:.0%}" if limit else "",
            _memory(measured),
            f"{_median(measured, lambda m: m['first_step_seconds']):.1f}",
            " → ".join(f"{loss:.3f}" for loss in summary.epoch_losses(measured[0])),
        ]
        rows.append(row + ([_share(share, peak_flops(gpu))] if gpu else []))
    rows_are, taken = ("pairs", "pairs") if case.pairs else ("rows", "sequences")
    note = f"{case.corpus.rows} {rows_are}, {case.sequences_per_step} {taken} per step, {flops / 1e9:.3g} GFLOP per token"
    note += f", ceiling {ceiling / 1e12:.3g} TFLOP/s" if ceiling else ""
    return f"### {case.model}: {what}{place}\n\n{note}.\n\n{markdown(head, rows)}"


def scaling_table(results: Results) -> str:
    """Tokens per second by the wall for each number of processes and threads, against one of each."""
    found = [m for m in _suite(results, "scaling") if summary.is_measured(m)]
    rows = []
    for trainer, processes, threads in _distinct(
        found, "scaling", ("trainer", "processes", "threads")
    ):
        runs = [
            m
            for m in found
            if (m["trainer"], m["processes"], m["threads"]) == (trainer, processes, threads)
        ]
        single = [
            m for m in found if (m["trainer"], m["processes"], m["threads"]) == (trainer, 1, 1)
        ]
        speed = Spread.of(map(summary.tokens_per_second, runs))
        assert speed is not None
        gain = _times(Spread.of(summary.ratios(runs, single, summary.tokens_per_second)))
        rows.append([TRAINERS[trainer].label, str(processes), str(threads), _spread(speed), gain])
    head = ["trainer", "processes", "threads each", "tokens/s", "against one"]
    return f"### One process and two\n\n{markdown(head, rows)}" if rows else ""


def startup_table(results: Results) -> str:
    """Seconds from the command to the end of the first step, and to the answer of verbs that train nothing."""
    found = [m for m in _suite(results, "startup") if "trainer" in m]
    rows = []
    for trainer, count in _distinct(found, "startup", ("trainer", "rows")):
        runs = [m for m in found if (m["trainer"], m["rows"]) == (trainer, count)]
        seconds = Spread.of(m["first_step_seconds"] for m in runs if summary.is_measured(m))
        label = "`kubetune train`" if trainer == "kubetune" else TRAINERS[trainer].label
        rows.append([f"{count:,}", label, _spread(seconds, 1) if seconds else _reason(runs[0])])
    rows.sort(key=lambda row: int(row[0].replace(",", "")))
    first_step = (
        f"### Time to the first step\n\n{markdown(['rows', 'trainer', 'seconds'], rows)}"
        if rows
        else ""
    )
    verbs = [m for m in _suite(results, "startup") if "verb" in m]
    answers = []
    for (verb,) in _distinct(verbs, "startup", ("verb",)):
        runs = [m for m in verbs if m["verb"] == verb]
        seconds = Spread.of(m["seconds"] for m in runs if summary.is_measured(m))
        answers.append([f"`kubetune {verb}`", _spread(seconds, 2) if seconds else _reason(runs[0])])
    answer = f"### Time to an answer\n\n{markdown(['verb', 'seconds'], answers)}" if answers else ""
    return "\n\n".join(filter(None, (first_step, answer)))


def pairs_startup_table(results: Results) -> str:
    """Seconds to the end of the first step of DPO, with what the reference says to be found, and with that kept, by
    the wall and in CPU time."""
    found = _suite(results, "preference-start")
    rows = []
    for count, trainer in _distinct(found, "preference-start", ("rows", "trainer")):
        cells = []
        for kept in (False, True):
            runs = [
                m for m in found if (m["rows"], m["trainer"], m["kept"]) == (count, trainer, kept)
            ]
            for name in ("first_step_seconds", "first_step_cpu_seconds"):
                seconds = Spread.of(
                    m[name] for m in runs if summary.is_measured(m) and m.get(name) is not None
                )
                lacks = not runs or summary.is_measured(runs[0])  # earlier results have no CPU time
                cells.append(_spread(seconds, 1) if seconds else "" if lacks else _reason(runs[0]))
        rows.append(
            [
                f"{count:,}",
                "`kubetune train`" if trainer == "kubetune" else TRAINERS[trainer].label,
                *cells,
            ]
        )
    head = [
        "pairs",
        "trainer",
        "seconds, first start",
        "CPU-seconds",
        "seconds, second start",
        "CPU-seconds",
    ]
    return f"### Time to the first step of DPO\n\n{markdown(head, rows)}" if rows else ""


def tokenize_table(results: Results) -> str:
    """Rows per second from text to ids and labels."""
    found = _suite(results, "tokenize")
    rows = []
    for path, count, processes in _distinct(found, "tokenize", ("path", "rows", "processes")):
        runs = [
            m for m in found if (m["path"], m["rows"], m["processes"]) == (path, count, processes)
        ]
        speed = Spread.of(m["rows"] / m["seconds"] for m in runs if summary.is_measured(m))
        rows.append(
            [path, f"{count:,}", str(processes), _spread(speed) if speed else _reason(runs[0])]
        )
    head = ["path", "rows", "processes", "rows/s"]
    return f"### Tokenising\n\n{markdown(head, rows)}" if rows else ""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _suite(results: Results, suite: str) -> list[Measurement]:
    return [m for m in results.measurements if m["suite"] == suite]


def _distinct(
    found: Sequence[Measurement], suite: str, names: Sequence[str]
) -> Iterator[tuple[Any, ...]]:
    yield from dict.fromkeys(tuple(m[name] for name in names) for m in found if m["suite"] == suite)


def _median(found: Sequence[Measurement], quantity: Callable[[Measurement], float]) -> float:
    spread = Spread.of(map(quantity, found))
    assert spread is not None
    return spread.median


def _memory(measured: Sequence[Measurement]) -> str:
    if "peak_device_bytes" in measured[0]:
        return f"{_median(measured, lambda m: m['peak_device_bytes']) / 2**20:,.0f} on the GPU"
    peak = _median(measured, lambda m: m["peak_bytes"]) / 2**20
    above = _median(measured, lambda m: m["peak_above_start_bytes"]) / 2**20
    return f"{peak:,.0f} ({above:,.0f})"


def _batch(measurement: Measurement) -> str:
    """Return which of the batches that were tried is this one, the fastest; nothing where none was looked for."""
    batch = measurement.get("batch")
    if batch is None:
        return ""
    return f"; batch {batch}, its fastest"


def _reason(measurement: Measurement) -> str:
    if "missing" in measurement:
        return f"not measured: {measurement['missing']} is not installed"
    return f"failed: {re.sub(r'[|`]', ' ', measurement['failed'])}"


def _spread(spread: Spread, digits: int = 0) -> str:
    text = f"{spread.median:,.{digits}f}"
    return (
        text
        if spread.least == spread.most
        else f"{text} ({spread.least:,.{digits}f}–{spread.most:,.{digits}f})"
    )


def _times(spread: Spread | None) -> str:
    if spread is None:
        return ""
    text = f"{spread.median:.2f}×"
    return text if spread.least == spread.most else f"{text} ({spread.least:.2f}–{spread.most:.2f})"


def _share(flops: float, peak: float | None) -> str:
    return f"{flops / peak:.0%}" if peak else ""


if __name__ == "__main__":
    main()
