"""The model that a run begins from: whether the task can train its kind, and how many positions it has.

From config.json and the headers of the weights, in milliseconds, so that a plan says what training would say only
after minutes of loading. What these do not tell is left to loading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.plan.linears import EMBEDDINGS, HEADS, is_target, stacks, unreached
from kubetune.plan.model_shapes import Weights, read_config, read_weights

_ENCODERS = ("ForMaskedLM", "ForPreTraining")
_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings)\.weight$")
_LEARNED = ("gpt2", "gpt_neo", "gpt_bigcode", "openai-gpt", "opt", "biogpt")
"""Decoders that look positions up in a table that ends, by their model_type."""


@dataclass(frozen=True)
class Positions:
    """`limit`: how many a model has; `is_table`: whether they are looked up in a table, so that none come after."""

    limit: int
    is_table: bool

    def say(self, longest: int) -> str:
        """Warning of a row of so many tokens, more than there are positions, and of what becomes of it."""
        said = f"the model has {self.limit:,} positions, the longest row {longest:,} tokens"
        if self.is_table:
            return f"{said}; set data.max_length to {self.limit} or less (`overlong` says what happens then)"
        return f"{said}: beyond them it was never trained"

    def require(self, longest: int) -> None:
        """Raise ConfigError for a row of so many tokens that is beyond the end of a table."""
        if self.is_table and longest > self.limit:
            raise ConfigError(self.say(longest))


def require_kind(config: Config, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where a model that is on this machine is of a kind that the task cannot train."""
    found = read_config(config.model.path, environ)
    if found is None or config.task != "causal_lm":
        return
    kind, classes = found.get("model_type"), found.get("architectures") or []
    if found.get("is_encoder_decoder"):
        what = "an encoder-decoder"
    elif (
        classes
        and all(str(name).endswith(_ENCODERS) for name in classes)
        and not found.get("is_decoder")
    ):
        what = "an encoder, for task: sequence_classification"
    else:
        return
    raise ConfigError(
        f"model {config.model.path} is {what} ({kind}); task: causal_lm trains decoders, which write one token after "
        "another, such as Llama, Qwen, Gemma or GPT-2: choose one of these"
    )


def positions_of(config: Config, environ: Mapping[str, str]) -> Positions | None:
    """The positions of a model that is on this machine; None where they are not told, or rows are cut to them."""
    found = read_config(config.model.path, environ)
    if found is None or config.task == "sequence_classification":
        return None
    text = found.get("text_config") or found
    limit = text.get("n_positions") or text.get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        return None
    weights = read_weights(config.model.path, environ)
    tables = (
        [shape[0] for name, shape in weights.shapes.items() if _POSITIONS.search(name)]
        if weights
        else []
    )
    # OPT's table is two longer than it says.
    return Positions(
        limit,
        text.get("model_type") in _LEARNED or any(limit <= rows <= limit + 2 for rows in tables),
    )


@dataclass(frozen=True)
class Embeddings:
    """Number of a model's embeddings, by its config.json; `model` and `tokenizer` as the run names them."""

    known: int
    model: str
    tokenizer: str | None

    def say(self, id: int, token: str, holding: str) -> str:
        """Complaint about a token of an id that is not `known`, which `holding` rows have, or a later one."""
        given = (
            f"model.tokenizer is {self.tokenizer}"
            if self.tokenizer
            else "the tokenizer is the model's own"
        )
        return (
            f"model {self.model} has embeddings for {self.known:,} tokens, but {holding} hold ids beyond them, up to "
            f"{id:,} ({token!r}); {given}. Give a tokenizer whose tokens the model knows, or a model whose embeddings "
            "were made longer for these"
        )


def embeddings_of(config: Config, environ: Mapping[str, str]) -> Embeddings | None:
    """The embeddings of a model that is on this machine; None where it brings its own code, or does not tell."""
    found = read_config(config.model.path, environ)
    if found is None or config.model.trust_remote_code:
        return None
    known = (found.get("text_config") or found).get("vocab_size")
    return (
        Embeddings(known, config.model.path, config.model.tokenizer)
        if isinstance(known, int) and known
        else None
    )


def may_lack_targets(config: Config, weights: Weights) -> bool:
    """LoRA's target modules may not be in the model, or may not be adapted; only building it tells for sure."""
    lora = config.lora
    if lora is None:
        return False
    targets, has_experts = lora.target_modules, any(True for _ in stacks(weights))
    if lora.target_parameters or (
        has_experts and (lora.dropout or lora.use_dora or targets != "all-linear")
    ):
        return True
    if targets == "all-linear":
        return False
    out_of_reach = unreached(weights.text_config.get("model_type"))
    modules = [
        name.removesuffix(".weight") for name, shape in weights.shapes.items() if len(shape) > 1
    ]
    if any(
        is_target(module, targets) and (_may_be_tied(module) or out_of_reach.fullmatch(module))
        for module in modules
    ):
        return True
    if isinstance(targets, str):
        return not any(re.fullmatch(targets, module) for module in modules)
    return any(
        not any(f".{module}".endswith(f".{target}") for module in modules) for target in targets
    )


def _may_be_tied(module: str) -> bool:
    """True if a module, by its name, is a head or embeddings, which may be one weight."""
    return HEADS.search(module) is not None or EMBEDDINGS.search(module) is not None
