"""Target modules that only a built model can judge, by `python -m kubetune.library.verdict.built_targets`.

No verb imports torch to judge a run. The other process builds the model without weights, and prints the problem of its
targets, if there is one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from typing import Final

from kubetune.base import processes
from kubetune.config.schema import LoraConfig, ModelConfig
from kubetune.errors import ConfigError, KubetuneError
from kubetune.plan.model_shapes import Weights

# Longer than the imports and the modules of a large model take on a slow machine.
_SECONDS: Final = 120.0


def require_built_targets(lora: LoraConfig, model: ModelConfig, task: str) -> None:
    """Build the model without weights, and raise ConfigError for targets that it lacks. This imports torch."""
    import transformers

    from kubetune.models.adapters.lora import add_lora
    from kubetune.models.loading import skeleton
    from kubetune.tasks import task_of

    auto_class = getattr(transformers, task_of(task).auto_class)
    add_lora(skeleton(auto_class, model), lora, task_type="CAUSAL_LM", seed=0)


def require_targets_elsewhere(
    lora: LoraConfig, model: ModelConfig, task: str, weights: Weights
) -> None:
    """Have another process build the model, and raise ConfigError for targets that it lacks.

    What that process cannot say, the run itself says before its first step.
    """
    model_config = json.dumps(weights.config, sort_keys=True)
    problem = _asked(lora.model_dump_json(), model.model_dump_json(), task, model_config)
    if problem:
        raise ConfigError(problem)


@lru_cache(maxsize=64)
def _asked(lora: str, model: str, task: str, model_config: str) -> str:
    """Return the problem that the other process names, empty for none. A form asks again with every letter.

    `model_config`: what config.json says. It is not sent, but another model in the same folder is asked about again.
    """
    try:
        done = subprocess.run(
            processes.module(__name__),
            input=json.dumps([lora, model, task]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        return str(json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return ""


def main() -> None:
    """Answer the question on standard input with a text on standard output."""
    lora, model, task = json.loads(sys.stdin.read())
    problem = ""
    try:
        require_built_targets(
            LoraConfig.model_validate_json(lora), ModelConfig.model_validate_json(model), task
        )
    except KubetuneError as error:
        problem = str(error)
    print(json.dumps(problem))


if __name__ == "__main__":
    processes.die_with_parent()
    main()
