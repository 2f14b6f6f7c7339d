"""Kinds of learning in other tools' files: supervised fine-tuning, pairs, reward models, GRPO, distillation.

A kind is read before a tool's own tables, which know supervised fine-tuning; its table counts before theirs.
"""

from __future__ import annotations

from kubetune.errors import ConfigError
from kubetune.plugins.importers import by_reward, by_teacher, preference_tuning
from kubetune.plugins.importers.engine import Draft, Table
from kubetune.plugins.importers.writing import inline

# Our task for each word of the tools.
_TASKS = {
    **dict.fromkeys(preference_tuning.METHODS, "preference"),
    "rm": "reward_model",
    "reward": "reward_model",
    "grpo": "grpo",
    "gkd": "distill",
    "distillation": "distill",
    "sdft": "distill",
}
# Keys that name a kind, and what they may name.
_NAMING = {
    "rl": tuple(_TASKS),
    "rlhf_type": tuple(_TASKS),
    "stage": ("sft", "pt", "dpo", "kto", "rm"),
    "reward_model": (True,),
    "process_reward_model": (),
    "task_type": ("causal_lm", "seq_cls"),
}
_COMMANDS = ("sft", "pt", "train", "rlhf", *_TASKS)
# Keys that more than one trainer of a tool reads.
_OF_SEVERAL_TRAINERS = {
    "beta": "DPO, CPO or ORPO",
    "max_prompt_length": "DPO, CPO or ORPO",
    "precompute_ref_log_probs": "DPO, CPO or ORPO",
    "teacher_model_name_or_path": "DistillationTrainer or GKD",
}
# By task: what fills in the rest.
_FINISH = {
    "preference": preference_tuning.finish,
    "grpo": by_reward.finish,
    "distill": by_teacher.finish,
}
_DOES = (
    "kubetune import converts supervised fine-tuning, preference tuning, reward models, learning by reward as GRPO does "
    "it and distillation"
)


def require_known_kind(draft: Draft) -> None:
    """Raise ConfigError for a kind of learning that kubetune does not do."""
    for key, known in _NAMING.items():
        value = draft.theirs.get(key)
        if value and value not in known:
            draft.refuse(key, f"is {inline(value)[:60]}; {_DOES}")
    # verl's command has the name of another method; its keys say that it is GRPO.
    command = draft.tool.command
    names_kind = command is None or not command.names_no_kind
    if draft.command and draft.command not in _COMMANDS and names_kind:
        raise ConfigError(f"{draft.path}: runs `{draft.command}`; {_DOES}. Nothing was written.")


def learn(draft: Draft) -> tuple[Table, ...]:
    """Take what says which kind of learning it is. Return the tables that count then."""
    key, draft.kind = _kind(draft)
    draft.kind_key = key
    if not draft.kind:
        return ()
    task = _TASKS[draft.kind]
    if key in _NAMING:
        draft.carry(key, "task", task)
    else:
        why = f"seen from `{key}`"
        if key in _OF_SEVERAL_TRAINERS:
            why += f"; {_OF_SEVERAL_TRAINERS[key]}: the file leaves it open"
        draft.assume("task", task, why)
        draft.comments["task"] = why
    if task == "distill":
        return (by_teacher.TABLE,)
    return by_reward.TABLES if task == "grpo" else preference_tuning.tables(draft.kind)


def finish(draft: Draft) -> None:
    """Fill in what a kind of learning has that is no key of its own."""
    finish_kind = _FINISH.get(draft.ours("task", ""))
    if finish_kind is not None:
        finish_kind(draft)


def _kind(draft: Draft) -> tuple[str, str]:
    """Return the key that names the kind, or the command, and the kind; empty where there is none."""
    for key in ("rl", "rlhf_type", "stage"):
        if draft.get(key) in _TASKS:
            return key, draft.get(key)
    if draft.get("reward_model") is True:
        return "reward_model", "rm"
    if draft.command == "rlhf":
        return "swift rlhf", "dpo"
    if draft.command in _TASKS:
        return f"trl {draft.command}", str(draft.command)
    if not draft.command:
        for keys, kind in draft.tool.kind_of_a_key.items():
            for key in keys.split():
                value = draft.get(key)
                if value is not None and value is not False:
                    return key, kind
    return "", ""
