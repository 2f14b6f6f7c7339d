"""TRL's own losses on given ids, run in an environment that has TRL (benchmarks/.venv-peers), which tests have not.

    PYTHON -m tests.peers.trl_losses FILE      # {"model": folder, "out": folder, "cases": [{name, loss, rows, …}]}

Writes losses.json, and the gradient of each case as NAME.safetensors.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Case = dict[str, Any]


def main(file: Path) -> None:
    """Compute all cases of a file."""
    warnings.filterwarnings("ignore")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    order = json.loads(file.read_text())
    losses = {}
    for case in order["cases"]:
        model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32).train()
        kind = case["settings"]["loss"]
        run = {"kto": _kto, "cpo": _cpo, "simpo": _cpo, "orpo": _orpo}.get(kind, _dpo)
        loss = run(model, case)
        loss.backward()
        losses[case["name"]] = float(loss.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        save_file(gradients, Path(order["out"]) / f"{case['name']}.safetensors")
    (Path(order["out"]) / "losses.json").write_text(json.dumps(losses))


def _trainer(model: Any, **settings: Any) -> SimpleNamespace:
    """Return as much of a trainer as its loss asks for."""
    import torch

    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        unwrap_model=lambda value: value,
    )
    common = {
        "aux_loss_enabled": False,
        "_metrics": defaultdict(partial(defaultdict, list)),
        "_tp_size": 1,
    }
    return SimpleNamespace(
        model=model, accelerator=accelerator, _total_train_tokens=0, **common, **settings
    )


def _fused(model: Any) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))


def _dpo(model: Any, case: Case) -> Any:
    from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer

    settings = case["settings"]
    _fused(model)
    kind = {"dpo": "sigmoid"}.get(settings["loss"], settings["loss"])
    weight = settings["sft_weight"]
    trainer = _trainer(
        model,
        beta=settings["beta"],
        label_smoothing=settings["label_smoothing"],
        loss_types=[kind, "sft"] if weight else [kind],
        loss_weights=[1.0, weight] if weight else [1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
    )
    examples = [
        {
            "prompt_ids": prompt,
            "chosen_ids": answers[0],
            "rejected_ids": answers[1],
            "ref_chosen_logps": reference[0],
            "ref_rejected_logps": reference[1],
        }
        for prompt, answers, reference, _ in case["rows"]
    ]
    return DPOTrainer._compute_loss(
        trainer, model, DataCollatorForPreference(pad_token_id=0)(examples), False
    )


def _kto(model: Any, case: Case) -> Any:
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    settings = case["settings"]
    _fused(model)
    weights = {name: settings[name] for name in ("beta", "desirable_weight", "undesirable_weight")}
    trainer = _trainer(
        model, loss_type="kto", calculate_KL=True, precompute_ref_logps=True, **weights
    )
    trainer._compute_kl_logps = partial(KTOTrainer._compute_kl_logps, trainer)
    examples = [
        {
            "prompt_ids": prompt,
            "completion_ids": answers[0],
            "KL_completion_ids": answers[1],
            "ref_logps": reference[0],
            "ref_KL_logps": reference[1],
            "label": good,
        }
        for prompt, answers, reference, good in case["rows"]
    ]
    return KTOTrainer._compute_loss(
        trainer, model, DataCollatorForUnpairedPreference(pad_token_id=0)(examples), False
    )


def _padded(case: Case) -> dict[str, Any]:
    """Return the batch of TRL's older trainers."""
    import torch

    batch: dict[str, Any] = {}
    for side, name in enumerate(("chosen", "rejected")):
        rows = [(prompt, answers[side]) for prompt, answers, *_ in case["rows"]]
        longest = max(len(prompt) + len(answer) for prompt, answer in rows)
        gaps = [longest - len(prompt) - len(answer) for prompt, answer in rows]
        columns = {
            "input_ids": [p + a + [0] * gap for (p, a), gap in zip(rows, gaps, strict=True)],
            "attention_mask": [
                [1] * (len(p) + len(a)) + [0] * gap for (p, a), gap in zip(rows, gaps, strict=True)
            ],
            "labels": [
                [-100] * len(p) + a + [-100] * gap for (p, a), gap in zip(rows, gaps, strict=True)
            ],
        }
        batch |= {f"{name}_{key}": torch.tensor(value) for key, value in columns.items()}
    return batch


def _older(model: Any, case: Case, trainer_class: Any, **settings: Any) -> Any:
    padding = {"pad_token_id": 0, "padding_value": 0, "label_pad_token_id": -100}
    trainer = _trainer(model, is_encoder_decoder=False, **padding, **settings)
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(trainer, name, getattr(trainer_class, name))
    for name in ("concatenated_forward", "cpo_loss", "odds_ratio_loss"):
        if hasattr(trainer_class, name):
            setattr(trainer, name, partial(getattr(trainer_class, name), trainer))
    return trainer_class.get_batch_loss_metrics(trainer, model, _padded(case), "train")[0]


def _cpo(model: Any, case: Case) -> Any:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    settings = case["settings"]
    kind = {"cpo": "sigmoid"}.get(settings["loss"], settings["loss"])
    rest = {"beta": settings["beta"], "label_smoothing": settings["label_smoothing"], "alpha": 0.0}
    rest |= {"cpo_alpha": settings["sft_weight"], "simpo_gamma": settings["gamma"]}
    return _older(model, case, CPOTrainer, loss_type=kind, **rest)


def _orpo(model: Any, case: Case) -> Any:
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    return _older(model, case, ORPOTrainer, beta=case["settings"]["beta"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
