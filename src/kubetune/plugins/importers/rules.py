"""The rules about settings that act on each other, in one list: a rule takes settings out, and its sentence says why.

The tools allow more together than our sections do, and their files hold settings that have no effect beside others. The
defaults are filled in before, so that a rule sees what the run would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from kubetune.config.metric_names import full_name, metrics_of
from kubetune.config.schema import DataConfig, LoraConfig, grpo, preference
from kubetune.plugins.importers.common.result_keys import TRACKERS
from kubetune.plugins.importers.engine import Draft, Kind, near
from kubetune.plugins.importers.servers import CORRECTION, URLS

_SHARDED = "training.parallelism"
_OF_COMPARING = " ".join(f"preference.{name}" for name in (*preference.ONLY_WITH, "beta", "loss"))


@dataclass(frozen=True)
class Rule:
    """Settings that are taken out if all of the conditions hold."""

    settings: str  # patterns, with spaces between
    why: str
    kind: Kind = "dropped"  # or `unneeded`, if nothing is lost
    tasks: str = ""  # condition: the task is one of these
    without: str = ""  # condition: this setting is missing
    beside: str = ""  # condition: one of these settings is on
    when: Callable[[Draft], bool] | None = None  # any other condition

    def holds(self, draft: Draft) -> bool:
        """True if all conditions hold."""
        if self.tasks and draft.ours("task", "causal_lm") not in self.tasks.split():
            return False
        if self.without and draft.has(self.without):
            return False
        if self.beside and not any(draft.ours(path) for path in self.beside.split()):
            return False
        return self.when is None or self.when(draft)


def _keeps_dropout(draft: Draft) -> bool:
    """True if the tool's trainer leaves dropout on: LLaMA-Factory's reward model has its own."""
    return draft.get("disable_dropout") is False or draft.get("stage") == "rm"


def _draws(draft: Draft) -> bool:
    """True if answers are drawn while training, as GRPO does and most of distillation."""
    task = draft.ours("task")
    draws = draft.ours("distill.lmbda", 1.0) != 0
    return task == "grpo" or (task == "distill" and bool(draws))


def _cuts_prompts(draft: Draft) -> bool:
    """True if prompts that answers are drawn for are cut."""
    return _draws(draft) and draft.ours("data.overlong", "drop") not in ("drop", "error")


def _has_no_such_metric(draft: Draft) -> bool:
    """True if a key names a metric that evaluations of the task do not have."""
    path = "training.metric_for_best_model"
    known = metrics_of(draft.ours("task", "causal_lm"), "auto", judged=True)
    return draft.origin(path) is not None and full_name(draft.ours(path)) not in known


def _leaves_routers(draft: Draft) -> bool:
    """True if routers do not learn: LoRA leaves them as they are unless it names them."""
    named = {}
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        if draft.has(f"lora.{name}"):
            named[name] = draft.ours(f"lora.{name}")
    return draft.has("lora") and LoraConfig(**named).leaves_routers


def _of_some_losses(
    section: str, loss: str, default: str, only_with: Mapping[str, Sequence[str]]
) -> list[Rule]:
    """Return a rule for each setting of a section that only some losses read, since ours refuses it with others."""
    rules = []
    for name, losses in only_with.items():

        def is_other(draft: Draft, losses: Sequence[str] = losses) -> bool:
            return draft.ours(loss, default) not in losses

        why = f"is read only by the losses {', '.join(losses)}"
        rules.append(Rule(f"{section}.{name}", why, "unneeded", when=is_other))
    return rules


# In the order in which they are looked at.
RULES = (
    # Their trainers evaluate nothing without data, and say nothing of it; ours refuses the setting.
    Rule(
        "training.early_stopping_patience training.metric_for_best_model training.greater_is_better "
        "training.eval_steps",
        "nothing is evaluated, since no data are given for it; set data.eval",
        without="data.eval",
    ),
    Rule("push.private", "nothing is uploaded", "unneeded", without="push.repo"),
    Rule(
        "lora.*",
        "has no effect, since every parameter is trained; for LoRA: lora: true",
        without="lora",
    ),
    # WANDB_PROJECT in a file whose report_to is [tensorboard] has no effect.
    *[
        Rule(
            f"tracking.{name}.*",
            f"tracking.{name} is not on in this file",
            "unneeded",
            without=f"tracking.{name}",
        )
        for name in TRACKERS
    ],
    # Models that are cut over the ranks.
    Rule(
        _SHARDED,
        "task: sequence_classification without lora is not sharded",
        without="lora",
        tasks="sequence_classification",
    ),
    Rule(
        _SHARDED,
        "preference.images without lora is not sharded",
        without="lora",
        beside="preference.images",
    ),
    # GRPO.
    Rule("data.train_on", "the answer that is drawn is what is trained", tasks="grpo"),
    Rule(
        "data.packing",
        "answers lie end to end in a packed batch, in any case",
        tasks="grpo",
    ),
    # Servers that draw the answers: those of adapters that they cannot load first.
    Rule(
        URLS,
        "stock vLLM servers take adapters, and no new weights of a whole model; set lora, or the model draws itself",
        without="lora",
    ),
    *[
        Rule(
            URLS,
            f"vLLM takes no adapter with {path}; the model draws its answers itself",
            beside=path,
        )
        for path in ("lora.use_dora", "lora.modules_to_save", "lora.target_parameters")
    ],
    Rule("grpo.servers.lag", "no server draws", without=URLS),
    Rule(
        "grpo.importance_sampling_c*",
        "the model draws its answers itself, so there is nothing to correct",
        "unneeded",
        without=URLS,
    ),
    Rule(
        "grpo.importance_sampling_clip_*",
        "nothing is corrected",
        "unneeded",
        when=lambda draft: draft.ours(CORRECTION) == "none",
    ),
    Rule(
        "grpo.use_bias_correction_kl",
        "has no effect without beta",
        "unneeded",
        when=lambda draft: not draft.ours("grpo.beta"),
    ),
    *_of_some_losses("grpo", "grpo.loss_type", "dapo", grpo.ONLY_WITH),
    # Drawn answers.
    Rule(
        "data.overlong",
        "a prompt is asked whole; longer ones are left out",
        tasks="grpo distill",
        when=_cuts_prompts,
    ),
    Rule(
        "data.max_length",
        "the tool's default is for supervised fine-tuning",
        tasks="grpo",
        when=lambda draft: draft.origin("data.max_length") is None,
    ),
    Rule(
        "data.train_on",
        "answers alone are compared",
        tasks="distill",
        when=lambda draft: _draws(draft) and draft.ours("data.train_on") == "all",
    ),
    Rule(
        "distill.top_k distill.rest",
        "all tokens are compared",
        "unneeded",
        when=lambda draft: draft.ours("distill.support", "all") == "all",
    ),
    Rule(
        "distill.sft_weight",
        "no step learns from answers of the data",
        "unneeded",
        when=lambda draft: draft.ours("distill.lmbda", 1.0) == 1,
    ),
    Rule(
        "distill.max_completion_length distill.num_generations",
        "no answers are drawn",
        "unneeded",
        tasks="distill",
        when=lambda draft: not _draws(draft),
    ),
    # Preferences and reward models.
    Rule(
        "lora.dropout",
        "its trainer switches dropout off (disable_dropout)",
        "unneeded",
        tasks="preference reward_model",
        when=lambda draft: not _keeps_dropout(draft),
    ),
    Rule(_OF_COMPARING, "has no effect on a reward model", "unneeded", tasks="reward_model"),
    Rule(
        "preference.center_coefficient",
        "has an effect only on a reward model",
        "unneeded",
        tasks="preference",
    ),
    *_of_some_losses("preference", "preference.loss", "", preference.ONLY_WITH),
    # What evaluations and routers do not have.
    Rule(
        "training.metric_for_best_model training.greater_is_better",
        "evaluations have no such metric; see training.metric_for_best_model",
        when=_has_no_such_metric,
    ),
    *[
        Rule(
            path,
            "no router learns; name it in lora.target_parameters ([mlp.gate.weight])",
            beside=path,
            when=_leaves_routers,
        )
        for path in ("training.router_aux_loss_coef", "training.router_z_loss_coef")
    ],
)


def apply_rules(draft: Draft) -> None:
    """Take out what our sections do not allow together, and what has no effect beside the rest."""
    _packed_batches(draft)
    for rule in RULES:
        if rule.holds(draft):
            for path in list(draft.settings):
                if any(fnmatchcase(path, pattern) for pattern in rule.settings.split()):
                    draft.withdraw(path, rule.why, rule.kind)
    _optimizer(draft)


def _packed_batches(draft: Draft) -> None:
    """Make a number of tokens of a global batch that counts packed rows."""
    rows = draft.ours("training.global_batch_size")
    path = "training.global_batch_tokens"
    if rows is None or draft.ours(path) != "packed":
        return
    # Example: 64 packed rows of 1,024 tokens become 65,536 tokens.
    length = draft.ours("data.max_length", DataConfig.model_fields["max_length"].default)
    key = draft.origin("training.global_batch_size") or ""
    draft.withdraw("training.global_batch_size", "")
    text = f"{path}: {rows * length:,}, {rows} full rows of {length:,} tokens"
    draft.carry(key, path, rows * length, text)


def _optimizer(draft: Draft) -> None:
    """Take AdamW for its 8-bit form where every parameter is trained and sharded."""
    path = "training.optim"
    if draft.has("lora") or not draft.has(_SHARDED) or draft.ours(path) != "adamw_8bit":
        return
    why = "8-bit state is not sharded; slices of AdamW's are small"
    draft.write(draft.origin(path) or "", near("adamw", why), path)
