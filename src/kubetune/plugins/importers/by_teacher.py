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
# The same of axolotl's KD, which learns from answers of the data.
OF_KD = {
    "distill.lmbda": 0,
    "distill.beta": 0.0,
    "distill.support": "teacher_k",
    "distill.rest": "renormalise",
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
    _choose_tokens_of_trl(draft)
    if draft.origin("distill.top_k") == "gkd_logits_topk":
        why = "ms-swift renormalises the teacher's likeliest tokens"
        draft.assume("distill.support", "teacher_k", why)
        draft.assume("distill.rest", "renormalise", why)
    answers = defaults.get("distill.num_generations", 1)
    if draft.ours("distill.num_generations", answers) > 1:
        count_prompts(draft, "distill.num_generations", answers)


def _choose_tokens_of_trl(draft: Draft) -> None:
    """Write down whose likeliest tokens TRL compares, where it does not compare all."""
    is_served = draft.origin("distill.teacher") == _URL_OF_TRL
    beta = draft.ours("distill.beta", 1.0)
    if is_served:
        draft.assume("distill.top_k", 1)
        why = "a server answers for the teacher's likeliest tokens"
        if beta:
            why += ", and TRL compares the drawn one too"
        draft.assume("distill.support", "teacher_k", why)
    elif draft.origin("distill.top_k") == "loss_top_k":
        whose = "student" if beta == 1 else "teacher"
        why = f"TRL compares the likeliest tokens of the {whose} with this beta"
        if 0 < beta < 1:
            why = "TRL compares the likeliest tokens of both"
        draft.assume("distill.support", f"{whose}_k", why)


def _server_of_trl(value: Any, draft: Draft) -> Outcome:
    """Take the server of a teacher, unless the file switches it off."""
    if draft.get("use_teacher_server") is False:
        return unneeded("use_teacher_server is off")
    return near(
        value, "stock `vllm serve` has to answer at this address in place of `trl vllm-serve`"
    )


def _number_of_tokens(value: Any, draft: Draft) -> Outcome:
    """Return how many tokens TRL compares. Only some of its ways compare the same ones as ours."""
    number = int(value)
    if number == 0:
        return unneeded("all tokens, as here")
    beta = draft.get("beta")
    is_reverse = beta in (None, 1) and not draft.get(_URL_OF_TRL) and number > 1
    if beta == 0 or is_reverse:
        return carried(number)
    return near(number, "TRL also compares the drawn token, or the likeliest tokens of both")


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


def _share_of_cross_entropy(value: Any, draft: Draft) -> Outcome:
    """Return the weight of cross-entropy beside a divergence of the weight 1."""
    return carried(float(value or 0) / float(draft.get("kd_alpha") or 1))


# Keys of distillation; each counts before the tool's own row for it.
TABLE = Table(
    same={
        "distill.teacher": "teacher_model_name_or_path teacher_model",
        "distill.revision": "teacher_model_revision",
        "distill.teacher_prompt": "teacher_prompt_template",
        "distill.timeout_seconds": "kd_online_timeout",
        "distill.beta": "beta distillation_alpha kd_beta",
        "distill.temperature": "temperature kd_temperature",
        "distill.top_k": "distillation_topk kd_online_topk",
        "distill.lmbda": "lmbda",
        "distill.max_completion_length": "max_completion_length max_new_tokens",
        "distill.num_generations": "num_generations",
        "distill.sft_weight": "sft_alpha",
    },
    rows=[
        Row("gkd_logits_topk", "distill.top_k", other=numbers(int, unneeded("all tokens, as here"))),
        Row("loss_top_k", "distill.top_k", other=_number_of_tokens),
        Row(_URL_OF_TRL, "distill.teacher", other=_server_of_trl),
        # SDFT.
        Row("teacher_model_kind", "distill.teacher", {"base": "self"},
            near("self", "the teacher stays the model before training")),
        Row("distillation_mode", "distill.support", {"topk_logits": "student_k", "full_logits": "all"},
            near("all", "in TRL the drawn token stands for all tokens, which kubetune compares")),
        Row("distillation_add_tail loss_add_tail", "distill.rest", {True: "tail", False: "renormalise"}),
        Row("max_prompt_length", "data.max_length",
            other=lambda value, _: near(value, "prompt and right answer are counted, and longer records left out")),
        # KD.
        Row("kd_trainer", other=lambda _, draft: unneeded(f"see task: {draft.ours('task')}")),
        Row("kd_online_server_base_url teacher_model_server", "distill.teacher", other=_addresses),
        Row("kd_ce_alpha", "distill.sft_weight", other=_share_of_cross_entropy),
        Row("kd_normalize_topk", "distill.rest", {True: "renormalise"},
            near("tail", "axolotl leaves out the rest of the probability, kubetune compares it as one token")),
    ],
    dropped={
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
        "kd_alpha": ("it scales the whole loss, on which AdamW does not depend; kd_ce_alpha is carried in proportion", 1),
        "kd_online_server": ("a teacher on servers is one of vLLM", "vllm"),
        "kd_temperature_min": "the temperature stays the same",
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
