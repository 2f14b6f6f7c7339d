"""Hybrids on packed batches beside one sequence at a time: CPU seconds and peak memory of the same ids.

    python -m benchmarks.hybrids [FAMILY …] [--width N] [--dtype bfloat16] [--repeats N]

Each way runs in a process of its own with one thread, over all rows three times, of which the fastest counts. The ways
take turns. LoRA is on all linear layers; its forwards and the allocator are as in a run. The last column is the bound:
how much faster packing could be if nothing but its matrix products took time, at the speed of bare ones.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.results import Results, open_results
from kubetune.base.cpu import heap

if TYPE_CHECKING:
    import torch

COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
KIMI = {
    "linear_num_heads": 4,
    "linear_head_dim": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
    "mlp_layer_types": ["dense"] * 4,
}
SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        **SSM, "shared_intermediate_size": 704, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "kimi_linear": {**KIMI, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}  # fmt: skip
HEADS = (
    "linear_num_value_heads", "linear_num_key_heads", "linear_num_heads", "num_key_value_heads", "mamba_n_heads",
    "shared_intermediate_size",
)  # fmt: skip
WAYS = {"one by one": "sdpa", "packed": "auto"}  # with `model.attention` of each
ROWS = 24
BUDGET = 2048  # tokens of a packed batch
# Relative difference of two losses that is rounding, by dtype.
SAME = {"float32": 1e-6, "bfloat16": 5e-3}


def sizes(width: int) -> dict[str, Any]:
    """Return settings that all families have, for a model of this width."""
    heads = width // COMMON["head_dim"]
    return COMMON | {
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }


def settings(name: str, width: int) -> dict[str, Any]:
    """Return settings of a family's model of this width, whose recurrent heads grow in number with it."""
    result = sizes(width) | CASES[name]
    for key in HEADS:
        if key in CASES[name]:
            result[key] = CASES[name][key] * (width // COMMON["hidden_size"])
    return result


def measure(name: str, way: str, width: int, precision: str) -> dict[str, float]:
    """Return CPU seconds for loss and gradients of all rows, those of the products alone, and peak memory."""
    heap.keep_memory()  # before torch

    import numpy as np
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from kubetune.batching.batch import collate
    from kubetune.config.schema import LoraConfig
    from kubetune.data.prepared.micro_batches import pack
    from kubetune.models.adapters.lora import add_lora
    from kubetune.models.fused_forwards import swap_forwards
    from kubetune.models.learner import Learner
    from kubetune.models.padding_free import choose_attention
    from kubetune.tasks.causal_lm import TASK

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, precision)
    config = AutoConfig.for_model(name, **settings(name, width))
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    model = add_lora(lm, LoraConfig(r=8), task_type="CAUSAL_LM", seed=0)
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(4.6, 0.8, ROWS), 16, 700).astype(int)
    rows = [(draw.integers(5, 4000, n).astype(np.uint32), np.arange(n) > n // 3) for n in lengths]
    learner = Learner(model, choose_attention(model, WAYS[way]))
    if learner.route.padding_free:
        swap_forwards(model, None, learner.undo)
        groups = pack(np.arange(ROWS), lengths, BUDGET)
    else:
        groups = [[number] for number in range(ROWS)]
    batches = [collate([rows[number] for number in group]) for group in groups]

    def learn() -> float:
        return sum(float(TASK.backward(learner, batch, 1 / 1000)) for batch in batches)

    seconds = []
    loss = 0.0
    for _ in range(3):
        start = time.process_time()
        loss = learn()
        seconds.append(time.process_time() - start)
    # Counting products takes memory of its own, so the peak is read before.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    with FlopCounterMode(display=False) as counted:
        learn()
    return {
        "seconds": min(seconds),
        "product_seconds": counted.get_total_flops() / bare_flops(width, dtype),
        "loss": loss,
        "peak_mib": peak,
        "tokens": int(lengths.sum()),
        "batches": len(batches),
    }


def bare_flops(width: int, dtype: torch.dtype) -> float:
    """Return FLOP/s of a bare product of the feed-forwards' size, the best of several."""
    import torch

    x = torch.randn(1024, width, dtype=dtype)
    weight = torch.randn(11 * width // 4, width, dtype=dtype)
    # The best of several: other programs only ever make it slower.
    best = float("inf")
    for _ in range(20):
        start = time.process_time()
        for _ in range(4):
            x @ weight.T
        best = min(best, (time.process_time() - start) / 4)
    return 2.0 * x.numel() * len(weight) / best


def main() -> None:
    """Measure what is not measured yet, and print a row of a table for each family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--width", type=int, default=COMMON["hidden_size"])
    parser.add_argument(
        "--dtype", choices=SAME, default="float32", help="what weights and products are in"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.names[0], args.way, args.width, args.dtype)))
        return
    results = open_results(quick=False, fresh=args.fresh, subject="hybrids")
    head = (
        "",
        "tokens",
        "one by one, CPU s",
        "packed, CPU s",
        "faster",
        "peak memory, MiB",
        "at most",
    )
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name in args.names:
        model = {"family": name, "width": args.width, "dtype": args.dtype}
        print(_line(name, results, model, args.repeats), flush=True)


def _line(name: str, results: Results, model: dict[str, Any], repeats: int) -> str:
    """Measure a family, and return its row of the table."""
    lone_runs = []
    packed_runs = []
    times_as_fast = []
    bounds = []
    for repeat in range(repeats):
        lone = _measured(results, model, "one by one", repeat)
        packed = _measured(results, model, "packed", repeat)
        difference = abs(lone["loss"] - packed["loss"])
        assert difference <= SAME[model["dtype"]] * abs(lone["loss"]), "both learn the same"
        lone_runs.append(lone)
        packed_runs.append(packed)
        times_as_fast.append(lone["seconds"] / packed["seconds"])
        bounds.append(lone["seconds"] / packed["product_seconds"])
    best_lone = min(lone_runs, key=lambda run: run["seconds"])
    best_packed = min(packed_runs, key=lambda run: run["seconds"])
    cells = [
        f"`{name}`",
        f"{best_lone['tokens']:,}",
        f"{best_lone['seconds']:.2f}",
        f"{best_packed['seconds']:.2f}",
        f"{median(times_as_fast):.2f}×",
        f"{best_lone['peak_mib']:,.0f} → {best_packed['peak_mib']:,.0f}",
        f"{median(bounds):.1f}×",
    ]
    return f"| {' | '.join(cells)} |"


def _measured(results: Results, model: dict[str, Any], way: str, repeat: int) -> dict[str, Any]:
    """Return the measurement of one way. Make it in a new process if it is not made yet."""
    key = {**model, "way": way, "repeat": repeat}
    measurement = results.find("hybrids", key)
    if measurement is not None:
        return measurement
    options = ["--width", str(model["width"]), "--dtype", model["dtype"], "--way", way]
    command = [sys.executable, "-m", "benchmarks.hybrids", model["family"], *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environ)
    numbers = json.loads(done.stdout.splitlines()[-1])
    numbers["load"] = os.getloadavg()[0]
    results.add("hybrids", key, numbers)
    return results.measurements[-1]


if __name__ == "__main__":
    main()
