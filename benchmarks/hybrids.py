"""Hybrids on packed batches beside one sequence at a time: CPU seconds and peak memory of the same ids.

Each way runs in a process of its own with one thread, over all rows twice, and the faster counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1, "num_local_experts": 0}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        **SSM, "shared_intermediate_size": 704, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
}  # fmt: skip
WAYS = {"one by one": "sdpa", "packed": "auto"}
ROWS, BUDGET = 24, 2048


def measure(name: str, way: str) -> dict[str, float]:
    """Seconds of this process for loss and gradients of all rows, and its peak memory."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from kubetune.adapters.lora import add_lora
    from kubetune.batching.batch import collate
    from kubetune.config.schema import LoraConfig
    from kubetune.data.prepared.order import pack
    from kubetune.models.learner import Learner
    from kubetune.models.padding_free import choose_attention
    from kubetune.tasks.causal_lm import backward

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **COMMON, **CASES[name])
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model = add_lora(lm, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]), task_type="CAUSAL_LM", seed=0)
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(4.6, 0.8, ROWS), 16, 700).astype(int)
    rows = [(draw.integers(5, 4000, n).astype(np.uint32), np.arange(n) > n // 3) for n in lengths]
    learner = Learner(model, choose_attention(model, WAYS[way]))
    groups = pack(np.arange(ROWS), lengths, BUDGET) if learner.route.padding_free else [[n] for n in range(ROWS)]
    seconds, loss = [], 0.0
    for _ in range(2):
        began = time.process_time()
        loss = sum(float(backward(learner, collate([rows[n] for n in group]), 1 / 1000)) for group in groups)
        seconds.append(time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": min(seconds),
        "loss": loss,
        "peak_mib": peak,
        "tokens": int(lengths.sum()),
        "batches": len(groups),
    }


def main() -> None:
    """Print a row of a table for each family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.names[0], args.way)))
        return
    print("| | tokens | one by one, CPU s | packed, CPU s | faster | peak memory, MiB |\n|---|---|---|---|---|---|")
    for name in args.names:
        found: dict[str, dict[str, float]] = {}
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.hybrids", name, "--way", way]
            said = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
            found[way] = min(said, found.get(way, said), key=lambda one: one["seconds"])
        alone, together = (found[way] for way in WAYS)
        assert abs(alone["loss"] - together["loss"]) <= 1e-6 * abs(alone["loss"])
        ratio = alone["seconds"] / together["seconds"]
        print(
            f"| `{name}` | {alone['tokens']:,} | {alone['seconds']:.2f} | {together['seconds']:.2f} | {ratio:.2f}× "
            f"| {alone['peak_mib']:,.0f} → {together['peak_mib']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
