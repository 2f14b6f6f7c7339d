"""LLaMA-Factory's configs: flat YAML or JSON; data sets are names in a `dataset_info.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.data.reading.messages import SPEAKERS
from kubetune.plugins.importers.common.image_keys import pixels, say_it_sees, sees
from kubetune.plugins.importers.common.schedule_keys import assume_warm_up, warm_up
from kubetune.plugins.importers.common.source_keys import read_source, share, take_sources, tidy
from kubetune.plugins.importers.common.target_keys import modules
from kubetune.plugins.importers.common.training_keys import (
    FP8,
    FSDP,
    FUSED,
    LORA,
    NO_EFFECT,
    TRAINING,
    bits,
    method,
    packing,
    template,
)
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Table,
    Tool,
    ToolCommand,
    as_names,
    carried,
    near,
    switch,
    unneeded,
)
from kubetune.plugins.importers.foreign import file_above, read_settings

# Our columns for theirs, and our shape of records for each `formatting`.
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_FORMATS = {"alpaca": "alpaca", "openai": "messages", "sharegpt": "sharegpt"}
_TAGS = ("role", "content", "from", "value", *SPEAKERS)


def _data(draft: Draft) -> None:
    """Take the names of data sets, which `dataset_info.json` explains, and how many rows of each count."""
    directory = str(draft.get("dataset_dir") or "data")
    limit = draft.get("max_samples")
    if limit == 0:
        draft.refuse("max_samples", "0 leaves no records to train on")
    folder, entries = _read_info(draft, directory)

    def source(draft: Draft, place: str, name: Any) -> list[Any]:
        key = f"{place.partition('[')[0]}: {name}"
        if name in entries:
            return [_source(draft, key, folder, entries[name])]
        why = (
            f"a name of LLaMA-Factory's own, which no {directory}/dataset_info.json beside this file or above it "
            "explains; put the file or hub id in its place"
        )
        draft.drop(key, why)
        path = f"{name}#{limit}" if limit else str(name)
        return [tidy({"path": path, "format": "text" if draft.get("stage") == "pt" else None})]

    take_sources(draft, {"dataset": "data.train", "eval_dataset": "data.eval"}, source)
    if limit is not None and draft.has("data.train"):
        why = f"#{limit} after each source: drawn by the seed, not the first"
        draft.note("approximated", "max_samples", why)
        draft.comments["data.train"] = (
            f"max_samples: LLaMA-Factory takes the first {limit} of each, kubetune draws them"
        )


def _read_info(draft: Draft, directory: str) -> tuple[Path, dict[str, Any]]:
    """Return what dataset_info.json says, and its folder. It is beside the config or above it, in the repository."""
    path = Path(draft.path)
    file = file_above(path, f"{directory}/dataset_info.json")
    if file is None:
        return path, {}
    return file.parent, read_settings(file)[0]


def _source(draft: Draft, place: str, folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the source for an entry of dataset_info.json, whose files lie in `folder`."""
    section = draft.section(place, entry)
    path = section.take("hf_hub_url") or place.partition(": ")[2]
    file = section.take("file_name")
    if file is not None:
        path = (folder / file).absolute()
    elif section.get("hf_hub_url") is None:
        why = "has neither file_name nor hf_hub_url; put the file or hub id in its place"
        draft.drop(place, why)
    # The entry has its own number of rows, and the run a limit for all.
    limits = [n for n in (section.take("num_samples"), draft.get("max_samples")) if n]
    section.settings["path"] = f"{path}#{min(limits)}" if limits else str(path)

    columns = section.take("columns") or {}
    if draft.get("stage") == "pt":
        _text(section, columns)
    else:
        _records(section, columns)
    if section.take("ranking") and not _compares(draft):
        section.drop("ranking", "holds preferences, which supervised fine-tuning does not use")
    if columns.get("images"):
        say_it_sees(draft, place)
    for tag, word in (section.take("tags") or {}).items():
        if word not in _TAGS:
            why = f"{word}: turns need the names in use (docs/data.md); rename in the data"
            draft.drop(f"{place}.tags.{tag}", why)
    return read_source(draft, section, _ENTRY)


def _records(section: Draft, columns: dict[str, str]) -> None:
    """Take the columns of an entry, and the shape of its records."""
    for theirs, column in columns.items():
        section.settings[f"columns.{_COLUMNS.get(theirs, theirs)}"] = column
    formatting = section.take("formatting") or "alpaca"
    shape = _FORMATS.get(formatting)
    # `sharegpt` is a name for any list of turns; its tags say how a turn is written.
    if shape == "sharegpt":
        turns = section.settings.pop("columns.messages", "conversations")
        if (section.get("tags") or {}).get("role_tag") == "role":
            shape = "messages"
        wanted = "messages" if shape == "messages" else "conversations"
        section.settings[f"columns.{wanted}"] = turns
    if shape is None:
        why = f"{formatting}: the shape of records is recognised from the data"
        section.drop("formatting", why)
    section.settings["format"] = shape


def _text(section: Draft, columns: dict[str, str]) -> None:
    """Take the column of plain texts, which `stage: pt` trains as they are."""
    section.settings["format"] = "text"
    if section.take("formatting") not in (None, "alpaca"):
        section.drop("formatting", "stage: pt trains the first turn; write it as `text`")
        return
    if columns.get("query"):
        section.drop("columns.query", "stage: pt joins it to the text; join them in the data")
    section.settings["columns.text"] = columns.get("prompt", "instruction")


def _compares(draft: Draft) -> bool:
    """True if answers are compared or judged."""
    return draft.ours("task") in ("preference", "reward_model")


def _packs(draft: Draft) -> bool:
    """True if one of the keys says that rows are packed, which pairs are not."""
    packs = draft.get("neat_packing") or draft.get("packing")
    return bool(packs) and not _compares(draft)


def _neat_packing(value: Any, draft: Draft) -> Outcome:
    """Take `neat_packing`, which packs whatever `packing` says."""
    if value or draft.get("packing") is None:
        return packing(value, draft)
    return unneeded("sequences of a packed row never see each other")


def _length(value: Any, draft: Draft) -> Outcome:
    """Take the longest row, which has one token less where rows are packed."""
    if not _packs(draft):
        return carried(value)
    text = f"data.max_length: {value - 1}, since LLaMA-Factory's packing takes a token"
    return carried(value - 1, text)


def _finish(draft: Draft) -> None:
    """Write down the defaults that depend on other keys, most of them on `stage: pt`."""
    assume_warm_up(draft)
    if draft.get("finetuning_type") is None:
        draft.assume("lora", None)
    if _packs(draft):
        draft.assume("data.max_length", 2047, "2048, less a token that packing takes")
    if draft.get("stage") != "pt":
        why = "LLaMA-Factory cuts prompt and answer of too long a row in proportion, kubetune the end of the row"
        draft.assume("data.overlong", "truncate", why)
        return
    draft.assume("data.train_on", "all", "stage: pt trains on everything")
    if draft.ours("data.packing") is False:
        why = "stage: pt cuts long texts where it does not pack"
        draft.assume("data.overlong", "truncate", why)
        return
    draft.assume("data.overlong", "split")
    if not draft.has("data.packing"):
        draft.assume("data.packing", True, "stage: pt packs")
        why = "stage: pt counts packed rows, not samples"
        draft.assume("training.global_batch_tokens", "packed", why)


def _stage(value: Any, draft: Draft) -> Outcome:
    """Take supervised fine-tuning, of models that see too, or training on plain texts."""
    if value != "sft":
        return near("causal_lm", "every token of a text is trained; a text stays in one packed row")
    if draft.ours("task") == "vision_language":
        return unneeded("supervised fine-tuning; the task follows from the keys of images")
    return carried("causal_lm")


# Keys of a data set in dataset_info.json; `_source` reads the others.
_ENTRY = Table(
    unneeded={"ms_hub_url om_hub_url": "data come from the file, or from Hugging Face's hub"}
)

TOOL = Tool(
    name="LLaMA-Factory",
    marks="stage finetuning_type cutoff_len template dataset_dir lora_target val_size pref_loss "
    "preprocessing_num_workers quantization_bit neat_packing model_name_or_path",
    command=ToolCommand(r"\bllamafactory-cli\s+(\w+)", "llamafactory-cli train", assigns=True),
    sources=_data,
    finish=_finish,
    defaults={
        "data.max_length": 2048,
        "data.packing": False,
        "training.num_train_epochs": 3.0,
        "training.save_steps": 500,
        "training.per_device_train_batch_size": 8,
        "training.learning_rate": 5e-5,
        "training.lr_scheduler_type": "linear",
    },
    defaults_of={
        "lora": {"lora.r": 8, "lora.target_modules": "all-linear"},
        "simpo": {"preference.beta": 0.1, "preference.gamma": 0.5, "preference.sft_weight": 0.0},
    },
    tables=(TRAINING, LORA, FP8, FSDP, Table(
        same={
            "model.path": "model_name_or_path",
            "model.revision": "model_revision",
            "data.num_proc": "preprocessing_num_workers",
            "lora.r": "lora_rank",
            "lora.dropout": "lora_dropout",
            "training.early_stopping_patience": "early_stopping_steps",
        },
        rows=[
            method("finetuning_type"),
            *warm_up(),
            Row("stage", "task", other=_stage),
            Row("cutoff_len", "data.max_length", other=_length),
            Row("neat_packing", "data.packing", other=_neat_packing),
            Row("packing", "data.packing", other=packing, unless="neat_packing"),
            Row("val_size", "data.eval", other=share),
            Row("train_on_prompt", "data.train_on", {True: "all"}, carried("assistant")),
            # Adapters, bits of the base and kinds of numbers.
            Row("lora_target", "lora.target_modules", other=modules("all")),
            Row("lora_alpha", "lora.alpha", {0: unneeded("twice the rank, as here without it")}),
            Row("additional_target", "lora.modules_to_save", other=as_names),
            *bits("quantization_bit", "quantization_type", 4),
            switch("pure_bf16", "model.dtype", "bfloat16"),
            switch("disable_gradient_checkpointing", "training.gradient_checkpointing", False),
            # Prompts, images and sources.
            Row("template", "model.chat_template", other=template),
            Row("image_max_pixels", "vision.image_max_tokens", other=pixels),
            Row("image_min_pixels", "vision.image_min_tokens", other=pixels),
            Row("freeze_vision_tower", "vision.freeze_vision_tower", other=sees),
            Row("freeze_multi_modal_projector", "vision.freeze_projector", other=sees),
        ],
        dropped={
            "mix_strategy": ("sources are concatenated; give each a `weight` instead", "concat"),
            "mask_history": ("all answers of a conversation are trained, not only the last", False),
            "enable_thinking": "thoughts are trained as the data hold them: none is added, and none taken out",
            "tokenized_path": "data are prepared from their sources, and kept by fingerprint",
            "upcast_layernorm": ("norms compute as the model's code says", False),
            "shift_attn": ("kubetune has no attention of LongLoRA", False),
            "media_dir": "has no counterpart; see docs/vision.md",
        },
        unneeded={
            "dataset_dir": "only says where dataset_info.json lies",
            "double_quantization": "kubetune's choice, and no matter of quality",
            "fp8_backend fp8_enable_fsdp_float8_all_gather": "kubetune's choice",
            "use_unsloth enable_liger_kernel": FUSED,
            "cache_dir": "a folder of the machine: set HF_HOME where the run is started",
            "use_reentrant_gc print_param_status low_cpu_mem_usage use_fast_tokenizer buffer_size": NO_EFFECT,
        },
    )),
)  # fmt: skip
