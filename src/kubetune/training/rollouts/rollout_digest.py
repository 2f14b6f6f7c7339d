"""The digest of what decides the answers of a run: those of an earlier start with another one are not taken."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kubetune.base import files
from kubetune.scoring.rewards.pool import RewardPool
from kubetune.training.start.rank_start import RankStart

# Settings of `grpo` that decide the answers.
DECIDING = {
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "num_iterations",
    "steps_per_generation",
    "generation_batch_size",
}


def digest_of(start: RankStart, pool: RewardPool) -> str:
    """Return the digest of what decides the answers and their rewards, besides the weights."""
    settings = start.model.grpo
    code = []
    for reward in start.rewards:
        if reward.file:
            code.append(files.sha256_file(Path(reward.file).expanduser()))
    facts: dict[str, Any] = {
        "settings": settings.model_dump(include=DECIDING),
        "has_reference": settings.beta > 0,
        "rewards": [reward.model_dump(exclude={"weight"}) for reward in start.rewards],
        "code": code,
        "models": [judge.digest for judge in pool.models.values()],
        "seed": start.training.seed,
        "batch": start.plan.global_batch_size,
        "data": start.data.fingerprint,
        "ends": list(start.data.tokenizer.eos_ids),
    }
    if settings.servers is not None:
        # Which servers does not matter, but whose weights the answers are of.
        facts["lag"] = settings.servers.lag
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
