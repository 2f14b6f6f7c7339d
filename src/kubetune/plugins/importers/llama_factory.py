"""LLaMA-Factory's configs: flat YAML or JSON; data sets are names in a `dataset_info.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kubetune.data.reading.messages import SPEAKERS
from kubetune.plugins.importers import sources
from kubetune.plugins.importers.common import (
    FP8,
    FUSED,
    LORA,
    NO_EFFECT,
    TRAINING,
    bits_of,
    four_bits,
    method,
    packing,
    pin_fsdp,
    pixels,
    refuse_both,
    say_it_sees,
    sees,
    share,
)
from kubetune.plugins.importers.engine import (
    Draft,
    Outcome,
    Row,
    Tool,
    aliased,
    as_list,
    carried,
    drop,
    ignore,
    names,
    near,
    switch,
    unneeded,
)
from kubetune.plugins.importers.foreign import read_settings
from kubetune.plugins.importers.preferences import is_preferred
from kubetune.plugins.importers.prompts import template
from kubetune.plugins.importers.targets import modules
from kubetune.plugins.importers.warm_up import OF_TRANSFORMERS

_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_TAGS = ("role", "content", "from", "value", *SPEAKERS)


def _method(draft: Draft) -> None:
    """Take LoRA or every parameter."""
    key = "finetuning_type"
    method(draft, key, draft.take(key), "lora_", "use_dora", "use_rslora")


def _data(draft: Draft) -> None:
    """Take the names of data sets, which `dataset_info.json` explains, and how many rows of each count."""
    directory = str(draft.take("dataset_dir") or "data")
    draft.ignore("dataset_dir", "only says where dataset_info.json lies")
    number = draft.take("max_samples")
    if number == 0:
        draft.refuse("max_samples", "0 leaves no records to train on")
    folder, entries = _read_info(draft, directory)
    for key, path in (("dataset", "data.train"), ("eval_dataset", "data.eval")):
        listed = draft.take(key)
        if listed is None:
            continue
        collected = []
        for name in as_list(listed):
            entry = entries.get(name)
            collected.append(_source(draft, f"{key}: {name}", name, folder, entry, number))
        draft.carry(key, path, collected)
    if number is not None and draft.has("data.train"):
        why = f"#{number} behind each source: drawn by the seed, not the first"
        draft.note("approximated", "max_samples", why)
        comment = f"max_samples: the first {number} of each there, drawn here"
        draft.comments["data.train"] = comment


def _read_info(draft: Draft, directory: str) -> tuple[Path, dict[str, Any]]:
    """Return what dataset_info.json says, and its folder. It is beside the config or above it, in the repository."""
    folder = Path(draft.path).absolute().parent
    for start in (folder, *folder.parents, Path.cwd()):
        file = start / directory / "dataset_info.json"
        if file.is_file():
            return file.parent, read_settings(file)[0]
    return folder, {}


def _source(
    draft: Draft,
    place: str,
    name: str,
    folder: Path,
    entry: dict[str, Any] | None,
    limit: int | None,
) -> dict[str, Any]:
    """Return the source for a name of a data set. `limit`: how many of its rows count at most."""
    is_text = draft.get("stage") == "pt"
    if entry is None:
        info = f"{draft.get('dataset_dir') or 'data'}/dataset_info.json"
        why = (
            f"a name of LLaMA-Factory's own, which no {info} beside this file or above it explains"
        )
        draft.drop(place, f"{why}; put the file or hub id in its place")
        source = {"path": f"{name}#{limit}" if limit else str(name)}
        return source | {"format": "text"} if is_text else source
    section = draft.section(place, entry)
    path = section.take("hf_hub_url")
    file = section.take("file_name")
    if file is not None:
        path = (folder / file).absolute()
    elif path is None:
        path = name
        why = "has neither file_name nor hf_hub_url; put the file or hub id in its place"
        draft.drop(place, why)
    # The entry has its own number of rows, and the run a limit for all.
    number = section.take("num_samples") or limit
    if number:
        path = f"{path}#{min(number, limit or number)}"
    section.carry("file_name", "path", str(path))
    if is_text:
        _text(section)
    else:
        _records(section)
    if section.take("ranking") and not is_preferred(draft):
        section.drop("ranking", "holds preferences, which supervised fine-tuning does not use")
    if section.ours("columns", {}).get("images"):
        say_it_sees(draft, place)
    source = sources.finished(draft, section, _ENTRY)
    for tag, word in (section.get("tags") or {}).items():
        if word not in _TAGS:
            why = f"{word}: turns need the names in use (docs/data.md); rename in the data"
            draft.drop(f"{place}.tags.{tag}", why)
    return source


def _records(section: Draft) -> None:
    """Take the columns of an entry, and the shape of its records."""
    columns = {}
    for ours, theirs in (section.take("columns") or {}).items():
        columns[_COLUMNS.get(ours, ours)] = theirs
    # `sharegpt` is a name for any list of turns; its tags say how a turn is written.
    formatting = section.take("formatting") or "alpaca"
    tags = section.take("tags") or {}
    if formatting == "sharegpt" and tags.get("role_tag") == "role":
        section.carry("formatting", "format", "messages")
        columns.setdefault("messages", "conversations")
    elif formatting == "sharegpt":
        section.carry("formatting", "format", "sharegpt")
        columns["conversations"] = columns.pop("messages", "conversations")
    elif formatting == "alpaca":
        section.carry("formatting", "format", "alpaca")
    elif formatting == "openai":
        section.carry("formatting", "format", "messages")
    else:
        section.drop(
            "formatting", f"{formatting}: the shape of records is recognised from the data"
        )
    section.carry("columns", "columns", columns)


def _text(section: Draft) -> None:
    """Take the column of plain texts, which `stage: pt` trains as they stand."""
    section.carry("formatting", "format", "text")
    section.take("tags")
    columns = section.take("columns") or {}
    if (section.take("formatting") or "alpaca") != "alpaca":
        section.drop("formatting", "stage: pt trains the first turn; write it as `text`")
        return
    if columns.get("query"):
        section.drop("columns.query", "stage: pt joins it to the text; join them in the data")
    section.carry("columns", "columns", {"text": str(columns.get("prompt", "instruction"))})


def _packing(draft: Draft) -> None:
    """Take both keys of packing: either packs, and then a row holds one token less than `cutoff_len`."""
    if is_preferred(draft):
        return
    neat = draft.take("neat_packing")
    plain = draft.take("packing")
    if neat or (neat is not None and plain is None):
        draft.write("neat_packing", packing(neat, draft), "data.packing")
    else:
        draft.ignore("neat_packing", "sequences of a packed row never see each other")
    if neat:
        draft.ignore("packing", "neat_packing packs")
    elif plain is not None:
        draft.write("packing", packing(plain, draft), "data.packing")
    if not (neat or plain):
        return
    length = draft.take("cutoff_len")
    if length is None:
        draft.assume("data.max_length", 2047, "2048, less a token that packing takes there")
    else:
        shorter = int(length) - 1
        text = f"data.max_length: {shorter}, since packing takes a token there"
        draft.carry("cutoff_len", "data.max_length", shorter, text)


def _finish(draft: Draft) -> None:
    """Write down what `stage: pt` does where the file does not say otherwise."""
    if draft.get("stage") != "pt":
        why = "prompt and answer of too long a row are cut in proportion there, the end of the row here"
        draft.assume("data.overlong", "truncate", why)
        return
    draft.assume("data.train_on", "all", "stage: pt trains on everything")
    if draft.ours("data.packing") is False:
        draft.assume(
            "data.overlong", "truncate", "stage: pt cuts long texts where it does not pack"
        )
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


_NO_WEIGHT = "give each source a `weight`: how often it appears in an epoch"

_REFUSED_TOGETHER = (
    ("mask_history", "train_on_prompt"),
    ("max_samples", "streaming"),
)

# Keys of a data set in dataset_info.json; `_source` reads the others.
_ENTRY = [
    *sources.SUBSET_AND_SPLIT,
    ignore("ms_hub_url om_hub_url", "data come from the file, or from Hugging Face's hub"),
]

TOOL = Tool(
    name="LLaMA-Factory",
    marks="stage finetuning_type cutoff_len template dataset_dir lora_target val_size pref_loss "
    "preprocessing_num_workers quantization_bit neat_packing model_name_or_path",
    command=r"\bllamafactory-cli\s+(\w+)",
    together=(
        _method,
        _data,
        lambda draft: pin_fsdp(draft, "fsdp fsdp_config"),
        lambda draft: refuse_both(draft, *_REFUSED_TOGETHER),
        OF_TRANSFORMERS.read,
        _packing,
    ),
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
    lora_defaults={"lora.r": 8, "lora.target_modules": "all-linear"},
    rows=[
        # Names that other tools have too; rows below replace those of TRAINING.
        *TRAINING,
        *aliased(
            "model_name_or_path model_revision cutoff_len preprocessing_num_workers lora_rank lora_dropout "
            "early_stopping_steps"
        ),
        # The task, and data.
        Row("stage", "task", _stage),
        Row("val_size", "data.eval", share),
        Row("train_on_prompt", "data.train_on", values={True: "all", False: "assistant"}),
        # Adapters, bits of the base and kinds of numbers.
        modules("lora_target", "all"),
        Row("lora_alpha", "lora.alpha", same={0: "twice the rank, as here without it"}),
        names("additional_target", "lora.modules_to_save"),
        *LORA,
        bits_of("quantization_bit", "quantization_type"),
        four_bits("quantization_type", "quantization_bit", 4),
        switch("pure_bf16", "model.dtype", "bfloat16"),
        *FP8,
        switch("disable_gradient_checkpointing", "training.gradient_checkpointing", False),
        # Prompts and images.
        template("template", "chatml"),
        Row("image_max_pixels", "vision.image_max_tokens", pixels),
        Row("image_min_pixels", "vision.image_min_tokens", pixels),
        Row("freeze_vision_tower", "vision.freeze_vision_tower", sees),
        Row("freeze_multi_modal_projector", "vision.freeze_projector", sees),
        # Values that are ours anyway; any other is dropped.
        Row("mix_strategy", same={"concat": "as here"},
            reason="sources are concatenated; give each a `weight` instead"),
        Row("quantization_method", same=dict.fromkeys(("bnb", "bitsandbytes", "BNB"), "bitsandbytes, as here"),
            reason="the base is quantised by bitsandbytes"),
        # Not done here; a value behind the reason is that which switches it off there.
        drop("interleave_probs", _NO_WEIGHT),
        drop("mask_history", "all answers of a conversation are trained, not only the last", False),
        drop("default_system", "put a system message into the data; the model then sees it at inference too"),
        drop("enable_thinking", "thoughts are trained as the data hold them: none is added, and none taken out"),
        drop("tokenized_path", "data are prepared from their sources, and kept by fingerprint"),
        drop("upcast_layernorm", "norms compute as the model's code says", False),
        drop("shift_attn", "LongLoRA's attention is not there", False),
        drop("loraplus_lr_ratio", "one learning rate for all of an adapter"),
        drop("pissa_init", "adapters begin at zero", False),
        drop("ray_num_workers", "several nodes: see compute.nodes and `kubetune submit`", 1),
        drop("freeze_language_model", "the language model always learns, through adapters or whole", False),
        drop("media_dir", "has no counterpart; see docs/vision.md"),
        drop("video_max_pixels video_fps video_maxlen", "videos are not there; images are"),
        # Not needed.
        ignore("double_quantization", "kubetune's choice, and no matter of quality"),
        ignore("fp8_backend fp8_enable_fsdp_float8_all_gather", "kubetune's choice"),
        ignore("use_unsloth enable_liger_kernel", FUSED),
        ignore("cache_dir", "a folder of the machine: set HF_HOME where the run is started"),
        ignore("use_reentrant_gc print_param_status low_cpu_mem_usage use_fast_tokenizer buffer_size", NO_EFFECT),
    ],
)  # fmt: skip
