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

from kubetune.base import logs, processes
from kubetune.config.schema import LoraConfig, ModelConfig, VisionConfig
from kubetune.errors import ConfigError, KubetuneError
from kubetune.plan.model_shapes import Weights

# Longer than the imports and the modules of a large model take on a slow machine.
_SECONDS: Final = 120.0


class _NoAnswer(Exception):
    """The other process says nothing of the targets, and why."""


def require_built_targets(
    lora: LoraConfig, model: ModelConfig, task_name: str, vision: VisionConfig | None = None
) -> None:
    """Build the model without weights, and raise ConfigError for targets that it lacks. This imports torch.

    `vision`: how the model sees, None for one that reads only text.
    """
    import transformers

    from kubetune.models.loading import skeleton
    from kubetune.models.model_spec import ModelSpec
    from kubetune.tasks import task_of

    # As the run does it: a new head of a classifier and a frozen tower get no adapters, whatever is named.
    task = task_of(task_name)
    built = skeleton(getattr(transformers, task.auto_class), model)
    task.with_adapters(built, ModelSpec(model, lora, vision=vision), seed=0)


def require_targets_elsewhere(
    lora: LoraConfig,
    model: ModelConfig,
    task_name: str,
    vision: VisionConfig | None,
    weights: Weights,
) -> None:
    """Have another process build the model, and raise ConfigError for targets that it lacks.

    What that process cannot say, the run itself says before its first step.
    """
    request = {
        "lora": lora.model_dump(mode="json"),
        "model": model.model_dump(mode="json"),
        "task": task_name,
        "vision": None if vision is None else vision.model_dump(mode="json"),
    }
    model_config = json.dumps(weights.config, sort_keys=True)
    try:
        problem = _asked(json.dumps(request), model_config)
    except _NoAnswer as error:
        logs.MODEL.warning("whether the model has lora's targets is open until training: %s", error)
        return
    if problem:
        raise ConfigError(problem)


@lru_cache(maxsize=64)
def _asked(request: str, model_config: str) -> str:
    """Return the problem that the other process names, empty for none. A form asks again with every letter.

    `model_config`: what config.json says. It is not sent, but another model in the same folder is asked about again.
    Raise _NoAnswer, which is not remembered, if the process does not answer.
    """
    try:
        done = subprocess.run(
            processes.module(__name__),
            input=request,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"building it took longer than {_SECONDS:.0f} s") from None
    try:
        return str(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise _NoAnswer(
            f"the process that builds it ended with exit code {done.returncode} ({lines[-1][:200]})"
        ) from None


def main() -> None:
    """Answer the question on standard input with a text on standard output."""
    request = json.loads(sys.stdin.read())
    vision = request["vision"]
    problem = ""
    try:
        require_built_targets(
            LoraConfig.model_validate(request["lora"]),
            ModelConfig.model_validate(request["model"]),
            request["task"],
            None if vision is None else VisionConfig.model_validate(vision),
        )
    except KubetuneError as error:
        problem = str(error)
    print(json.dumps(problem))


if __name__ == "__main__":
    processes.die_with_parent()
    main()
