"""TRL's own advantages, losses and gradients of GRPO, recorded for tests/unit/test_grpo_objective.py.

    PYTHON -m tests.peers.trl_grpo tests/peers/trl_grpo.json      # PYTHON: of an environment that has trl 1.16.0

The trainer is made without a model: what it would ask the model for, log-probabilities, is given to it. All else is
its own code, from rewards to the loss: `_generate_and_score_completions` and `_compute_loss`.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]
Scene = dict[str, Any]

GROUPS = 3
GENERATIONS = 3
LONGEST = 5
# Id of the token that ends an answer; an answer without it was cut off.
END = 2


def scene(seed: int) -> Scene:
    """Draw answers with rewards and log-probabilities: of the weights, of those that drew, of sampler and reference."""
    draw = random.Random(seed)
    scene: Scene = {
        "ids": [],
        "rewards": [],
        "logps": [],
        "old": [],
        "sampled": [],
        "reference": [],
    }
    for row in range(GROUPS * GENERATIONS):
        length = draw.randint(1, LONGEST)
        is_cut = draw.random() < 0.3
        scene["ids"].append(
            [draw.randint(5, 99) for _ in range(length - 1)] + [7 if is_cut else END]
        )
        judged = [round(draw.random(), 3), float(draw.randint(0, 1))]
        if row % 4 == 3:
            judged[draw.randint(0, 1)] = None  # type: ignore[call-overload]
        if row == 5:
            judged = [None, None]  # type: ignore[list-item]
        if seed == 2 and row < GENERATIONS:
            judged = [1.0, 0.0]  # a group whose rewards are all alike
        scene["rewards"].append(judged)
        base = [-3 * draw.random() for _ in range(length)]
        for name, spread in (("logps", 0.0), ("old", 0.5), ("sampled", 0.7), ("reference", 1.0)):
            noise = [round(number + spread * draw.gauss(0, 1), 4) for number in base]
            scene[name].append(noise)
    return scene


def cases() -> list[Case]:
    """Return settings, each with the scene that they are tried on."""
    everything: list[Case] = []
    types = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")
    # Each loss type × level × divergence, on and off policy.
    for kind, level, beta, is_old in product(
        types, ("token", "sequence"), (0.0, 0.1), (False, True)
    ):
        everything.append(
            {
                "loss_type": kind,
                "importance_sampling_level": level,
                "beta": beta,
                "off_policy": is_old,
            }
        )
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    for kind, mode in product(types, modes):
        limits = {"importance_sampling_clip_max": 1.5, "importance_sampling_clip_min": 0.6}
        everything.append({"loss_type": kind, "importance_sampling_correction": mode, **limits})
        everything.append({"loss_type": kind, "importance_sampling_correction": mode})
    for kind, scale in product(types, ("batch", "none")):
        everything.append({"loss_type": kind, "scale_rewards": scale})
        everything.append(
            {"loss_type": kind, "scale_rewards": scale, "mask_truncated_completions": True}
        )
    for kind, level in product(("grpo", "dr_grpo", "dapo"), ("token", "sequence")):
        common = {"loss_type": kind, "importance_sampling_level": level, "off_policy": True}
        everything.append({**common, "delta": 1.3})
        everything.append({**common, "epsilon": 0.1, "epsilon_high": 0.4})
        everything.append({**common, "beta": 0.2, "use_bias_correction_kl": False})
        everything.append({**common, "mask_truncated_completions": True, "beta": 0.05})
    everything.append({"loss_type": "cispo", "epsilon_high": 1.1, "off_policy": True})
    everything.append({"loss_type": "sapo", "sapo_temperature_pos": 2.0, "off_policy": True})
    everything += _of_vespo()
    for number, case in enumerate(everything):
        case["scene"] = number % 3
        if case["loss_type"] == "cispo":
            case.setdefault("epsilon_high", 5.0)
    return everything


def _of_vespo() -> list[Case]:
    """Return settings of the loss that takes an answer's ratio as a product, and the sampler's correction with it."""
    vespo: Case = {"loss_type": "vespo"}
    powers = {
        "vespo_k_pos": 1.0,
        "vespo_lambda_pos": 2.0,
        "vespo_k_neg": 2.0,
        "vespo_lambda_neg": 0.0,
    }
    some = [
        {**vespo, "beta": beta, "off_policy": old}
        for beta, old in product((0.0, 0.1), (False, True))
    ]
    for mode in ("token_truncate", "token_mask"):
        limits = {"importance_sampling_clip_max": 1.5, "importance_sampling_clip_min": 0.6}
        some.append({**vespo, "importance_sampling_correction": mode, **limits})
        some.append({**vespo, "importance_sampling_correction": mode})
    for scale in ("batch", "none"):
        some.append({**vespo, "scale_rewards": scale, "off_policy": True})
        some.append({**vespo, "scale_rewards": scale, "mask_truncated_completions": True})
    some.append({**vespo, **powers, "off_policy": True})
    some.append(
        {**vespo, **powers, "off_policy": True, "beta": 0.1, "use_bias_correction_kl": False}
    )
    return some


def main(file: Path) -> None:
    """Record all cases."""
    warnings.filterwarnings("ignore")
    import trl

    scenes = [scene(seed) for seed in range(3)]
    recorded = []
    for case in cases():
        recorded.append({**case, **_run(case, scenes[case["scene"]])})
    content = {"trl": trl.__version__, "scenes": scenes, "cases": recorded}
    file.write_text(json.dumps(content) + "\n")
    print(f"{len(recorded)} cases")


def _padded(rows: list[list[float]]) -> Any:
    import torch

    longest = max(map(len, rows))
    return torch.tensor([row + [0.0] * (longest - len(row)) for row in rows])


def _run(case: Case, scene: Scene) -> Case:
    """Return TRL's advantages, loss, and the gradient of each token's log-probability."""
    import torch

    logps = _padded(scene["logps"]).requires_grad_()
    trainer = _trainer(case, scene, logps)
    rows = [{"prompt": "a"} for _ in scene["ids"]]
    inputs = trainer._generate_and_score_completions(rows)
    trainer.queue = [logps]
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = logps.grad if logps.grad is not None else torch.zeros_like(logps)
    of_tokens = []
    for row, ids in zip(gradient.tolist(), scene["ids"], strict=True):
        of_tokens += [float(f"{number:.8g}") for number in row[: len(ids)]]
    return {
        "loss": float(loss),
        "gradient": of_tokens,
        "advantages": [float(f"{number:.8g}") for number in inputs["advantages"].tolist()],
    }


def _trainer(case: Case, scene: Scene, logps: Any) -> Any:
    """Return a trainer of TRL that was never begun, with all that its loss asks for."""
    import torch
    from trl.trainer.grpo_trainer import GRPOTrainer

    mode = case.get("importance_sampling_correction")
    queue = []
    if case.get("off_policy") or mode:
        queue.append(_padded(scene["old"]))
    if case.get("beta"):
        queue.append(_padded(scene["reference"]))

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, prompts: Any) -> Any:
            ids = scene["ids"]
            sampled = scene["sampled"] if mode else None
            return [[3]] * len(ids), ids, None, ["b"] * len(ids), sampled, {}, None, None

        def _calculate_rewards(self, *_: Any) -> Any:
            rows = [[float("nan") if x is None else x for x in row] for row in scene["rewards"]]
            return torch.tensor(rows)

        def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
            values = self.queue.pop(0)
            return values, torch.zeros_like(values), None

    trainer = object.__new__(Trainer)
    trainer.__dict__.update(_attributes(case, mode), queue=queue)
    return trainer


def _attributes(case: Case, mode: str | None) -> dict[str, Any]:
    import torch

    args = SimpleNamespace(
        per_device_train_batch_size=GROUPS * GENERATIONS,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        delta=case.get("delta"),
        use_bias_correction_kl=case.get("use_bias_correction_kl", True),
        sapo_temperature_pos=case.get("sapo_temperature_pos", 1.0),
        sapo_temperature_neg=1.05,
        vespo_k_pos=case.get("vespo_k_pos", 2.0),
        vespo_lambda_pos=case.get("vespo_lambda_pos", 3.0),
        vespo_k_neg=case.get("vespo_k_neg", 3.0),
        vespo_lambda_neg=case.get("vespo_lambda_neg", 2.0),
        report_to=[],
    )
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
        unwrap_model=lambda model, **_: model,
        sync_gradients=True,
    )
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    epsilon = case.get("epsilon", 0.2)
    return {
        "args": args,
        "accelerator": accelerator,
        "model": model,
        "ref_model": model,
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "_is_vlm": False,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "eos_token_ids": [END],
        "pad_to_multiple_of": None,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LONGEST + 1,
        "num_generations": GENERATIONS,
        "num_generations_eval": GENERATIONS,
        "num_iterations": 2 if case.get("off_policy") else 1,
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": case.get("scale_rewards", "group"),
        "reward_weights": torch.tensor([1.0, 0.5]),
        "reward_func_names": ["first", "second"],
        "mask_truncated_completions": case.get("mask_truncated_completions", False),
        "use_vllm": mode is not None,
        "vllm_importance_sampling_correction": mode is not None,
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": case.get("importance_sampling_clip_max", 3.0),
        "vllm_importance_sampling_clip_min": case.get("importance_sampling_clip_min"),
        "loss_type": case["loss_type"],
        "importance_sampling_level": case.get("importance_sampling_level", "token"),
        "beta": case.get("beta", 0.0),
        "epsilon_low": epsilon,
        "epsilon_high": case.get("epsilon_high", epsilon),
        "log_multimodal": False,
        "_metrics": defaultdict(partial(defaultdict, list)),
        "_logs": defaultdict(
            partial(defaultdict, list), {"prompt": [], "completion": [], "advantages": []}
        ),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "compute_loss_context_manager": nullcontext,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
