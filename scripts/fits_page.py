"""Write docs/fits.md: which models fit which GPUs, as `kubetune plan --propose` says: `python scripts/fits_page.py`."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from kubetune.base.files import write_atomic
from kubetune.base.humanize import size
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.plan.costs import Costs, DataTotals, DeviceFacts, RunWeights, costs_of
from kubetune.plan.model_shapes import Weights, shapes_of
from kubetune.plan.plan import Plan, make_plan
from kubetune.plan.proposals import GpuPool, RunToPlace, Way, propose

POOLS = ("24GB", "2x24GB", "80GB", "8x80GB", "8x8x80GB")
ROWS = 8
TOKENS = 2048

# Sizes as the models' config.json have them.
_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
_LLAMA3 = {"model_type": "llama", "head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128_256}
_SMALL = {**_QWEN3, "tie_word_embeddings": True}
_MIXTURE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_key_value_heads": 4,
    "vocab_size": 151_936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def _sizes(
    family: dict[str, Any], hidden: int, layers: int, intermediate: int, heads: int
) -> dict[str, Any]:
    return {
        **family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


MODELS = {
    "Qwen3-0.6B": _sizes(_SMALL, 1024, 28, 3072, 16),
    "Qwen3-1.7B": _sizes(_SMALL, 2048, 28, 6144, 16),
    "Qwen3-4B": _sizes(_SMALL, 2560, 36, 9728, 32),
    "Qwen3-8B": _sizes(_QWEN3, 4096, 36, 12_288, 32),
    "Qwen3-14B": _sizes(_QWEN3, 5120, 40, 17_408, 40),
    "Qwen3-32B": _sizes(_QWEN3, 5120, 64, 25_600, 64),
    "Llama-3.3-70B": _sizes(_LLAMA3, 8192, 80, 28_672, 64),
    "Qwen3-30B-A3B": {**_sizes(_MIXTURE, 2048, 48, 6144, 32), "moe_intermediate_size": 768},
    "Qwen3-235B-A22B": {**_sizes(_MIXTURE, 4096, 94, 12_288, 64), "moe_intermediate_size": 1536},
}

_HEAD = f"""\
# What fits where

<!-- Written by `python scripts/fits_page.py`. -->

Each cell is the first line of `kubetune plan --propose --gpus …`: how the GPUs share the model, and how many rows of
{TOKENS:,} tokens a GPU takes at a time, {ROWS} at most. `4bit` is a base in 4 bits, which gives another result than one in
bf16. A dash: nothing fits. 8x8x80GB are 8 nodes of 8 GPUs.

The numbers are [forecasts](forecast.md), by arithmetic on sizes of models; no GPU was there to try them. Ask for your
own model, rows and GPUs with `kubetune plan RUN.yaml --propose --gpus 2x24GB`.
"""


def fits_page() -> str:
    """Return the text of docs/fits.md."""
    parts = [_HEAD]
    for title, settings in (
        ("LoRA", ("lora.r=16",)),
        ("Full fine-tuning", ("lora=null",)),
    ):
        table = (
            f"| model | weights in bf16 | {' | '.join(POOLS)} |\n|---|--:|{'---|' * len(POOLS)}\n"
        )
        for name in MODELS:
            weights = _weights(name)
            cells = [_cell(name, pool, settings) for pool in POOLS]
            table += f"| {name} | {size(2 * weights.parameters)} | {' | '.join(cells)} |\n"
        parts.append(f"## {title}\n\n{table}")
    return "\n".join(parts)


def _cell(name: str, gpus: str, settings: tuple[str, ...]) -> str:
    pool = GpuPool.parse(gpus)
    words = [
        "model=org/m",
        "data.train=org/d",
        f"data.max_length={TOKENS}",
        f"training.per_device_train_batch_size={ROWS}",
        *settings,
    ]
    run = RunToPlace(load_config(None, overrides=words), partial(make_plan), partial(_costs, name))
    is_lora = run.config.lora is not None
    for way in propose(run, pool).ways:
        # Adapters have a table of their own.
        if way.fits and (way.config.lora is not None) == is_lora:
            return _words(way)
    return "–"


def _words(way: Way) -> str:
    parts: list[str] = []
    if way.plan.world_size > 1:
        parts.append(way.config.training.parallelism)
    if way.config.quantization != "none" and way.config.quantization != "auto":
        parts.append(way.config.quantization)
    if way.config.training.optim != "adamw":
        parts.append(way.config.training.optim)
    rows = way.plan.per_device_train_batch_size
    parts.append("1 row" if rows == 1 else f"{rows} rows")
    return ", ".join(parts)


def _costs(name: str, config: Config, plan: Plan, gpu_bytes: int) -> Costs:
    device = DeviceFacts(None, gpu_bytes)
    return costs_of(config, plan, DataTotals(None, None), device, RunWeights(_weights(name)))


@cache
def _weights(name: str) -> Weights:
    """Return names and shapes of a model's weights."""
    return Weights(shapes_of(MODELS[name]), MODELS[name], stated=False)


if __name__ == "__main__":
    write_atomic(Path(__file__).parents[1] / "docs" / "fits.md", fits_page())
