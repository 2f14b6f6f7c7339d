"""Steps, batches, learning rate, evaluations, checkpoints, and the numerics of training: `training`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kubetune.config.metric_names import full_name, is_greater_better
from kubetune.config.schema.base import Section, renamed

OPTIM_NAMES = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
}

Interval = Annotated[int, Field(ge=1)] | Literal["epoch"]


class TrainingConfig(Section):
    """Steps, optimizer, schedule, evaluations, checkpoints and speed of a run."""

    # How long.
    num_train_epochs: float = Field(1.0, gt=0, le=10_000, description="Epochs; may be a fraction.")
    max_steps: int | None = Field(
        None, ge=1, description="Optimizer steps; takes precedence over epochs."
    )
    # How much a step takes. One of the two global sizes, or accumulation, decides; the others follow.
    global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Samples per optimizer step over all ranks, whatever their number. Left out: "
        "`per_device_train_batch_size × gradient_accumulation_steps × world`.",
    )
    global_batch_tokens: Annotated[int, Field(ge=1)] | Literal["packed"] | None = Field(
        None,
        description="Instead of `global_batch_size`: about this many tokens per optimizer step, in any number of samples. "
        "`packed`: `per_device_train_batch_size × max_length × gradient_accumulation_steps × world`, like tools that "
        "count packed rows.",
    )
    per_device_train_batch_size: int = Field(
        1,
        ge=1,
        description="Samples per micro-batch; with packing, as many tokens as in this number of full-length sequences.",
    )
    gradient_accumulation_steps: int | None = Field(
        None,
        ge=1,
        description="Micro-batches per step and rank. Derived when the global batch is given.",
    )
    per_device_eval_batch_size: int | None = Field(
        None, ge=1, description="Left out: as in training."
    )
    # The learning rate, and its schedule.
    learning_rate: float | None = Field(
        None,
        gt=0,
        lt=10,
        description="Left out: 2e-4 for LoRA, 1e-5 for full fine-tuning; 5e-6 and 5e-7 of `task: preference`, "
        "1e-4 and 1e-5 of `task: reward_model`.",
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Shape after warm-up."
    )
    warmup_ratio: float = Field(
        0.03, ge=0, lt=1, description="Share of the steps spent warming up."
    )
    warmup_steps: int | None = Field(
        None, ge=0, description="Steps spent warming up; takes precedence over the ratio."
    )
    # The loss and the gradient.
    weight_decay: float = Field(
        0.0, ge=0, lt=1, description="AdamW's decay; never on norms and biases."
    )
    router_aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="Weight of the loss that balances experts, if routers learn; left out: the model's.",
    )
    router_z_loss_coef: float = Field(
        0.0, ge=0, description="Weight of the mean logsumexp² of routers that learn."
    )
    max_grad_norm: float = Field(
        1.0, ge=0, description="Gradient norm is clipped to this; 0 switches clipping off."
    )
    # The optimizer.
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first decay rate.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second decay rate.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    optim: Annotated[Literal["adamw", "adamw_8bit"], renamed(OPTIM_NAMES)] = Field(
        "adamw", description="Fused AdamW, or bitsandbytes' 8-bit AdamW."
    )
    # When the run logs, evaluates and saves.
    logging_steps: int = Field(
        1, ge=1, description="Steps between log lines; metrics.jsonl holds every step."
    )
    eval_steps: Interval = Field("epoch", description="Steps between evaluations, or `epoch`.")
    save_steps: Interval = Field("epoch", description="Steps between checkpoints, or `epoch`.")
    save_total_limit: int = Field(
        3, ge=1, description="Newest checkpoints kept, besides the best one."
    )
    # Which checkpoint is best, and when to give up.
    metric_for_best_model: Annotated[
        str, BeforeValidator(full_name, json_schema_input_type=str)
    ] = Field(
        "eval_loss",
        description="Evaluation metric that chooses `best`; `accuracy` means `eval_accuracy`. Left out: `eval_loss`; of "
        "`task: grpo`, `eval_reward`.",
    )
    greater_is_better: bool | None = Field(
        None,
        description="Whether a greater value is better. Left out: false for losses, mae, perplexity, kl, divergence and "
        "metrics of rejected answers, else true.",
    )
    early_stopping_patience: int | None = Field(
        None, ge=1, description="Stop after this many evaluations without improvement."
    )
    loss_watchdog_threshold: float | None = Field(
        None,
        gt=0,
        description="A run whose loss is above this for `loss_watchdog_patience` steps in a row ends with exit code 4; "
        "during these steps no checkpoint is saved. Left out: only a loss that is not finite ends a run.",
    )
    loss_watchdog_patience: int = Field(
        3,
        ge=1,
        description="Steps in a row with a loss above `loss_watchdog_threshold` that end the run.",
    )
    # How it computes. None of these changes a loss by more than rounding, except fp8.
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto",
        description="Recompute activations to save memory; `auto`: only if the memory plan needs it.",
    )
    parallelism: Literal["auto", "ddp", "shard_base", "fsdp"] = Field(
        "ddp",
        description="`ddp`: every process holds the whole model. `shard_base`: each holds a part of the frozen base under "
        "adapters. `fsdp`: each holds a part of all weights (FSDP2). `auto`: `ddp` if it fits the memory plan.",
    )
    fsdp_size: int | None = Field(
        None,
        ge=2,
        description="Processes that `fsdp` or `shard_base` cuts the weights over. Left out: all. With fewer, each group of "
        "so many has all weights (HSDP): give the GPUs of a node, so that layers are gathered within nodes.",
    )
    fused_forwards: bool = Field(
        True,
        description="Use faster forward code: always for LoRA layers; for norms and the like once equal results are "
        "proved.",
    )
    compile: Literal["auto", "layers"] | bool = Field(
        "auto",
        description="torch.compile of pointwise parts; `auto`: if the planned work is worth it. `layers`: of whole decoder "
        "layers too, except attention; `auto` chooses it only if `kubetune bench` found it faster.",
    )
    fp8: bool = Field(
        False,
        description="Compute the frozen layers under adapters in 8-bit floats, on GPUs that have them. Refused if it "
        "changes the loss of the first batch by more than 1 %.",
    )
    # Saving, resuming, ending.
    async_save: Literal["auto"] | bool = Field(
        "auto",
        description="Write checkpoints while training goes on, from a copy in the host's memory. `auto`: on a GPU, if a "
        "checkpoint is large.",
    )
    resume: Literal["auto", "must", "never"] = Field(
        "auto",
        description="`auto`: continue from the newest good checkpoint. `must`: fail without one. `never`: refuse a run "
        "directory that has one.",
    )
    pause_at_step: int | None = Field(
        None,
        ge=1,
        description="Save and end at the first evaluation from this step on. A start with a higher one, or none, continues.",
    )
    # Safety.
    preflight: bool = Field(
        False,
        description="Before step 1, try the longest batch, an evaluation and a save, and report the memory that they take.",
    )
    timeout_seconds: float = Field(
        1800.0,
        ge=1,
        description="A rank that makes no progress for this long ends the run. So does a rank that others wait for this "
        "long, or a node that does not come. Loading the model and each checkpoint must take less.",
    )
    seed: int = Field(
        42, ge=0, lt=2**63, description="Decides data order, splits, initial weights and dropout."
    )

    def ranks_of_copy(self, ranks: int) -> int:
        """Return how many of a run's ranks a copy of sharded weights is cut over."""
        return ranks if self.fsdp_size is None else min(self.fsdp_size, ranks)

    @property
    def prefers_greater(self) -> bool:
        """True if a greater value of the metric that chooses the best checkpoint is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return is_greater_better(self.metric_for_best_model)
