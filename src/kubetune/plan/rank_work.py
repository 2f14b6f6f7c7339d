"""The work of one process of a run: the facts of config and plan that its memory and speed depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kubetune.config.schema import Config, LoraConfig
from kubetune.plan.drawing import rows_at_once
from kubetune.plan.linears import Trainable
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import Plan


@dataclass(frozen=True)
class RankWork:
    """The work of one rank. `Weights` says the rest: what the model's sizes are."""

    task: str
    device: Literal["cuda", "cpu"]
    ranks: int  # processes of the run, on all nodes
    sharing: int  # of these, those that a copy of sharded weights is cut over
    is_sharded: bool  # training.parallelism: fsdp or shard_base, on several ranks or one
    trainable: Trainable  # which parameters learn
    quantization: str  # of the base: none, 4bit, fp4 or 8bit, with `auto` decided
    dtype: str  # model.dtype
    element: int  # bytes of a parameter of the base in products: 4 in fp32, else 2
    optimizer: Literal["adamw", "adamw_8bit"]
    attention: str  # model.attention
    recompute: bool | Literal["auto"]  # training.gradient_checkpointing
    compile: bool | str  # training.compile
    may_accumulate: bool  # a step may have several micro-batches
    draws_answers: bool  # the model draws the answers that it learns from
    drawn_rows: int  # answers that it draws at a time; 0 if it draws none
    drawn_tokens: int  # of the longest prompt with the longest answer
    holds_reference: bool  # the model before training is held as a second model
    classifies: bool  # the model has a head that judges texts in place of its vocabulary
    sees: bool  # the rows may have images
    sequence_tokens: int  # tokens of the longest sequence
    row_tokens: int  # tokens of the longest row; a pair of answers is a row of two sequences
    batch_tokens: int  # tokens of the largest micro-batch
    run_tokens: int | None  # tokens of all steps, None while the data are unread
    teacher: Weights | None = None  # those of a model that reads all rows of a step too

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters that learn, None if all parameters do."""
        return self.trainable.lora

    @classmethod
    def of(cls, config: Config, plan: Plan, longest: int | None = None) -> RankWork:
        """Read the facts. `longest`: tokens of the longest sequence of the data, None while they are unread."""
        # Lengths: of the data if they are known, else the longest that the config allows.
        training = config.training
        sequence = config.data.max_length
        sequences_of_a_row = config.longest_row // sequence
        batch_tokens = plan.micro_batch_tokens
        if longest is not None and longest <= sequence:
            sequence = max(1, longest)
            batch_tokens = _filled_tokens(plan, sequence * sequences_of_a_row)
        row = sequence * sequences_of_a_row
        draws_answers = config.draws_answers and config.drawing.servers is None
        step_tokens = plan.tokens_per_step
        return cls(
            task=config.task,
            device=plan.device,
            ranks=plan.world_size,
            sharing=training.ranks_of_copy(plan.world_size),
            is_sharded=training.parallelism in ("shard_base", "fsdp"),
            trainable=Trainable(config.lora, config.sight),
            quantization=quantization_of(config.quantization, config.lora, plan),
            dtype=config.model.dtype,
            element=element_bytes(config.model.dtype, plan.device),
            optimizer=training.optim,
            attention=config.model.attention,
            recompute=training.gradient_checkpointing,
            compile=training.compile,
            may_accumulate=plan.may_accumulate,
            draws_answers=draws_answers,
            drawn_rows=rows_at_once(config.drawing, plan) if draws_answers else 0,
            drawn_tokens=sequence + config.drawing.max_completion_length,
            holds_reference=config.task == "grpo" and config.grpo.beta > 0 and not config.lora,
            classifies=config.classifies,
            sees=config.sees,
            sequence_tokens=sequence,
            row_tokens=row,
            batch_tokens=batch_tokens or plan.per_device_train_batch_size * row,
            run_tokens=None if step_tokens is None else step_tokens * plan.num_steps,
        )


def _filled_tokens(plan: Plan, row_tokens: int) -> int | None:
    """Return the tokens of a micro-batch that all rows of a step cannot fill, if they are that short.

    Example: 8 rows of at most 100 tokens a step and rank fill 800 tokens of a micro-batch of 4,096.
    """
    tokens = plan.micro_batch_tokens
    if tokens is None or plan.global_batch_tokens is not None:
        return tokens
    rows = math.ceil(plan.global_batch_size / plan.world_size)
    in_rows = math.ceil(rows * row_tokens * (1 - plan.saved_share))
    # A micro-batch holds at least one whole row.
    return min(tokens, max(row_tokens, in_rows))


def element_bytes(dtype: str, device: str) -> int:
    """Return the bytes of one parameter of the base in products. `dtype`: model.dtype."""
    is_full_precision = dtype == "float32"
    if dtype == "auto":
        # bfloat16 on a GPU, float32 on a CPU.
        is_full_precision = device != "cuda"
    return 4 if is_full_precision else 2


def quantization_of(setting: str, lora: LoraConfig | None, plan: Plan) -> str:
    """Return the setting `quantization`, with `auto` decided as the run will."""
    if setting != "auto":
        return setting
    return auto_quantization(lora, plan.device, plan.world_size)[0]


def auto_quantization(lora: LoraConfig | None, device: str, processes: int) -> tuple[str, str]:
    """Decide `quantization: auto` and say why: 8-bit on a single GPU if memory is short, else none.

    A run decides the same, or none if its bitsandbytes does not work.
    """
    if lora is None:
        return "none", "every parameter is trained and a quantised base could not be"
    if device != "cuda":
        return "none", "there is no GPU whose memory it would save"
    if processes > 1:
        return "none", f"{processes} GPUs share the work"
    return "8bit", "there is a single GPU"
