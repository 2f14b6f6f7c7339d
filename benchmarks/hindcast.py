"""Published speeds of other trainers, of hindcast.json, beside what `kubetune plan` foresees for the same work.

    python -m benchmarks.hindcast [--write]

The share of the peak that plans assume is fitted to every other row in 16 bits, and judged on the others. Prints the
fit, which belongs into `plan/cost.py`, and the table; --write puts that into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import PAGE, markdown
from kubetune.base.files import write_atomic
from kubetune.config.load import load_config
from kubetune.plan.cost import NARROW_HALF, WIDE_SHARE, bill, flops_per_token
from kubetune.plan.gpu_specs import stated_tflops
from kubetune.plan.model_shapes import Weights, shapes_of
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork

ROWS = Path(__file__).with_name("hindcast.json")
BEGIN, END = "<!-- hindcast: begin, written by benchmarks.hindcast -->", "<!-- hindcast: end -->"


@dataclass(frozen=True)
class Row:
    """A published speed of one GPU, with what plans say of it: the hidden size, the share of the peak, the speed."""

    facts: dict[str, Any]
    hidden: int
    share: float
    planned: float

    @property
    def error(self) -> float:
        """The forecast's, relative to what was published."""
        return self.planned / self.facts["tokens_per_second"] - 1


def read() -> list[Row]:
    """The rows, in the file's order."""
    found = json.loads(ROWS.read_text())
    return [_row(each, found["models"][each["model"]]) for each in found["rows"]]


def _row(facts: dict[str, Any], model: dict[str, Any]) -> Row:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as data:
        is_sharded = facts["gpus"] > 1 and not facts.get("fp8")
        flags = {
            "model.path": facts["model"],
            "data.train": data.name,
            "data.max_length": facts["length"],
            "training.parallelism": "fsdp" if is_sharded else "ddp",
            **({"lora.r": 16, "lora.target_modules": "all-linear"} if facts["lora"] else {}),
            **({"training.fp8": True} if facts.get("fp8") else {}),
        }
        config = load_config(None, flags=flags)
    weights = Weights(shapes_of(model), model, stated=True)
    plan = make_plan(
        config, 1000, world_size=facts["gpus"], device="cuda", tokens=1000 * facts["length"]
    )
    work = RankWork.of(config, plan)
    found, flops = (
        bill(work, config.compute, plan, weights, 10**9, facts["gpu"]),
        flops_per_token(work, weights),
    )
    peak = stated_tflops(facts["gpu"])
    assert found is not None and found.tokens_per_second and flops and peak  # noqa: PT018
    share = facts["tokens_per_second"] * flops / peak / 1e12
    return Row(facts, model["hidden_size"], share, found.tokens_per_second / facts["gpus"])


def fitted(rows: Sequence[Row]) -> list[Row]:
    """Every other row in 16 bits."""
    return [row for row in rows if not row.facts.get("fp8")][::2]


def judged(rows: Sequence[Row]) -> list[Row]:
    """The others in 16 bits."""
    return [row for row in rows if not row.facts.get("fp8")][1::2]


def fit(rows: Sequence[Row]) -> tuple[float, int]:
    """The share of the peak of wide models, and the hidden size that has half of it, by least squares of logarithms."""

    def best(half: int) -> tuple[float, float, int]:
        logs = [math.log(row.share * (row.hidden + half) / row.hidden) for row in rows]
        mean = sum(logs) / len(logs)
        return sum((each - mean) ** 2 for each in logs), math.exp(mean), half

    _, share, half = min(best(half) for half in range(0, 4001, 50))
    return round(share, 2), half


def table(rows: Sequence[Row]) -> str:
    """A line for each row, with the error."""
    half = fitted(rows)
    lines = [
        [
            row.facts["model"],
            ("LoRA" if row.facts["lora"] else "full") + (", fp8" if row.facts.get("fp8") else ""),
            f"{row.facts['length']:,}",
            f"{row.facts['gpus']} × {row.facts['gpu']}",
            f"{row.facts['tokens_per_second']:,}",
            f"{row.planned:,.0f}",
            f"{row.error:+.0%}",
            "fitted" if row in half else "neither" if row.facts.get("fp8") else "judged",
            row.facts["source"],
        ]
        for row in rows
    ]
    head = [
        "model",
        "method",
        "tokens a row",
        "GPUs",
        "published",
        "foreseen",
        "error",
        "for the fit",
        "source",
    ]
    sums = []
    for name, some in (("fitted", half), ("judged", judged(rows))):
        errors = sorted(abs(row.error) for row in some)
        within = sum(error <= 0.15 for error in errors)
        middle = errors[len(errors) // 2]
        spread = f"the middle error {middle:.0%}, the largest {errors[-1]:.0%}"
        sums.append(f"{name}: {within} of {len(errors)} within 15 %, {spread}")
    return f"{markdown(head, lines)}\n\n{'; '.join(sums)}.\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print fit and table, and write the table if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hindcast", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    args = parser.parse_args(argv)
    rows = read()
    share, half = fit(fitted(rows))
    print(
        f"WIDE_SHARE = {share}, NARROW_HALF = {half}; plan/cost.py has {WIDE_SHARE} and {NARROW_HALF}\n"
    )
    print(table(rows))
    if args.write:
        before, rest = PAGE.read_text().split(BEGIN)
        write_atomic(PAGE, f"{before}{BEGIN}\n\n{table(rows)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
