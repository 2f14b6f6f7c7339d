"""LoRA on stacked experts beside PEFT's own forward, which merges the adapters of all experts each time.

    python -m benchmarks.experts [--experts N …] [--dtype bfloat16] [--repeats N] [--write]

The same model, adapters, ids and steps (forward and backward of one packed batch), each way in a process of its own
with one thread, taking turns; CPU seconds a step and peak memory above that before the first step are compared.
Everything but the experts' forward is the same in all; how long the experts take alone is measured after it. PEFT's is
measured twice: as its users have it, and with the allocator of our runs (`base/cpu`), which it gains by too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

from benchmarks.corpus import FIRST_WORD, Corpus, lengths
from benchmarks.results import Results, open_results
from benchmarks.summary import Measurement, grouped, ratios
from benchmarks.table import PAGE, markdown
from kubetune.base.cpu import heap
from kubetune.base.files import write_atomic

BEGIN = "<!-- experts: begin, written by benchmarks.experts -->"
END = "<!-- experts: end -->"
# Qwen3-30B-A3B's, each expert a quarter as wide and as deep, in four layers.
SIZES: dict[str, Any] = {
    "vocab_size": 8_000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1536,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 192,
}
# As many as Qwen3-30B-A3B and as Qwen3.5-35B-A3B have, of which both give a token to eight.
EXPERTS = (128, 256)
ROWS = (1, 2, 4, 12)  # of a micro-batch
STEPS = 2  # behind the first, which warms up
WAYS = ("peft", "peft, our allocator", "kubetune")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet, and show the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table into docs/performance.md"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what the weights are in",
    )
    parser.add_argument(
        "--experts",
        nargs="+",
        type=int,
        default=list(EXPERTS),
        metavar="N",
        help="experts of a layer",
    )
    parser.add_argument(
        "--one", nargs=2, metavar=("WAY", "ROWS"), help="measure this alone, in this process"
    )
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(step(args.one[0], int(args.one[1]), args.dtype, args.experts[0])))
        return
    results = open_results(quick=False, fresh=args.fresh, subject="experts")
    for repeat, experts, rows, way in product(range(args.repeats), args.experts, ROWS, WAYS):
        measure(
            results,
            {"way": way, "rows": rows, "dtype": args.dtype, "experts": experts, "repeat": repeat},
        )
    text = "\n\n".join(render(results, args.dtype, experts) for experts in args.experts)
    print(text)
    if args.write:
        before, rest = PAGE.read_text("utf-8").split(BEGIN)
        write_atomic(PAGE, f"{before}{BEGIN}\n\n{text}\n{END}{rest.split(END)[1]}")


def measure(results: Results, key: dict[str, Any]) -> None:
    """Measure one way in a new process, unless it is measured already."""
    if results.find("experts", key) is not None:
        return
    command = [sys.executable, "-m", "benchmarks.experts", "--one", key["way"], str(key["rows"])]
    command += ["--dtype", key["dtype"], "--experts", str(key["experts"])]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    numbers = json.loads(done.stdout.splitlines()[-1])
    numbers["load"] = os.getloadavg()[0]
    results.add("experts", key, numbers)
    print(key, numbers, flush=True)


def step(way: str, rows: int, dtype: str, experts: int) -> dict[str, float]:
    """Return CPU seconds of a step, memory above that before the first, and what was computed."""
    if way != "peft":
        heap.keep_memory()  # before torch

    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kubetune.batching.batch import collate
    from kubetune.config.schema import LoraConfig
    from kubetune.models.adapters.lora import add_lora
    from kubetune.models.learner import Learner
    from kubetune.models.padding_free import choose_attention
    from kubetune.tasks import causal_lm

    # 1. A model with adapters that are not zero.
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", **SIZES, num_experts=experts, max_position_embeddings=4096
    )
    lm = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model: Any = add_lora(lm, LoraConfig(r=16), task_type="CAUSAL_LM", seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    if way != "kubetune":
        for module in model.modules():
            vars(module).pop("forward", None)  # back to PEFT's own
    learner = Learner(model, choose_attention(model))

    # 2. One packed batch.
    draw = np.random.default_rng(0)
    sizes = lengths(Corpus(rows=rows, mean=195, longest=1024))
    ids = [draw.integers(FIRST_WORD, SIZES["vocab_size"], size).astype(np.uint32) for size in sizes]
    batch = collate([(row, np.ones(len(row), bool)) for row in ids])

    def learn() -> float:
        return float(causal_lm.TASK.backward(learner, batch, 1 / batch.num_labels))

    # 3. Its steps.
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    loss = 0.0
    for _ in range(1 + STEPS):
        model.zero_grad(set_to_none=False)
        start = time.process_time()
        loss = learn()
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return {
        "cpu_seconds": min(seconds[1:]),
        "gradient": float(torch.stack(norms).norm()),
        "alone_seconds": alone(model, learn),
        "peak_mb": peak / 1024,
        "tokens": batch.num_tokens,
        "loss": loss,
    }


def alone(model: Any, run: Callable[[], Any]) -> float:
    """Return CPU seconds of forward and backward of the experts of all layers, on what `run` gives them."""
    from kubetune.models.mixtures.stacked_experts import stacks_of

    calls: list[tuple[Any, Any]] = []  # layer, and its arguments
    layers = [model.get_submodule(name) for name in stacks_of(model)]
    hooks = [layer.register_forward_pre_hook(lambda *call: calls.append(call)) for layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    seconds = []
    for _ in range(1 + STEPS):
        start = time.process_time()
        for layer, (x, chosen, weights) in calls:
            y = layer(x.detach().requires_grad_(), chosen, weights.detach().requires_grad_())
            y.backward(y.detach())
        seconds.append(time.process_time() - start)
    return min(seconds[1:])


def render(results: Results, dtype: str, experts: int) -> str:
    """Return medians of all ways for each size of a micro-batch, and the median of the repeats' ratios."""
    measurements = []
    for measurement in results.measurements:
        if measurement["dtype"] == dtype and measurement.get("experts", EXPERTS[0]) == experts:
            measurements.append(measurement)
    # Repeats that were interrupted are left out.
    complete: list[Measurement] = []
    repeats = 0
    for of_repeat in grouped(measurements, ["repeat"]).values():
        if len(of_repeat) == len(WAYS) * len(ROWS):
            complete += of_repeat
            repeats += 1
    head = (
        "tokens",
        "PEFT, CPU s",
        "with our allocator",
        "kubetune",
        "faster by",
        "experts alone faster by",
        "PEFT, MB above start",
        "kubetune",
        "gradient",
    )
    cells = [_cells(runs) for runs in grouped(complete, ["rows"]).values()]
    machine = results.data["machine"]
    loads = [measurement["load"] for measurement in complete]
    title = (
        f"{experts} experts, {machine['cpu']}, one thread, {dtype}, {results.data['started'][:10]}; "
        f"medians of {repeats}, taking turns; load of the machine {min(loads):.0f} to {max(loads):.0f}:"
    )
    return "\n".join([title, "", markdown(head, cells)])


def _cells(runs: Sequence[Measurement]) -> list[str]:
    """Return the cells of one size of a micro-batch, from the runs of all ways and repeats."""
    by_way = grouped(runs, ["way"])
    peft, allocated, ours = (by_way[(way,)] for way in WAYS)

    def middle(of_way: Sequence[Measurement], name: str) -> float:
        return median(run[name] for run in of_way)

    def faster_by(name: str) -> str:
        both = []
        for theirs in (peft, allocated):
            both.append(f"{median(ratios(theirs, ours, lambda run: run[name])):.2f}×")
        return " / ".join(both)

    # Norms are fp32: nearer than this they cannot be told apart.
    apart = 1.2e-7
    for ratio in ratios(ours, peft, lambda run: run["gradient"]):
        apart = max(apart, abs(ratio - 1))
    return [
        f"{runs[0]['tokens']:,}",
        *(f"{middle(of_way, 'cpu_seconds'):.2f}" for of_way in (peft, allocated, ours)),
        faster_by("cpu_seconds"),
        faster_by("alone_seconds"),
        f"{middle(peft, 'peak_mb'):,.0f}",
        f"{middle(ours, 'peak_mb'):,.0f}",
        f"same norm to {apart:.0e}",
    ]


if __name__ == "__main__":
    main()
