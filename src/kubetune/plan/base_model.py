"""The model that a run begins from: whether the task can train its kind, and how many positions it has.

From config.json and the headers of the weights, in milliseconds, so that a plan says what training would say only
after minutes of loading. Loading checks the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubetune.config.schema import LoraConfig, ModelConfig
from kubetune.errors import ConfigError, ModelError
from kubetune.plan.model_shapes import MOST_LAYERS, ModelFiles, Weights, read_config

_ENCODERS = ("ForMaskedLM", "ForPreTraining")
_POSITIONS = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings)\.weight$")
# Decoders that look positions up in a table that ends, by their model_type.
_LEARNED = ("gpt2", "gpt_neo", "gpt_bigcode", "openai-gpt", "opt", "biogpt")


# What to do about weights and a config.json that do not belong together.
FETCH_AGAIN: Final = "Fetch both from the same place again, or fix config.json"


def needs_code(model_path: str) -> ModelError:
    """Return the error for a model that comes with code of its own, which nobody has allowed."""
    return ModelError(
        f"model {model_path} needs code from its repository: set model.trust_remote_code and pin model.revision to a "
        "commit you have read"
    )


def other_shapes(model_path: str, wrong: Sequence[tuple[str, Any, Any]]) -> ModelError:
    """Return the error for weights that do not fit config.json. `wrong`: names, shapes in the file and expected ones."""
    parts = [
        f"{name} is {list(stored)}, expected {list(wanted)}" for name, stored, wanted in wrong[:5]
    ]
    shown = "; ".join(parts)
    more = f"; and {len(wrong) - 5:,} more" if len(wrong) > 5 else ""
    return ModelError(
        f"model {model_path}: its weights have other shapes than its config.json asks for: {shown}{more}. {FETCH_AGAIN}"
    )


@dataclass(frozen=True)
class Positions:
    """The positions that a model can give to tokens."""

    limit: int  # positions that it was trained with
    is_table: bool  # they are looked up in a table, so that there are none beyond

    def say(self, longest: int) -> str:
        """Return the warning about a longest row that has more tokens than there are positions."""
        text = f"the model has {self.limit:,} positions, the longest row {longest:,} tokens"
        if self.is_table:
            return f"{text}; set data.max_length to {self.limit} or less (`overlong` says what happens then)"
        return f"your longest row has {longest:,} tokens; the model was trained on at most {self.limit:,} positions"

    def require(self, longest: int) -> None:
        """Raise ConfigError if a row of so many tokens passes the end of a table."""
        if self.is_table and longest > self.limit:
            raise ConfigError(self.say(longest))


def require_kind(task: str, model: ModelFiles) -> None:
    """Raise ConfigError if the task cannot train this kind of model, as far as the model is on this machine."""
    facts = model.config
    if facts is None or task != "causal_lm":
        return
    if facts.get("is_encoder_decoder"):
        what = "an encoder-decoder"
    elif _is_encoder(facts):
        what = "an encoder, for task: sequence_classification"
    else:
        return
    kind = facts.get("model_type")
    raise ConfigError(
        f"model {model.path} is {what} ({kind}); task: causal_lm trains decoders, which write one token after "
        "another, such as Llama, Qwen, Gemma or GPT-2: choose one of these"
    )


def _is_encoder(facts: Mapping[str, Any]) -> bool:
    """True if config.json names only classes of encoders, such as BertForMaskedLM."""
    classes = facts.get("architectures") or []
    if not classes or facts.get("is_decoder"):
        return False
    return all(str(name).endswith(_ENCODERS) for name in classes)


def positions_of(task: str, model: ModelFiles) -> Positions | None:
    """Return the positions of a model that is on this machine.

    Return None if config.json does not name them, or if rows are cut to them.
    """
    facts = model.config
    if facts is None or task == "sequence_classification":
        return None
    # A model that sees has the sizes of its language model in a section of their own. GPT-2 says n_positions.
    text = facts.get("text_config") or facts
    limit = text.get("n_positions") or text.get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        return None
    if text.get("model_type") in _LEARNED:
        return Positions(limit, is_table=True)
    weights = model.weights
    return Positions(limit, is_table=weights is not None and _has_table(weights, limit))


def _has_table(weights: Weights, positions: int) -> bool:
    """True if the model looks up so many positions in a table."""
    for name, shape in weights.shapes.items():
        # OPT's table is two longer than its config.json says.
        if _POSITIONS.search(name) and positions <= shape[0] <= positions + 2:
            return True
    return False


@dataclass(frozen=True)
class Embeddings:
    """The tokens that a model has embeddings for."""

    known: int  # ids below this one have an embedding, by config.json
    model: str  # model.path of the run
    tokenizer: str | None  # model.tokenizer of the run

    def say(self, id: int, token: str, holding: str) -> str:
        """Return the message about ids without an embedding. `holding`: the rows that hold them, in words."""
        source = "the tokenizer is the model's own"
        if self.tokenizer:
            source = f"model.tokenizer is {self.tokenizer}"
        return (
            f"model {self.model} has embeddings for {self.known:,} tokens, but {holding} hold ids beyond them, up to "
            f"{id:,} ({token!r}); {source}. Give a tokenizer whose tokens the model knows, or a model whose embeddings "
            "were made longer for these"
        )


def embeddings_of(model: ModelConfig, environ: Mapping[str, str]) -> Embeddings | None:
    """Return the embeddings of a model that is on this machine.

    Return None if the model brings its own code, or if config.json does not say how many there are.
    """
    facts = read_config(model.path, environ)
    if facts is None or model.trust_remote_code:
        return None
    known = (facts.get("text_config") or facts).get("vocab_size")
    if not isinstance(known, int) or not known:
        return None
    return Embeddings(known, model.path, model.tokenizer)


def require_plain_config(model_path: str, facts: Mapping[str, Any]) -> None:
    """Raise ModelError for a config.json with which code or weights would come from anywhere else, or fill the memory."""
    # Each layer is built before its weights are looked for.
    layers = facts.get("num_hidden_layers")
    if isinstance(layers, int) and not 0 < layers <= MOST_LAYERS:
        raise ModelError(
            f"model {model_path}: its config.json has num_hidden_layers: {layers}; expected 1 to {MOST_LAYERS}; put the "
            "file back as it was published. Nothing was loaded."
        )

    # A path would lead out of the model's folder.
    weights_file = facts.get("transformers_weights")
    if weights_file is not None and "/" in str(weights_file).replace("\\", "/"):
        raise ModelError(
            f"model {model_path}: its config.json has transformers_weights: {weights_file!r}; expected the name of a file "
            "beside it. Nothing was loaded."
        )

    for key, value in _implementations(facts):
        # transformers takes `owner/name` for a kernel of the hub, and runs it.
        if not value.replace("_", "").isalnum():
            raise ModelError(
                f"model {model_path}: its config.json has {key}: {value!r}, code from elsewhere; take that key out of it, "
                "and choose with model.attention. Nothing was loaded."
            )


def _implementations(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield key and value of every setting, at any depth of a config.json, that names how something is computed.

    For example {"attn_implementation": {"text_config": "sdpa"}, "layers": {"_attn_implementation": "eager"}} both
    "sdpa" and "eager".
    """
    for key, value in facts.items():
        chooses = key.removesuffix("_internal").endswith("_implementation")
        if isinstance(value, dict):
            if chooses:
                for name in value.values():
                    if isinstance(name, str):
                        yield key, name
            yield from _implementations(value)
        elif isinstance(value, str) and value and chooses:
            yield key, value


def require_fitting_codes(
    quantization: str, lora: LoraConfig | None, model_path: str, weights: Weights
) -> None:
    """Raise ConfigError for files that were quantised before, if they are to be quantised otherwise or to learn."""
    codes = weights.config.get("quantization_config")
    if not isinstance(codes, dict):
        return
    method = codes.get("quant_method")
    if weights.quantization is not None and lora is None:
        raise ConfigError(
            f"model {model_path}: its files are codes of {method}, which cannot learn; add a `lora` section, or take the "
            "model that was not quantised"
        )
    if weights.quantization is None and quantization not in ("none", "auto"):
        raise ConfigError(
            f"quantization: found {quantization}, but the files of model {model_path} are quantised already ({method}); "
            "leave it out, or take the model that was not quantised"
        )


def require_whole_groups(model_path: str, heads: object, shared: object) -> None:
    """Raise ConfigError unless each head of keys and values is shared by as many heads of queries as the others.

    `heads` and `shared`: their numbers by config.json, which may say anything.
    """
    if not isinstance(heads, int) or not isinstance(shared, int) or heads <= 0:
        return
    if shared < 1 or heads % shared:
        raise ConfigError(
            f"model {model_path}: config.json has num_attention_heads {heads} and num_key_value_heads {shared}; expected "
            "the first to be a multiple of the second. Take the config.json that belongs to the weights. Nothing was "
            "trained"
        )
