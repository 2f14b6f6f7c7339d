"""Plan a run on its prepared data: the same plan on all ranks, with what is `auto` decided."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from kubetune.batching.feed import evaluated, rows_per_epoch, tokens_per_epoch
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import Prepared
from kubetune.data.text.tokenizer_files import read_json
from kubetune.distributed.process_group import World
from kubetune.plan.memory import Shape
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan, make_plan
from kubetune.supervisor.rank_environment import RANKS
from kubetune.training.start import auto_settings
from kubetune.training.start.start_log import log_start


def plan_run(config: Config, run_dir: Path, data: Prepared, world: World) -> tuple[Config, Plan]:
    """Return the config with `auto` decided, and the plan. All ranks call it."""
    ranks = int(os.environ.get(RANKS, world.size))
    device: Literal["cuda", "cpu"] = "cpu"
    if world.device.type == "cuda":
        device = "cuda"
    # All ranks compute the same plan from the same sizes, so nothing is sent.
    plan = make_plan(config, **_sizes(data), world_size=ranks, device=device)
    num_tokens = planned_tokens(plan, data)
    config = auto_settings.decide(config, plan, run_dir, world, num_tokens, _width_of(data))
    log_start(plan, world, data, config.task)
    return config, plan


def _width_of(data: Prepared) -> int | None:
    """Return the hidden size of the model from its config.json, None if that has none."""
    # Weights are not needed to know the shapes.
    facts = read_json(data.tokenizer.files.get("config.json"))
    shape = Shape.of(Weights({}, facts, stated=False).text_config)
    if shape is None or not isinstance(shape.hidden, int):
        return None
    return shape.hidden


def _sizes(data: Prepared) -> dict[str, Any]:
    """Return the sizes of the prepared data that the plan needs."""
    eval_rows = 0
    if data.eval is not None:
        eval_rows = len(evaluated(data.eval))
    return {
        "rows": rows_per_epoch(data.train),
        "eval_rows": eval_rows,
        "tokens": tokens_per_epoch(data.train),
    }


def planned_tokens(plan: Plan, data: Prepared) -> int:
    """Return about how many tokens all planned steps have."""
    # Sources have weights, so an epoch has other rows than the files; their mean length is about the same.
    mean_tokens = float(data.train.lengths.mean())
    return round(mean_tokens * (plan.rows or 0) * plan.num_epochs)
