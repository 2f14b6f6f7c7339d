"""What our sections do not allow together: a setting is taken out of a draft, and the key that it came from says why."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from kubetune.config.metric_names import full_name, metrics_of
from kubetune.config.schema import DataConfig, LoraConfig
from kubetune.plugins.importers import servers
from kubetune.plugins.importers.common.training_keys import TRACKERS
from kubetune.plugins.importers.engine import Draft, Kind, near

_SHARDED: Final = "training.parallelism"
_FP8: Final = (
    "training.fp8 is for LoRA without dropout, on a base that is neither quantised nor sharded"
)


@dataclass(frozen=True)
class Conflict:
    """Settings that are taken out where all of the conditions hold."""

    paths: str  # patterns of settings, with spaces between
    why: str
    kind: Kind = "dropped"
    without: str = ""  # condition: this setting is missing
    beside: str = ""  # condition: one of these settings is on
    tasks: str = ""  # condition: the task is one of these

    def holds(self, draft: Draft) -> bool:
        """Return True if all conditions hold."""
        if self.without and draft.has(self.without):
            return False
        if self.beside and not any(draft.ours(path) for path in self.beside.split()):
            return False
        return not self.tasks or draft.ours("task", "causal_lm") in self.tasks.split()


# In the order in which they are looked at.
CONFLICTS: Final = (
    # Their trainers evaluate nothing without data, and say nothing of it; ours refuses the setting.
    Conflict(
        "training.early_stopping_patience training.metric_for_best_model training.greater_is_better "
        "training.eval_steps",
        "nothing is evaluated, since no data are given for it; set data.eval",
        without="data.eval",
    ),
    Conflict("push.private", "nothing is uploaded", "unneeded", without="push.repo"),
    Conflict(
        "lora.*",
        "every parameter is trained, so it says nothing; for LoRA: lora: true",
        without="lora",
    ),
    # WANDB_PROJECT in a file whose report_to is [tensorboard] says nothing.
    *[
        Conflict(
            f"tracking.{name}.*",
            f"tracking.{name} is not on in this file",
            "unneeded",
            without=f"tracking.{name}",
        )
        for name in TRACKERS
    ],
    # FP8.
    Conflict("training.fp8", _FP8, without="lora"),
    Conflict("training.fp8", _FP8, beside=f"quantization lora.dropout lora.use_dora {_SHARDED}"),
    Conflict(
        "training.fp8",
        _FP8,
        tasks="preference reward_model grpo sequence_classification vision_language",
    ),
    # Models that are cut over the ranks.
    Conflict(
        _SHARDED,
        "task: sequence_classification without lora is not sharded",
        without="lora",
        tasks="sequence_classification",
    ),
    Conflict(
        _SHARDED,
        "preference.images without lora is not sharded",
        without="lora",
        beside="preference.images",
    ),
    # GRPO.
    Conflict("data.train_on", "the answer that is drawn is what is trained", tasks="grpo"),
    Conflict(
        "data.packing",
        "answers lie end to end in a packed batch, in any case",
        tasks="grpo",
    ),
    # Servers that draw the answers: those of adapters that they cannot load first.
    Conflict(
        servers.URLS,
        "stock vLLM servers take adapters, and no new weights of a whole model; set lora, or the model draws itself",
        without="lora",
    ),
    *[
        Conflict(
            servers.URLS,
            f"vLLM takes no adapter with {path}; the model draws its answers itself",
            beside=path,
        )
        for path in ("lora.use_dora", "lora.modules_to_save", "lora.target_parameters")
    ],
    Conflict("grpo.servers.lag", "no server draws", without=servers.URLS),
    Conflict(
        "grpo.importance_sampling_c*",
        "the model draws its answers itself, so there is nothing to correct",
        "unneeded",
        without=servers.URLS,
    ),
)


def settle(draft: Draft) -> None:
    """Take out what our sections do not allow together, and say so."""
    _packed_batches(draft)
    for conflict in CONFLICTS:
        if conflict.holds(draft):
            _take_out(draft, conflict)
    _metric(draft)
    _routers(draft)
    _optimizer(draft)


def _take_out(draft: Draft, conflict: Conflict) -> None:
    """Take out the settings of a conflict."""
    for path in list(draft.settings):
        if any(fnmatchcase(path, pattern) for pattern in conflict.paths.split()):
            draft.withdraw(path, conflict.why, conflict.kind)


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


def _metric(draft: Draft) -> None:
    """Take out a metric that evaluations of the task do not have, and its direction."""
    path = "training.metric_for_best_model"
    known = metrics_of(draft.ours("task", "causal_lm"), "auto", judged=True)
    if draft.origin(path) is None or full_name(draft.ours(path)) in known:
        return
    why = f"evaluations have no {draft.ours(path)}; see {path}"
    draft.withdraw(path, why)
    draft.withdraw("training.greater_is_better", why)


def _routers(draft: Draft) -> None:
    """Take out the losses of routers that do not learn, which LoRA leaves as they are unless it names them."""
    named = {}
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        if draft.has(f"lora.{name}"):
            named[name] = draft.ours(f"lora.{name}")
    if not draft.has("lora") or not LoraConfig(**named).leaves_routers:
        return
    why = "no router learns here; name it in lora.target_parameters ([mlp.gate.weight])"
    for path in ("training.router_aux_loss_coef", "training.router_z_loss_coef"):
        if draft.ours(path):
            draft.withdraw(path, why)


def _optimizer(draft: Draft) -> None:
    """Take AdamW for its 8-bit form where every parameter is trained and sharded."""
    path = "training.optim"
    if draft.has("lora") or not draft.has(_SHARDED) or draft.ours(path) != "adamw_8bit":
        return
    why = "8-bit state is not sharded; slices of AdamW's are small"
    draft.write(draft.origin(path) or "", near("adamw", why), path)
