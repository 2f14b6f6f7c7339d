"""LLaMA-Factory's configs: flat YAML or JSON; data sets are names in a `dataset_info.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.data.reading.messages import SPEAKERS
from kubetune.plugins.importers import common
from kubetune.plugins.importers.draft import (
    Draft,
    Note,
    Rule,
    as_flag,
    as_list,
    choice,
    dropped,
    each,
    flag,
    only,
    unneeded,
)
from kubetune.plugins.importers.foreign import read_foreign
from kubetune.plugins.importers.preferences import is_preferred
from kubetune.plugins.importers.prompts import template
from kubetune.plugins.importers.targets import modules
from kubetune.plugins.importers.warm_up import OF_TRANSFORMERS, warm_up

NAME = "LLaMA-Factory"
MARKS = ("stage", "finetuning_type", "cutoff_len", "template", "dataset_dir", "lora_target", "val_size", "pref_loss",
         "preprocessing_num_workers", "quantization_bit", "neat_packing", "model_name_or_path")  # fmt: skip

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
_ENTRY = "file_name hf_hub_url columns formatting tags subset split ranking num_samples ms_hub_url om_hub_url".split()
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}


def convert(draft: Draft, folder: Path) -> None:
    """Fill in the draft. `folder`: where the config lies, from which its data are looked for."""
    key = "finetuning_type"
    common.method(draft, key, draft.take(key), "lora_", "use_dora", "use_rslora")
    _data(draft, folder)
    common.pin_fsdp(draft, "fsdp", "fsdp_config")
    warm_up(draft, OF_TRANSFORMERS)
    _packing(draft)
    draft.apply(RULES)
    stage_text = draft.given.get("stage") == "pt"
    if stage_text and not draft.has("data.train_on"):
        draft.assume("data.train_on", "all", "stage: pt trains on everything")
    if stage_text:
        draft.assume("data.overlong", "split")
    else:
        why = "prompt and answer of too long a row are cut in proportion there, the end of the row here"
        draft.assume("data.overlong", "truncate", why)
    if stage_text and not draft.has("data.packing"):
        draft.assume("data.packing", True, "stage: pt packs")
        draft.assume(
            "training.global_batch_tokens", "packed", "stage: pt counts packed rows, not samples"
        )
    common.defaults(draft, _DEFAULTS, {"lora.r": 8, "lora.target_modules": "all-linear"})


_DEFAULTS: dict[str, Any] = {
    "data.max_length": 2048, "data.packing": False, "training.num_train_epochs": 3.0, "training.save_steps": 500,
    "training.per_device_train_batch_size": 8, "training.learning_rate": 5e-5, "training.lr_scheduler_type": "linear",
}  # fmt: skip


def _data(draft: Draft, folder: Path) -> None:
    directory = Path(str(draft.take("dataset_dir") or "data"))
    if "dataset_dir" in draft.given:
        draft.unneeded("dataset_dir", "only says where dataset_info.json lies")
    if (number := draft.take("max_samples")) == 0:
        draft.refuse("max_samples", "0 leaves no records to train on")
    registry = _registry(folder, directory)
    for key, path in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        given = draft.take(key)
        if given is not None:
            sources = [_source(draft, key, name, registry, number) for name in as_list(given)]
            draft.carry(key, path, sources)
    if number is not None and draft.has("data.train"):
        why = f"#{number} behind each source: drawn by the seed, not the first"
        draft.notes.append(
            Note("approximated", "max_samples", number, why, draft.lines.get("max_samples", 0))
        )
        draft.comments[("data", "train")] = (
            f"max_samples: the first {number} of each there, drawn here"
        )


def _registry(folder: Path, directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """dataset_info.json, looked for beside the config and above it, as their command is called from the repository."""
    for start in (folder, *folder.absolute().parents, Path.cwd()):
        file = start / directory / "dataset_info.json"
        if file.is_file():
            return file.parent, dict(read_foreign(file).settings)
    return None


def _source(
    draft: Draft, key: str, name: str, registry: tuple[Path, dict[str, Any]] | None, number: Any
) -> Any:
    entry = registry[1].get(name) if registry else None
    if entry is None:
        why = "is not in dataset_info.json" if registry else "dataset_info.json was not found"
        draft.drop(
            f"{key}: {name}",
            f"a name of LLaMA-Factory's own, and {why}; put the file or hub id in its place",
        )
        unknown = {"path": f"{name}#{number}" if number else name}
        return unknown | ({"format": "text"} if draft.given.get("stage") == "pt" else {})
    number = min((count for count in (number, entry.get("num_samples")) if count), default=None)
    sample, place = f"#{number}" if number else "", f"{key}: {name}"
    draft.drop_rest(place, entry, _ENTRY)
    for tag, said in (entry.get("tags") or {}).items():
        if said not in (*SPEAKERS, "role", "content", "from", "value"):
            draft.drop(
                f"{place}.tags.{tag}",
                f"{said}: turns need the names in use (docs/data.md); rename in the data",
            )
    source: dict[str, Any] = {}
    is_text = draft.given.get("stage") == "pt"
    if "file_name" in entry and registry:
        source["path"] = str((registry[0] / entry["file_name"]).absolute()) + sample
    elif entry.get("hf_hub_url"):
        source["path"] = str(entry["hf_hub_url"]) + sample
    else:
        draft.drop(
            f"{key}: {name}",
            "has neither file_name nor hf_hub_url; put the file or hub id in its place",
        )
        source["path"] = f"{name}{sample}"
    columns = {
        _COLUMNS.get(ours, ours): theirs for ours, theirs in (entry.get("columns") or {}).items()
    }
    form = entry.get("formatting", "alpaca")
    if is_text:
        source["format"] = "text"
        columns = _text_column(draft, place, entry)
    elif form == "sharegpt":
        tags = entry.get("tags") or {}
        source["format"] = "messages" if tags.get("role_tag") == "role" else "sharegpt"
        listed = columns.pop("messages", "conversations")
        wanted = "messages" if source["format"] == "messages" else "conversations"
        columns = ({wanted: listed} if listed != wanted else {}) | columns
    elif form in _FORMATS:
        source["format"] = _FORMATS[form]
    if columns.get("images"):
        common.say_it_sees(draft, f"{key}: {name}")
    columns = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    if columns:
        source["columns"] = columns
    if entry.get("subset"):
        source["subset"] = entry["subset"]
    if entry.get("split", "train") != "train":
        source["split"] = entry["split"]
    if entry.get("ranking") and not is_preferred(draft):
        draft.drop(f"{key}: {name}", "holds preferences, which supervised fine-tuning does not use")
    return source


def _text_column(draft: Draft, place: str, entry: dict[str, Any]) -> dict[str, str]:
    """Return the column of plain texts, which `stage: pt` trains as they stand."""
    columns = entry.get("columns") or {}
    if entry.get("formatting", "alpaca") != "alpaca":
        draft.drop(f"{place}.formatting", "stage: pt trains the first turn; write it as `text`")
        return {}
    if columns.get("query"):
        draft.drop(
            f"{place}.columns.query", "stage: pt joins it to the text; join them in the data"
        )
    return {"text": str(columns.get("prompt", "instruction"))}


def _packing(draft: Draft) -> None:
    """Take both keys of packing: either packs, and then a row holds one token less than `cutoff_len`."""
    if is_preferred(draft):
        return
    neat = as_flag(draft.take("neat_packing"))
    packing = as_flag(draft.take("packing"))
    if neat is not None and (neat or packing is None):
        common.packing(draft, "neat_packing", neat)
    elif neat is not None:
        draft.unneeded("neat_packing", "sequences of a packed row never see each other")
    if packing is not None and neat:
        draft.unneeded("packing", "neat_packing packs")
    elif packing is not None:
        common.packing(draft, "packing", packing)
    if not (neat or packing):
        return
    length = draft.take("cutoff_len")
    if length is None:
        draft.assume("data.max_length", 2047, "2048, less a token that packing takes there")
    else:
        shorter = int(length) - 1
        text = f"data.max_length: {shorter}, since packing takes a token there"
        draft.carry("cutoff_len", "data.max_length", shorter, text)


def _stage(draft: Draft, key: str, value: Any) -> None:
    if value == "pt":
        draft.approximate(
            key, "task", "causal_lm", "every token of a text is trained; texts are packed whole"
        )
    else:
        draft.carry(key, "task", "causal_lm", "supervised fine-tuning")


RULES: dict[str, Rule] = {
    **common.TRAINING,
    **common.plain(
        "model_name_or_path model_revision cutoff_len preprocessing_num_workers lora_rank lora_alpha "
        "lora_dropout use_rslora use_dora fp8 early_stopping_steps"
    ),
    "stage": _stage,
    "val_size": common.share,
    "train_on_prompt": choice("data.train_on", {True: "all", False: "assistant"}),
    "mask_history": dropped("all answers of a conversation are trained, not only the last", False),
    "interleave_probs": dropped("give each source a `weight`: how often it appears in an epoch"),
    "mix_strategy": only(
        ["concat"], "as here", "sources are concatenated; give each a `weight` instead"
    ),
    "lora_target": modules("all"),
    "additional_target": common.names("lora.modules_to_save"),
    "quantization_bit": choice(
        "quantization", {4: "4bit", 8: "8bit"}, None, "4 and 8 bits are there"
    ),
    "quantization_type": common.four_bits("quantization_bit", 4),
    "quantization_method": only(
        ["bnb", "bitsandbytes", "BNB"],
        "bitsandbytes, as here",
        "the base is quantised by bitsandbytes",
    ),
    "double_quantization": unneeded("kubetune's choice, and no matter of quality"),
    "pure_bf16": flag("model.dtype", "bfloat16"),
    "template": template(("chatml",)),
    "default_system": dropped(
        "put a system message into the data; the model then sees it at inference too"
    ),
    "enable_thinking": only(
        (), "", "thoughts are trained as the data hold them: none is added, and none taken out"
    ),
    "tokenized_path": dropped("data are prepared from their sources, and kept by fingerprint"),
    "upcast_layernorm": dropped("norms compute as the model's code says", False),
    "cache_dir": unneeded("a folder of the machine: set HF_HOME where the run is started"),
    "disable_gradient_checkpointing": flag("training.gradient_checkpointing", False),
    **each("fp8_backend fp8_enable_fsdp_float8_all_gather", unneeded("kubetune's choice")),
    **each(
        "use_unsloth enable_liger_kernel",
        unneeded("fused kernels are used where they are proved equal"),
    ),
    "shift_attn": dropped("LongLoRA's attention is not there", False),
    "loraplus_lr_ratio": dropped("one learning rate for all of an adapter"),
    "pissa_init": dropped("adapters begin at zero", False),
    "ray_num_workers": dropped("several nodes: see compute.nodes and `kubetune submit`", 1),
    "image_max_pixels": common.pixels("vision.image_max_tokens"),
    "image_min_pixels": common.pixels("vision.image_min_tokens"),
    "freeze_vision_tower": common.sees("vision.freeze_vision_tower"),
    "freeze_multi_modal_projector": common.sees("vision.freeze_projector"),
    "freeze_language_model": dropped(
        "the language model always learns, through adapters or whole", False
    ),
    "media_dir": dropped("has no counterpart; see docs/vision.md"),
    **each("video_max_pixels video_fps video_maxlen", dropped("videos are not there; images are")),
    **each(
        "use_reentrant_gc print_param_status low_cpu_mem_usage use_fast_tokenizer buffer_size",
        unneeded("has no counterpart, and no effect on the result"),
    ),
}
