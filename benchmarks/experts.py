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
from benchmarks.table import PAGE, markdown
from kubetune.base import cpu
from kubetune.base.files import write_atomic

BEGIN, END = "<!-- experts: begin, written by benchmarks.experts -->", "<!-- experts: end -->"
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
"""Qwen3-30B-A3B's, each expert a quarter as wide and as deep, in four layers."""
EXPERTS = (128, 256)
"""As many as Qwen3-30B-A3B and as Qwen3.5-35B-A3B have, of which both give a token to eight."""
ROWS, STEPS = (1, 2, 4, 12), 2
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
    """One way in a new process, unless it is measured already."""
    if results.find("experts", key) is None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.experts",
            "--one",
            key["way"],
            str(key["rows"]),
        ]
        command += ["--dtype", key["dtype"], "--experts", str(key["experts"])]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        said = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environ
        ).stdout
        found = json.loads(said.splitlines()[-1]) | {"load": os.getloadavg()[0]}
        results.add("experts", key, found)
        print(key, found, flush=True)


def step(way: str, rows: int, dtype: str, experts: int) -> dict[str, float]:
    """CPU seconds of a step, memory above that before the first, and what was computed."""
    if way != "peft":
        cpu.keep_memory()  # before torch

    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kubetune.batching.batch import collate
    from kubetune.config.schema import LoraConfig
    from kubetune.models.adapters.lora import add_lora
    from kubetune.models.learner import Learner
    from kubetune.models.padding_free import choose_attention
    from kubetune.tasks import causal_lm

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
            vars(module).pop("forward", None)
    learner = Learner(model, choose_attention(model))
    draw = np.random.default_rng(0)
    sizes = lengths(Corpus(rows=rows, mean=195, longest=1024))
    ids = [draw.integers(FIRST_WORD, SIZES["vocab_size"], size).astype(np.uint32) for size in sizes]
    batch = collate([(row, np.ones(len(row), bool)) for row in ids])
    before, seconds, loss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, [], 0.0
    for _ in range(1 + STEPS):
        model.zero_grad(set_to_none=False)
        began = time.process_time()
        loss = float(causal_lm.TASK.backward(learner, batch, 1 / batch.num_labels))
        seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    trained = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.stack([g.norm() for g in trained]).norm())
    return {
        "cpu_seconds": min(seconds[1:]),
        "alone_seconds": alone(
            model, lambda: causal_lm.TASK.backward(learner, batch, 1 / batch.num_labels)
        ),
        "peak_mb": peak / 1024,
        "tokens": batch.num_tokens,
        "loss": loss,
        "gradient": norm,
    }


def alone(model: Any, run: Callable[[], Any]) -> float:
    """CPU seconds of forward and backward of the experts of all layers, on what `run` gives them."""
    from kubetune.models.mixtures.experts import stacks_of

    given: list[tuple[Any, Any]] = []
    layers = [model.get_submodule(name) for name in stacks_of(model)]
    hooks = [layer.register_forward_pre_hook(lambda *call: given.append(call)) for layer in layers]
    run()
    for hook in hooks:
        hook.remove()
    found = []
    for _ in range(1 + STEPS):
        began = time.process_time()
        for layer, (x, chosen, weights) in given:
            y = layer(x.detach().requires_grad_(), chosen, weights.detach().requires_grad_())
            y.backward(y.detach())
        found.append(time.process_time() - began)
    return min(found[1:])


def render(results: Results, dtype: str, experts: int) -> str:
    """Medians of all ways for each size of a micro-batch, and the median of the repeats' ratios."""
    measured = [
        m
        for m in results.measurements
        if (m["dtype"], m.get("experts", EXPERTS[0])) == (dtype, experts)
    ]
    found = {(m["way"], m["rows"], m["repeat"]): m for m in measured}
    whole = len(WAYS) * len(ROWS)
    repeats = [
        r
        for r in sorted({repeat for _, _, repeat in found})
        if sum(key[2] == r for key in found) == whole
    ]
    head = (
        "tokens",
        "PEFT, CPU s",
        "with our allocator",
        "kubetune",
        "faster by",
        "experts alone faster by",
    )
    head = (*head, "PEFT, MB above start", "kubetune", "gradient")
    table = []
    for rows in ROWS:
        taken = [[found[way, rows, repeat] for way in WAYS] for repeat in repeats]
        times, only, peaks = (
            [[one[key] for one in ways] for ways in taken]
            for key in ("cpu_seconds", "alone_seconds", "peak_mb")
        )
        # Norms are fp32: nearer than this they cannot be told apart.
        apart = max(
            1.2e-7, *(abs(ours["gradient"] / theirs["gradient"] - 1) for theirs, _, ours in taken)
        )
        table.append(
            [
                f"{taken[0][0]['tokens']:,}",
                *(f"{median(column):.2f}" for column in zip(*times, strict=True)),
                *(
                    " / ".join(
                        f"{median(ways[n] / ways[-1] for ways in column):.2f}×" for n in (0, 1)
                    )
                    for column in (times, only)
                ),
                *(f"{median(ways[n] for ways in peaks):,.0f}" for n in (0, -1)),
                f"same norm to {apart:.0e}",
            ]
        )
    machine = results.data["machine"]
    loads = [m["load"] for m in found.values() if m["repeat"] in repeats]
    said = (
        f"{experts} experts, {machine['cpu']}, one thread, {dtype}, {results.data['started'][:10]}; "
        f"medians of {len(repeats)}, taking turns; load of the machine {min(loads):.0f} to {max(loads):.0f}:"
    )
    return "\n".join([said, "", markdown(head, table)])


if __name__ == "__main__":
    main()
