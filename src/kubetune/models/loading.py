"""Load a model from the hub, the cache or a folder, with an error for each way it can fail.

Weights are read from safetensors only, and code that comes with a model runs only when the config says so.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.config import consent
from kubetune.config.schema import ModelConfig
from kubetune.data.prepared.rows import count_holding
from kubetune.data.reading.hub import (
    check_model_folder,
    find_files,
    hub_token,
    is_local,
)
from kubetune.data.text.tokenizer_files import read_json
from kubetune.models import patches, quantization, weight_files
from kubetune.models.adapters.on_base import require_plain_adapter, with_adapter
from kubetune.models.load_faults import explained_model
from kubetune.models.mixtures.stacked_experts import swap_experts
from kubetune.models.sharded_base.reading import Reader
from kubetune.plan import model_shapes
from kubetune.plan.base_model import (
    FETCH_AGAIN,
    Embeddings,
    other_shapes,
    require_plain_config,
    require_whole_groups,
)
from kubetune.plan.linears import UNQUANTISED, is_expert

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.models.model_spec import ModelSpec

# Warnings about functions that transformers and PEFT have renamed. A user of ours can change nothing about it.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft)\.")

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """Return what `model.dtype` is on a device: auto is bf16 or fp16 on a GPU, fp32 on a CPU."""
    if wanted != "auto":
        return DTYPES[wanted]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def load_pretrained(
    auto_class: Any,
    spec: ModelSpec,
    device: torch.device,
    *,
    draw: Callable[[nn.Module, set[str]], None] = lambda model, names: None,
    code_from: ModelConfig | None = None,
    require_finite: weight_files.RequireFinite = weight_files.require_finite,
    **settings: Any,
) -> nn.Module:
    """Return `auto_class.from_pretrained` of a model, on `device`, in its dtype, quantised if asked.

    `code_from`: the model of the hub that has the code of a checkpoint, with its pin. `draw` gets the names of
    weights that the checkpoint lacks, and may draw them again. `require_finite`: the function in weight_files, or
    one in which ranks agree.
    `settings` go to `from_pretrained`.

    Raise ModelError if the model is missing, gated, of another architecture, not in safetensors, or if its weights are
    not finite or have other shapes than its config.json asks for; only the head of a classifier may have.
    """
    # The contents of the files are checked before transformers reads them.
    model = spec.model
    check_model_folder(model)
    facts = _read_plain(model)
    settings |= _pinned_code(model, code_from)

    arithmetic = choose_dtype(model.dtype, device)
    quantised = quantization.settings(spec.quantization, spec.lora, arithmetic)
    settings |= _settings_of_codes(quantised, facts, device)
    # Told to ignore them, transformers hands over which shapes differ, instead of pointing to a table that it prints.
    settings = {"dtype": arithmetic, **settings, "ignore_mismatched_sizes": True}
    reader = _reader_of(spec)
    loaded, differences = _read(auto_class, model, reader, settings)

    classifies = "num_labels" in settings
    # Only the head of a classifier may have other shapes than the file: it is drawn again.
    prefix = f"{loaded.base_model_prefix}." if classifies else ""
    _require_shapes(model, differences["mismatched_keys"], prefix)
    _require_layers(model, loaded, differences["missing_keys"])
    draw(loaded, _log_new_weights(differences, is_expected=classifies))

    placed = _placed(loaded, device, quantised is not None)
    if quantised is not None:
        logs.MODEL.info("%s", quantization.describe(spec.quantization, arithmetic, device))
    if reader is None:
        require_finite(f"model {model.path}", placed.named_parameters())
    else:
        reader.cut(placed)
    return placed


def _reader_of(spec: ModelSpec) -> Reader | None:
    """Return what cuts a model while it is read; None for one that each rank has whole."""
    if spec.cut_over is None:
        return None
    ranks = spec.cut_over.size
    copy_size = min(spec.copy_size or ranks, ranks)
    return Reader(spec.cut_over, copy_size, spec.lora.modules_to_save if spec.lora else ())


def _read(
    auto_class: Any, model: ModelConfig, reader: Reader | None, settings: Mapping[str, Any]
) -> tuple[Any, Mapping[str, Any]]:
    """Return a model and how its files differ from it, as `from_pretrained` does."""
    transformers_logging.disable_progress_bar()
    reading = nullcontext() if reader is None else reader.reading()
    with explained_model(model), patches.without_load_report(), reading:
        result: tuple[Any, Mapping[str, Any]] = auto_class.from_pretrained(
            model.path,
            revision=model.revision,
            local_files_only=model.local_files_only,
            token=hub_token(),
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **settings,
        )
        return result


def _settings_of_codes(
    quantised: Any, facts: Mapping[str, Any], device: torch.device
) -> dict[str, Any]:
    """Return settings for weights that are to be quantised, else for files that were quantised before."""
    if quantised is None:
        return quantization.settings_of_files(facts)
    return {"quantization_config": quantised, "device_map": {"": str(device)}}


def _placed(loaded: Any, device: torch.device, is_quantised: bool) -> nn.Module:
    """Return a model on its device, with no file left mapped that would be in memory a second time."""
    experts = [parameter for name, parameter in loaded.named_parameters() if is_expert(name)]
    if is_quantised or experts:
        others = [weight for name, weight in loaded.named_parameters() if not is_expert(name)]
        # Stacks of experts come last. By then files with separate experts are unmapped: never both in memory.
        let_go_of_files([*others, *experts])
    # Also of files that were quantised before.
    quantization.keep_layout(loaded)
    if not is_quantised:
        return loaded.to(device)  # type: ignore[no-any-return]
    _warn_of_experts(experts)
    return loaded  # type: ignore[no-any-return]


def _warn_of_experts(experts: Iterable[nn.Parameter]) -> None:
    # bitsandbytes quantises linear layers, and experts are stacks of matrices.
    unquantised = sum(expert.numel() for expert in experts if expert.is_floating_point())
    if unquantised:
        logs.MODEL.warning(
            "%s parameters of experts keep their dtype: %s", f"{unquantised:,}", UNQUANTISED
        )


def let_go_of_files(parameters: Iterable[nn.Parameter]) -> None:
    """Copy weights that are still a mapped file on a CPU. While one of them is, all of the file stays mapped."""
    for parameter in parameters:
        is_here = parameter.device.type == "cpu" and parameter.untyped_storage().nbytes() > 0
        if is_here and parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def load_trained(
    auto_class: Any,
    spec: ModelSpec,
    folder: Path,
    device: torch.device,
    **settings: Any,
) -> nn.Module:
    """Return the model of a checkpoint folder: the base with its adapters, or the weights that were trained whole.

    `settings` go to `from_pretrained`.
    """
    model = spec.model
    if spec.lora is None:
        pin = None
        if model.trust_remote_code:
            pin = consent.folder_digest(folder)
            if not is_local(model.path):
                settings["code_from"] = model

        # The folder is loaded like any model, by its own path.
        trained = model.model_copy(update={"path": str(folder), "revision": pin})
        return load_pretrained(
            auto_class,
            replace(spec, model=trained),
            device,
            # A run saves all that it trained: nothing of a checkpoint may be drawn at random.
            draw=lambda loaded, missing: weight_files.require_same_names(folder, list(missing), []),
            **settings,
        )

    require_plain_adapter(folder)
    base: Any = load_pretrained(auto_class, spec, device, **settings)
    adapted = with_adapter(base, folder)
    swap_experts(adapted)
    return adapted


def _read_plain(model: ModelConfig) -> Mapping[str, Any]:
    """Return a config.json. Raise ModelError for one, or an index, with which code or weights would come from elsewhere."""
    files = find_files(model, model.path, ("config.json", model_shapes.INDEX))
    if "config.json" not in files:
        return {}  # transformers says what is missing
    model_shapes.files_of(files["config.json"].parent)
    facts: dict[str, Any] = read_json(files["config.json"])
    require_plain_config(model.path, facts)
    return facts


def _pinned_code(model: ModelConfig, code_from: ModelConfig | None) -> dict[str, str | None]:
    """Return the settings that pin a model's code; none if the code lies next to the weights.

    Raise ModelError for code of another repository than `code_from`.
    """
    if not model.trust_remote_code:
        return {}
    config = find_files(model, model.path, ["config.json"]).get("config.json")
    auto_map = read_json(config).get("auto_map")
    classes = auto_map.values() if isinstance(auto_map, dict) else ()
    for value in classes:
        # "owner/name--modeling_x.Model" names a class in another repository.
        is_elsewhere = "--" in str(value)
        is_known = code_from is not None and str(value).startswith(f"{code_from.path}--")
        if is_elsewhere and not is_known:
            raise errors.ModelError(
                f"model {model.path}: its config.json has auto_map: {value!r}, code of another repository, which "
                "model.revision does not pin; copy that code beside config.json. Nothing was run."
            )

    return {} if code_from is None else {"code_revision": code_from.revision}


def _require_shapes(
    model: ModelConfig,
    mismatched: Iterable[tuple[str, Any, Any]],
    prefix: str,
) -> None:
    """Raise ModelError if weights with names that begin with `prefix` have other shapes than the model.

    `mismatched` has the name, the shape in the file and the shape in the model of each weight for which these differ.
    """
    wrong = sorted(weight for weight in mismatched if weight[0].startswith(prefix))
    if wrong:
        raise other_shapes(model.path, wrong)


def _require_layers(model: ModelConfig, loaded: nn.Module, missing: Iterable[str]) -> None:
    """Raise ModelError if the checkpoint lacks weights of a layer: drawn at random, they would make any answer noise."""
    lacking = sorted(name for name in missing if model_shapes.layer_of(name))
    if not lacking:
        return
    new = set(lacking)
    layers = {model_shapes.layer_of(name) for name in lacking}
    layers -= {
        model_shapes.layer_of(name) for name, _ in loaded.named_parameters() if name not in new
    }
    what = f"{counted(len(lacking), 'weight')} of its layers"
    shown = lacking
    if layers:
        what = counted(len(layers), "layer")
        shown = sorted(layers)
    raise errors.ModelError(
        f"model {model.path}: its weights lack {what} that config.json asks for: {', '.join(shown[:5])}. "
        f"{FETCH_AGAIN}"
    )


def _log_new_weights(differences: Mapping[str, Any], *, is_expected: bool) -> set[str]:
    """Log the weights that the checkpoint lacks or has in another shape: a head, or a mistake. Return their names."""
    names = set(differences["missing_keys"])
    names.update(name for name, *_ in differences["mismatched_keys"])

    # A new head is what a classifier asks for; anywhere else it is mostly a mistake.
    if names:
        level = logging.INFO if is_expected else logging.WARNING
        logs.MODEL.log(
            level, "not in the checkpoint, so new and drawn at random: %s", ", ".join(sorted(names))
        )

    return names


def check_rows(
    auto_class: Any,
    model: ModelConfig,
    data: Prepared,
) -> None:
    """Raise ConfigError for rows that the model has no place for, or impossible heads, before its weights are read.

    `auto_class` is transformers' class for the task. A model that brings its own code is not checked here, only by
    `check_positions` once it is loaded.
    """
    if model.trust_remote_code:
        return
    facts = config_of(model)
    text = facts.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    require_whole_groups(model.path, heads, getattr(text, "num_key_value_heads", None))

    vocabulary = getattr(facts.get_text_config(), "vocab_size", None)
    if vocabulary:
        _require_known_ids(vocabulary, model, data)

    if _stated_positions(facts) < data.longest:
        # Whether its positions are a table that ends there only its modules tell. A model that cannot be built without
        # weights is checked once it is loaded.
        with suppress(RuntimeError, ValueError, TypeError, AttributeError), torch.device("meta"):
            built = auto_class.from_config(facts, trust_remote_code=False)
            check_positions(built, data.longest, warn=False)


def config_of(model: ModelConfig) -> Any:
    """Return the config of a model as transformers reads it, without code of its own. Raise ModelError."""
    with explained_model(model):
        return AutoConfig.from_pretrained(
            model.path,
            revision=model.revision,
            local_files_only=model.local_files_only,
            token=hub_token(),
            trust_remote_code=False,
        )


def _require_known_ids(
    vocabulary: int,
    model: ModelConfig,
    data: Prepared,
) -> None:
    """Raise ConfigError if the tokenizer has ids that the model has no embedding for, and rows have such."""
    for rows in (data.train, data.eval, data.forget):
        if not rows or rows.largest_id < vocabulary:
            continue
        # The largest id shows which token it is, mostly an added one.
        token = data.tokenizer.decode([rows.largest_id], skip_special_tokens=False)
        holding = f"{count_holding(rows, vocabulary):,} of {counted(len(rows), 'row')}"
        embeddings = Embeddings(vocabulary, model.path, model.tokenizer)
        problem = embeddings.say(rows.largest_id, token, holding)
        raise errors.ConfigError(f"{problem}. Nothing was trained")


def _stated_positions(facts: Any) -> float:
    """Return how many positions a config says that its model has."""
    config = facts.get_text_config()
    for name in ("n_positions", "max_position_embeddings"):
        positions: float | None = getattr(config, name, None)
        if positions:
            return positions
    return math.inf


def skeleton(auto_class: Any, model: ModelConfig) -> nn.Module:
    """Return a model that is on this machine without its weights: its modules, on no device."""
    with explained_model(model), torch.device("meta"):
        config = AutoConfig.from_pretrained(
            model.path,
            revision=model.revision,
            local_files_only=True,
            trust_remote_code=False,
        )
        built: nn.Module = auto_class.from_config(config, trust_remote_code=False)
        return built


def check_positions(
    lm: Any,
    longest: int,
    *,
    warn: bool = True,
) -> None:
    """Raise ConfigError if a sequence of `longest` tokens has no place in a learned table of positions.

    Rotary models compute any position; beyond what they were trained on they only get a warning.

        family     max_position_embeddings    rows of the table    positions for tokens
        GPT-2      1,024                      1,024                1,024
        OPT        2,048                      2,050                2,048
        RoBERTa    514                        514                  512: they begin after the padding, at 2
    """
    stated = _stated_positions(lm.config)
    token_table = lm.get_input_embeddings()
    is_learned = False
    skipped = 0  # the first positions, which no token gets
    for module in lm.modules():
        if not isinstance(module, nn.Embedding) or module is token_table:
            continue
        # A table of as many rows as there are positions; OPT's has two more.
        if stated <= module.num_embeddings <= stated + 2:
            is_learned = True
            if module.padding_idx is not None:
                skipped = max(skipped, module.padding_idx + 1)

    limit = stated - skipped
    if longest <= limit:
        return

    problem = f"the model has {limit:,} positions, the longest row {longest:,} tokens"
    if is_learned:
        raise errors.ConfigError(
            f"{problem}; set data.max_length to {limit} or less (`overlong` says what happens then)"
        )
    if warn:
        logs.MODEL.warning(
            "your longest row has %s tokens; the model was trained on at most %s positions",
            f"{longest:,}",
            f"{limit:,}",
        )
