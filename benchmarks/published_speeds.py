"""Compare published speeds of other trainers (published_speeds.json) with what `kubetune plan` foresees for the same work.

    python -m benchmarks.published_speeds [--write]

The share of a GPU's peak that plans assume is fitted to every other row in 16 bits, and judged on the others. Prints
the fit, which belongs into `plan/cost.py`, and the table; --write puts that into docs/performance.md.
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

ROWS = Path(__file__).with_name("published_speeds.json")
BEGIN = "<!-- published speeds: begin, written by benchmarks.published_speeds -->"
END = "<!-- published speeds: end -->"


@dataclass(frozen=True)
class Row:
    """A published speed of one GPU, and what a plan says of the same work."""

    facts: dict[str, Any]  # the row of published_speeds.json
    hidden: int  # the model's hidden size
    share: float  # of the GPU's peak, by the published speed
    planned: float  # tokens/s

    @property
    def is_fp8(self) -> bool:
        """True if it was trained in 8-bit floats, for which plans have no share."""
        return bool(self.facts.get("fp8"))

    @property
    def error(self) -> float:
        """Return the error of the forecast, relative to what was published."""
        return self.planned / self.facts["tokens_per_second"] - 1


def read() -> list[Row]:
    """Return the rows, in the file's order."""
    content = json.loads(ROWS.read_text())
    return [_row(facts, content["models"][facts["model"]]) for facts in content["rows"]]


def _row(facts: dict[str, Any], model: dict[str, Any]) -> Row:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as data:
        is_sharded = facts["gpus"] > 1 and not facts.get("fp8")
        flags = {
            "model.path": facts["model"],
            "data.train": data.name,
            "data.max_length": facts["length"],
            "training.parallelism": "fsdp" if is_sharded else "ddp",
        }
        if facts["lora"]:
            flags |= {"lora.r": 16, "lora.target_modules": "all-linear"}
        if facts.get("fp8"):
            flags["training.fp8"] = True
        config = load_config(None, flags=flags)
    weights = Weights(shapes_of(model), model, stated=True)
    plan = make_plan(
        config, 1000, world_size=facts["gpus"], device="cuda", tokens=1000 * facts["length"]
    )
    work = RankWork.of(config, plan)
    cost = bill(work, config.compute, plan, weights, 10**9, facts["gpu"])
    flops = flops_per_token(work, weights)
    peak = stated_tflops(facts["gpu"])
    assert cost is not None, "the GPU is known"
    assert cost.tokens_per_second
    assert flops
    assert peak
    share = facts["tokens_per_second"] * flops / peak / 1e12
    return Row(facts, model["hidden_size"], share, cost.tokens_per_second / facts["gpus"])


def fitted(rows: Sequence[Row]) -> list[Row]:
    """Return every other row in 16 bits."""
    return [row for row in rows if not row.is_fp8][::2]


def judged(rows: Sequence[Row]) -> list[Row]:
    """Return the others in 16 bits."""
    return [row for row in rows if not row.is_fp8][1::2]


def fit(rows: Sequence[Row]) -> tuple[float, int]:
    """Return the share of the peak of wide models, and the hidden size that has half of it."""
    # share(hidden) = wide · hidden / (hidden + half). For a given half, the best wide is the mean of logarithms; the
    # half with the least squared errors of these is taken.

    def best(half: int) -> tuple[float, float, int]:
        logs = [math.log(row.share * (row.hidden + half) / row.hidden) for row in rows]
        mean = sum(logs) / len(logs)
        return sum((log - mean) ** 2 for log in logs), math.exp(mean), half

    _, share, half = min(best(half) for half in range(0, 4001, 50))
    return round(share, 2), half


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row, with the error."""
    uses = {id(row): "fitted" for row in fitted(rows)} | {id(row): "judged" for row in judged(rows)}
    lines = []
    for row in rows:
        method = "LoRA" if row.facts["lora"] else "full"
        if row.is_fp8:
            method += ", fp8"
        lines.append(
            [
                row.facts["model"],
                method,
                f"{row.facts['length']:,}",
                f"{row.facts['gpus']} × {row.facts['gpu']}",
                f"{row.facts['tokens_per_second']:,}",
                f"{row.planned:,.0f}",
                f"{row.error:+.0%}",
                uses.get(id(row), "neither"),
                row.facts["source"],
            ]
        )
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
    for name, group in (("fitted", fitted(rows)), ("judged", judged(rows))):
        errors = sorted(abs(row.error) for row in group)
        within = sum(error <= 0.15 for error in errors)
        middle = errors[len(errors) // 2]
        spread = f"the middle error {middle:.0%}, the largest {errors[-1]:.0%}"
        sums.append(f"{name}: {within} of {len(errors)} within 15 %, {spread}")
    return f"{markdown(head, lines)}\n\n{'; '.join(sums)}.\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Print fit and table, and write the table if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_speeds", description=__doc__.splitlines()[0]
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
