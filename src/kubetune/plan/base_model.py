"""The model that a run begins from: whether the task can train its kind, and how many positions it has.

From config.json and the headers of the weights, in milliseconds, so that a plan says what training would say only
after minutes of loading. Loading checks the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

from kubetune.base.humanize import nearest
from kubetune.config.schema import LoraConfig, ModelConfig
from kubetune.errors import ConfigError, ModelError
from kubetune.plan.linears import (
    EMBEDDINGS,
    HEADS,
    ROUTER,
    STACKED_AS,
    adapted_stacks,
    has_stacks,
    is_target,
    linears,
    names_of,
    stacks,
    targeted,
    unreached,
)
from kubetune.plan.model_shapes import MOST_LAYERS, ModelFiles, Weights, read_config

# An adapter that vLLM accepts but silently ignores.
UNKNOWN_TO_SERVERS: Final = (
    "grpo.servers: the adapter is on experts that lie in one tensor, which servers are not told; name other modules in "
    "lora.target_modules, or leave the servers out"
)
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
    """Return True if the model looks up so many positions in a table."""
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


def require_targets(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for named targets that no weight belongs to, if the names of weights are certain.

    They are in files as they are in the model, but for experts and for bases that were quantised before.
    """
    _require_whole_modules(lora, weights)
    targets = lora.target_modules
    if "quantization_config" in weights.config or not weights.stated:
        return
    if has_stacks(weights):
        _require_plain_adapters(lora, weights)
        return
    _require_tensors(lora, weights)
    modules = []
    for name, shape in weights.shapes.items():
        if len(shape) > 1 and name.endswith(".weight"):
            modules.append(name.removesuffix(".weight"))
    if isinstance(targets, str):
        # A head that is tied to the embeddings is in no file.
        problem = None
        if _has_names_of_model(weights) and not targeted([*modules, "lm_head"], targets):
            problem = lacks_match(targets, modules)
    else:
        named = [target for target in targets if not _may_be_tied(target)]
        problem = lacks_targets(named, modules)
    if problem is not None:
        raise ConfigError(problem)


def _require_plain_adapters(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for settings that adapters on experts cannot have, if experts of a mixture get some.

    transformers stacks the experts of each of its decoders.
    """
    names = set()
    for stack in adapted_stacks(lora, weights):
        names.add(".".join(stack.name.split(".")[-2:]))
    problem = refused_on_tensors(lora, sorted(names)) if names else None
    if problem is not None:
        raise ConfigError(problem)


def _require_tensors(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for named tensors that the weights lack, and for settings that adapters on them cannot have."""
    if not lora.target_parameters:
        return
    named = []
    for target in lora.target_parameters:
        # A head that is tied is in no file, and a file may leave out how a whole name begins.
        is_in_file = any(f".{target}".endswith(f".{name}") for name in weights.shapes)
        if not is_in_file and not _may_be_tied(target.removesuffix(".weight")):
            named.append(target)
    problem = lacks_tensors(named, {name: len(shape) for name, shape in weights.shapes.items()})
    if problem is None:
        problem = refused_on_tensors(lora, lora.target_parameters)
    if problem is not None:
        raise ConfigError(problem)


def lacks_tensors(targets: Iterable[str], dimensions: Mapping[str, int]) -> str | None:
    """Return the problem of `lora.target_parameters` that are no matrix and no stack of them, None if each is one.

    `dimensions`: how many the tensors of the model have, by their names.
    """
    matrices = [name for name, number in dimensions.items() if number in (2, 3)]
    for target in targets:
        if any(is_target(name, (target,)) for name in matrices):
            continue
        # Either the name is wrong, or it means something that cannot be adapted: a bias, a norm's weight.
        is_vector = any(is_target(name, (target,)) for name in dimensions)
        problem = "is no matrix" if is_vector else "is not in this model"
        ends = sorted({".".join(name.split(".")[-2:]) for name in matrices})
        close = nearest(target, ends)
        advice = f"did you mean {close}?" if close else f"it has {', '.join(ends)}"
        return f"lora.target_parameters: {target} {problem}; {advice}"
    return None


def refused_on_tensors(lora: LoraConfig, parameters: Sequence[str]) -> str | None:
    """Return the problem of settings that adapters on tensors, as PEFT makes them, cannot have; None for none."""
    for setting, value in (("lora.dropout", lora.dropout), ("lora.use_dora", lora.use_dora)):
        if value:
            return (
                f"{setting} is {str(value).lower()}, which adapters on tensors ({', '.join(parameters)}) cannot have; "
                "leave it out, or name modules beside the experts in lora.target_modules, such as [q_proj, k_proj, "
                "v_proj, o_proj]"
            )
    return None


def _require_whole_modules(lora: LoraConfig, weights: Weights) -> None:
    """Raise ConfigError for modules to be trained whole if no weight has their last name."""
    if not weights.stated or "quantization_config" in weights.config:
        return
    # Files and models may write what is before the last name differently. A head may be tied or new, in no file.
    named = []
    for name in lora.modules_to_save:
        last = name.rpartition(".")[2]
        if HEADS.search(last) is None:
            named.append(last)
    modules = set()
    for name in weights.shapes:
        parts = name.split(".")
        for end in range(1, len(parts)):
            modules.add(".".join(parts[:end]))
    problem = lacks_whole_modules(named, modules)
    if problem is not None:
        raise ConfigError(problem)


def lacks_whole_modules(wanted: Iterable[str], modules: Iterable[str]) -> str | None:
    """Return the problem of `lora.modules_to_save` that a model does not have, None if it has each.

    PEFT trains what it finds, and is silent about the others.
    """
    names = [name for name in modules if name]
    lost = [name for name in wanted if not any(module.endswith(name) for module in names)]
    if not lost:
        return None
    last_parts = set()
    for name in names:
        part = name.rpartition(".")[2]
        if not part.isdecimal():
            last_parts.add(part)
    return _no_such_module("lora.modules_to_save", lost, last_parts)


def _no_such_module(key: str, lost: Sequence[str], last_parts: set[str]) -> str:
    """Return the problem of names under a key that are no module's, with the names that a module has."""
    close = nearest(lost[0], sorted(last_parts))
    hint = f"did you mean {close}? It" if close else "it"
    return f"{key}: this model has no module named {', '.join(lost)}; {hint} has {', '.join(sorted(last_parts))}"


def lacks_targets(targets: Sequence[str], modules: Iterable[str]) -> str | None:
    """Return the problem of targets that match no module of a model, None if each matches one.

    PEFT is content if one of a list does. The sentence names modules that can have an adapter.
    """
    names = [name for name in modules if name]
    lost = []
    for target in targets:
        if not any(is_target(name, (target,)) for name in names):
            lost.append(target)
    if not lost:
        return None
    last_parts = set()
    for name in names:
        part = name.rpartition(".")[2]
        if not part.isdecimal() and not _may_be_tied(name):
            last_parts.add(part)
    return _no_such_module("lora.target_modules", lost, last_parts)


def lacks_match(expression: str, modules: Iterable[str]) -> str:
    """Return the problem of an expression that matches no module of a model, with the ends of their names."""
    last_parts = set()
    for module in modules:
        if HEADS.search(module) is None:
            last_parts.add(module.rpartition(".")[2])
    return (
        f"lora.target_modules: no module's whole name matches {expression}; names end in "
        f"{', '.join(sorted(last_parts))}"
    )


def _has_names_of_model(weights: Weights) -> bool:
    """Return True if the names of the weights are, in their files, those that the model has.

    Files may lack the first part, and those of models that see and hear have other parts.
    """
    if "text_config" in weights.config:
        return False
    return all(name.startswith("model.") or HEADS.search(name) for name in weights.shapes)


def may_lack_targets(lora: LoraConfig, weights: Weights) -> bool:
    """Return True if the names of the weights leave open whether LoRA can adapt its target modules.

    Only a built model tells then.
    """
    targets = lora.target_modules
    if has_stacks(weights):
        return _is_open_in_mixture(lora, weights)
    if lora.target_parameters and _has_open_tensors(lora, weights):
        return True
    if targets == "all-linear":
        return False
    modules = []
    for name, shape in weights.shapes.items():
        if len(shape) > 1:
            modules.append(name.removesuffix(".weight"))
    chosen = targeted(modules, targets)
    # A named module that may be tied to another, or that a kernel reads, is allowed or refused by the built model.
    out_of_reach = unreached(weights.text_config.get("model_type"))
    for module in chosen:
        if _may_be_tied(module) or out_of_reach.fullmatch(module):
            return True
    if isinstance(targets, str):
        return not chosen
    return not all(_ends_one_of(modules, target) for target in targets)


def _is_open_in_mixture(lora: LoraConfig, weights: Weights) -> bool:
    """Return True if the names of a mixture's weights leave open whether LoRA can adapt what is named.

    Example, of Qwen3-MoE: [q_proj, v_proj], [gate_proj, up_proj, down_proj] and `mlp.experts.down_proj` are decided. Not
    so [gate_proj], of which one tensor holds the half, a router, a head, or a name that the files lack.
    """
    targets = lora.target_modules
    is_plain = not (lora.dropout or lora.use_dora)
    if "quantization_config" in weights.config or not weights.stated:
        return bool(lora.target_parameters) or targets != "all-linear" or not is_plain
    experts = [name for stack in stacks(weights) for name in names_of(stack)]
    for target in lora.target_parameters:
        if not any(is_target(name, (target,)) for name in experts):
            return True
    if targets == "all-linear":
        return False

    modules = [linear.name for linear in linears(weights, embeddings=True)]
    chosen = targeted([*modules, *experts, "lm_head"], targets)
    out_of_reach = unreached(weights.text_config.get("model_type"))
    for name in chosen.difference(experts):
        if _may_be_tied(name) or ROUTER.search(name) or out_of_reach.fullmatch(name):
            return True
        # PEFT takes some names of other layers for parts of the experts, and these for tensors.
        if not is_plain and name.rpartition(".")[2] in STACKED_AS:
            return True
    if _halves(chosen.intersection(experts)):
        return True
    if isinstance(targets, str):
        return not chosen
    return not all(_ends_one_of(list(chosen), target) for target in targets)


def _halves(names: AbstractSet[str]) -> set[str]:
    """Return the names of experts' layers that share a tensor with another one, which is not among the names."""
    alone = set()
    for name in names:
        parent, _, layer = name.rpartition(".")
        for first, second in (("gate_proj", "up_proj"), ("w1", "w3")):
            other = {first: second, second: first}.get(layer)
            if other is not None and f"{parent}.{other}" not in names:
                alone.add(name)
    return alone


def _has_open_tensors(lora: LoraConfig, weights: Weights) -> bool:
    """Return True if the names of the weights leave open whether each of `lora.target_parameters` can be adapted."""
    if not weights.stated or "quantization_config" in weights.config:
        return True
    out_of_reach = unreached(weights.text_config.get("model_type"))
    modules = [name.removesuffix(".weight") for name in weights.shapes]
    chosen = targeted(modules, lora.target_modules)
    for target in lora.target_parameters:
        hits = [name for name in weights.shapes if is_target(name, (target,))]
        for name in hits:
            module = name.removesuffix(".weight")
            is_kept_by_model = _may_be_tied(module) or out_of_reach.fullmatch(module)
            # A module may get an adapter beside that on its tensor, and a convolution is no matrix.
            if is_kept_by_model or module in chosen or len(weights.shapes[name]) != 2:
                return True
        if not hits:
            return True
    return False


def _ends_one_of(modules: Sequence[str], target: str) -> bool:
    """Return True if a target, such as `q_proj` or `mlp.up_proj`, is the end of a module's name."""
    return any(f".{module}".endswith(f".{target}") for module in modules)


def _may_be_tied(module: str) -> bool:
    """True if a module, by its name, is a head or embeddings, which may be one weight."""
    return HEADS.search(module) is not None or EMBEDDINGS.search(module) is not None
