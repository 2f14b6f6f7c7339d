"""Distillation in other tools' files: TRL's GKDTrainer and DistillationTrainer, and ms-swift's `--rlhf_type gkd`."""

from __future__ import annotations

from typing import Final

from kubetune.plugins.importers.common.training_keys import NO_EFFECT, numbers
from kubetune.plugins.importers.engine import Draft, Row, Table, unneeded

# Defaults of GKD, in all tools.
OF_GKD: Final = {"distill.lmbda": 0.5, "distill.beta": 0.5, "distill.temperature": 0.9}
_DRAWN: Final = (
    "answers are drawn by the model's own probabilities, which are those that are compared"
)
_ALONE: Final = "a teacher is a model that each process holds"


def finish(draft: Draft, key: str) -> None:
    """Write down what ms-swift does with the likeliest tokens. Raise ConfigError without a teacher.

    `key`: names the kind of learning.
    """
    if not draft.has("distill.teacher") and "distill.teacher" not in draft.undecided:
        draft.refuse(
            key,
            "the file names no teacher that is a model; expected teacher_model_name_or_path or teacher_model",
        )
    if draft.has("distill.top_k"):
        why = "ms-swift renormalises the teacher's likeliest tokens"
        draft.assume("distill.support", "teacher_k", why)
        draft.assume("distill.rest", "renormalise", why)


# Keys of distillation; each counts before the tool's own row for it.
TABLE: Final = Table(
    same={
        "distill.teacher": "teacher_model_name_or_path teacher_model",
        "distill.revision": "teacher_model_revision",
        "distill.beta": "beta",
        "distill.temperature": "temperature",
        "distill.lmbda": "lmbda",
        "distill.max_completion_length": "max_completion_length max_new_tokens",
        "distill.num_generations": "num_generations",
        "distill.sft_weight": "sft_alpha",
    },
    rows=[
        Row("gkd_logits_topk", "distill.top_k", other=numbers(int, unneeded("all tokens, as here"))),
    ],
    dropped={
        "seq_kd": ("the teacher draws no answers; let it answer first, and train on that", False),
        "top_p": (_DRAWN, 1.0),
        "top_k": (_DRAWN, 0, -1),
        "min_p": (_DRAWN, 0.0),
        "repetition_penalty": (_DRAWN, 1.0),
        "teacher_adapters": "name a run directory as the teacher, or merge its adapter first",
        "teacher_model_server teacher_server_urls": _ALONE,
        "teacher_model_init_kwargs teacher_model_type": "a teacher is loaded as the model is; see model.dtype",
        "steps_per_generation generation_batch_size": "answers are drawn before each step",
    },
    unneeded={
        "teacher_deepspeed offload_teacher_model": "each process holds the teacher whole",
        "use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_len "
        "vllm_max_model_length vllm_enable_sleep_mode sleep_level vllm_model_impl": "answers are drawn by the model itself",
        "log_completions num_completions_to_print log_unique_prompts wandb_log_unique_prompts":
            "answers are kept in rollouts/, see `kubetune rollouts`",
        "loss_scale assistant_only_loss completion_only_loss": "answers alone are compared",
        "packing": "batches are counted in rows, and packed by data.packing",
        "disable_dropout shuffle_dataset pad_to_multiple_of cache_implementation": NO_EFFECT,
    },
)  # fmt: skip
