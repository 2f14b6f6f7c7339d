"""Distillation in other tools' files: TRL's GKD, distillation and SDFT, ms-swift's `--rlhf_type gkd`, axolotl's KD."""

from __future__ import annotations

import json
from typing import Any

from kubetune.plugins.importers.by_reward import count_prompts
from kubetune.plugins.importers.common.training_keys import NO_EFFECT, numbers
from kubetune.plugins.importers.engine import Draft, Outcome, Row, Table, carried, near, unneeded

# Defaults of GKD, in all tools.
OF_GKD = {"distill.lmbda": 0.5, "distill.beta": 0.5, "distill.temperature": 0.9}
# Defaults of TRL's SDFT: a model learns from itself, shown more.
OF_SDFT = {
    "training.learning_rate": 5e-5,
    "distill.teacher": "self",
    "distill.teacher_prompt": "{prompt}\n\n{privileged_context}",
    "distill.beta": 0.5,
    "distill.support": "student_k",
    "distill.top_k": 100,
    "distill.rest": "renormalise",
    "distill.num_generations": 8,
    "distill.max_completion_length": 256,
}
_DRAWN = "answers are drawn by the model's own probabilities, which are those that are compared"
_URL_OF_TRL = "teacher_model_server_url"


def finish(draft: Draft) -> None:
    """Write down what ms-swift does with the likeliest tokens. Raise ConfigError without a teacher."""
    defaults = draft.tool.defaults_of.get(draft.kind, {})
    if not draft.has("distill.teacher") and "distill.teacher" not in {
        **draft.undecided,
        **defaults,
    }:
        draft.refuse(
            draft.kind_key,
            "the file names no teacher; expected teacher_model_name_or_path, teacher_model, or the address of a server",
        )
    if draft.origin("distill.top_k") == "gkd_logits_topk":
        why = "ms-swift renormalises the teacher's likeliest tokens"
        draft.assume("distill.support", "teacher_k", why)
        draft.assume("distill.rest", "renormalise", why)
    answers = defaults.get("distill.num_generations", 1)
    if draft.ours("distill.num_generations", answers) > 1:
        count_prompts(draft, "distill.num_generations", answers)


def _server_of_trl(_: Any, draft: Draft) -> Outcome:
    """Refuse the server of a teacher, of which TRL compares other tokens than kubetune by default."""
    draft.refuse(
        draft.at,
        "is a server of TRL; write task: distill with distill.teacher, support and top_k by hand",
    )


def _addresses(value: Any, _: Draft) -> Outcome:
    """Carry the servers of a teacher: an address, or ms-swift's list of addresses with what each is for."""
    servers = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        servers = json.loads(value)
    if isinstance(servers, str):
        return carried(servers)
    urls = [server["url"] for server in servers]
    if any(server.get("tags") for server in servers):
        return near(urls, "each of them is asked about any row")
    return carried(urls)


# Keys of distillation; each counts before the tool's own row for it.
TABLE = Table(
    same={
        "distill.teacher": "teacher_model_name_or_path teacher_model",
        "distill.revision": "teacher_model_revision",
        "distill.teacher_prompt": "teacher_prompt_template",
        "distill.beta": "beta distillation_alpha",
        "distill.temperature": "temperature",
        "distill.top_k": "distillation_topk",
        "distill.lmbda": "lmbda",
        "distill.max_completion_length": "max_completion_length max_new_tokens",
        "distill.num_generations": "num_generations",
        "distill.sft_weight": "sft_alpha",
    },
    rows=[
        Row("gkd_logits_topk", "distill.top_k", other=numbers(int, unneeded("all tokens, as here"))),
        Row(_URL_OF_TRL, "distill.teacher", other=_server_of_trl),
        # SDFT.
        Row("teacher_model_kind", "distill.teacher", {"base": "self"},
            near("self", "the teacher stays the model before training")),
        Row("distillation_mode", "distill.support", {"topk_logits": "student_k", "full_logits": "all"},
            near("all", "in TRL the drawn token stands for all tokens, which kubetune compares")),
        Row("distillation_add_tail loss_add_tail", "distill.rest", {True: "tail", False: "renormalise"}),
        Row("max_prompt_length", "data.max_length",
            other=lambda value, _: near(value, "prompt and right answer are counted, and longer records left out")),
        Row("teacher_model_server", "distill.teacher", other=_addresses),
    ],
    dropped={
        "loss_top_k": ("see distill.support and distill.top_k, which say whose likeliest tokens are compared", 0),
        "seq_kd": ("the teacher draws no answers; let it answer first, and train on that", False),
        "top_p": (_DRAWN, 1.0),
        "top_k": (_DRAWN, 0, -1),
        "min_p": (_DRAWN, 0.0),
        "repetition_penalty": (_DRAWN, 1.0),
        "teacher_adapters": "name a run directory as the teacher, or merge its adapter first",
        "teacher_server_urls": "teachers of other rows are other runs",
        "teacher_model_init_kwargs teacher_model_type": "a teacher is loaded as the model is; see model.dtype",
        "steps_per_generation generation_batch_size": "answers are drawn before each step",
        "num_iterations": ("answers are drawn before each step", 1),
        "num_loss_tokens_to_skip": ("all tokens of an answer are compared", 0),
        "generate_from_teacher": ("the model draws the answers, and the teacher none", False),
        "reverse_kl_top_1_mode": "no token is compared because it was drawn; see distill.support",
        "teacher_update_rate teacher_sync_steps": "the teacher stays the model before training",
    },
    unneeded={
        "use_teacher_server": f"{_URL_OF_TRL} is what counts",
        "distillation_is_clip": "answers are drawn before each step, by the weights that learn from them",
        "num_generations_eval": "evaluations draw what evaluation.generate says",
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
