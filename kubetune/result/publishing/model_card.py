"""The README.md of an exported model, in the hub's form: what it is, how it was made, how to load it.

Written from facts that are given; nothing here reads a model. What nobody but the owner can say is left to fill in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.base.humanize import counted, sparkline
from kubetune.config.naming import method_label, model_short_name
from kubetune.config.schema import Config
from kubetune.result.publishing import serving
from kubetune.tasks import task_of

PIPELINES = {
    "causal_lm": "text-generation",
    "preference": "text-generation",
    "reward_model": "text-classification",
    "sequence_classification": "text-classification",
    "vision_language": "image-text-to-text",
}
_TAGS = {"adapter": ["lora"], "merged": [], "model": ["full-fine-tuning"]}
CURVES = "curves.svg"
"""The name of the picture beside the card."""
_POINTS = 60
_SETTINGS = (
    "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "seed",
)  # fmt: skip


def base_name(path: str) -> str:
    """Return the name of the base: its hub id, also of a folder of the hub's cache; else the folder's name."""
    for part in Path(path).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    if path.count("/") == 1 and not path.startswith((".", "~")):
        return path
    return model_short_name(path)


def write_card(
    config: Config,
    kind: str,
    facts: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    *,
    pictured: bool = False,
    verdict: Mapping[str, Any] | None = None,
) -> str:
    """Return the card of an export. `kind`: adapter, merged or model; `facts`: its provenance; `lines`: metrics up to it.

    `pictured`: their curves lie beside the card as `CURVES`. `verdict`: the run's, of this checkpoint.
    """
    base = base_name(config.model.path)
    name = facts["run"]["name"] or model_short_name(config.model.path)
    snippet = _snippet(
        task_of(config.task_name).auto_class,
        kind,
        base,
        config.model.revision,
        sees=config.sees,
        classifies=config.classifies,
    )
    parts = [
        _front_matter(PIPELINES["vision_language" if config.sees else config.task], kind, base),
        f"# {name}\n\n{_summary(kind, base, facts)}",
        f"## How to load\n\n```python\n{snippet}\n```",
        *serving.commands(config.task_name, config.lora, kind, base, facts["base"]),
        f"## Training\n\n{_table(_settings(config, facts))}",
        f"## Metrics\n\n{_curves(lines, pictured)}{_against_base(verdict or {})}",
        f"## Proof of export\n\n{_proof(facts['proof'])}",
        "## Licence\n\nTo be filled in by whoever publishes this model. It has to agree with the licence of the base "
        f"model `{base}`{_licence_files(facts['base']['licence_files'])} and of the training data.",
        "Made with kubetune. `provenance.json` holds the whole config, versions, and the checksum of every file.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(pipeline: str, kind: str, base: str) -> str:
    lines = [
        f"base_model: {json.dumps(base)}",
        f"base_model_relation: {'adapter' if kind == 'adapter' else 'finetune'}",
        f"library_name: {'peft' if kind == 'adapter' else 'transformers'}",
        f"pipeline_tag: {pipeline}",
        f"tags: [{', '.join(['kubetune', *_TAGS[kind]])}]",
        "# license: to be filled in",
    ]
    if "/" not in base:
        del lines[:2]  # a folder's name means nothing on the hub
    return "\n".join(["---", *lines, "---"])


def _summary(kind: str, base: str, facts: Mapping[str, Any]) -> str:
    what = {
        "adapter": f"LoRA adapter for `{base}`",
        "merged": f"`{base}` with its LoRA adapter merged into the weights",
        "model": f"`{base}`, fine-tuned in full",
    }[kind]
    text = f"{what}, after step {facts['checkpoint']['step']:,}. Weights are {facts['dtype']}."
    if facts["base"]["quantization"] != "none" and kind == "merged":
        text += (
            f" The base was quantised ({facts['base']['quantization']}) in training; its weights were dequantised "
            "before merging, so they are those the adapter was trained on and not those of the original model."
        )
    elif facts["base"]["quantization"] != "none":
        text += f" The base was quantised ({facts['base']['quantization']}) in training."
    return text


def _snippet(
    auto: str, kind: str, base: str, revision: str | None, *, sees: bool, classifies: bool
) -> str:
    """Return the Python code that loads an export. `auto`: transformers' class; `revision`: of the base."""
    reader = "AutoProcessor" if sees else "AutoTokenizer"
    name = "processor" if sees else "tokenizer"
    here = '"THIS_REPOSITORY_OR_FOLDER"'
    if kind != "adapter":
        return (
            f"from transformers import {auto}, {reader}\n\n"
            f"model = {auto}.from_pretrained({here})\n{name} = {reader}.from_pretrained({here})"
        )
    arguments = json.dumps(base)
    if revision:
        arguments += f", revision={json.dumps(revision)}"
    lines = ["from peft import PeftModel", f"from transformers import {auto}, {reader}", ""]
    if classifies:
        # The base knows nothing of the labels: the export's config.json does.
        lines[1] = f"from transformers import AutoConfig, {auto}, {reader}"
        lines.append(f"config = AutoConfig.from_pretrained({here})")
        arguments += ", config=config, ignore_mismatched_sizes=True"
    lines += [
        f"base = {auto}.from_pretrained({arguments})",
        f"model = PeftModel.from_pretrained(base, {here})",
        f"{name} = {reader}.from_pretrained({here})",
    ]
    return "\n".join(lines)


def _global_batch(checkpoint: Mapping[str, Any]) -> str:
    samples = counted(checkpoint["global_batch_size"], "sample")
    tokens = checkpoint.get("global_batch_tokens")
    if not tokens:
        return samples
    return f"about {tokens:,} tokens, {samples}"


def _settings(config: Config, facts: Mapping[str, Any]) -> dict[str, Any]:
    training = config.training
    lora = config.lora
    settings: dict[str, Any] = {
        "task": config.task,
        "method": method_label(config.lora),
        "learning rate": f"{config.learning_rate:g}",
        "global batch": _global_batch(facts["checkpoint"]),
        "longest sequence": f"{config.data.max_length:,} tokens",
        "tokens seen": f"{facts['checkpoint']['tokens']:,}",
        "data fingerprint": f"`{facts['checkpoint']['data_fingerprint'][:16]}`",
    }
    if lora is not None:
        targets = lora.target_modules
        settings["target modules"] = targets if isinstance(targets, str) else ", ".join(targets)
        if lora.modules_to_save:
            settings["modules trained whole"] = ", ".join(lora.modules_to_save)
        if lora.use_dora:
            settings["DoRA"] = "yes"
        if lora.use_rslora:
            settings["rsLoRA"] = "yes"
    if config.sees:
        settings["image tokens"] = (
            f"at most {config.vision.image_max_tokens:,}, as the image processor here makes them"
        )
    for name in _SETTINGS:
        value = getattr(training, name)
        if value is not None:
            settings[name] = value
    if training.max_steps is not None:
        del settings["num_train_epochs"]  # not what it ended by
    return settings


def _table(values: Mapping[str, Any]) -> str:
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())]
    )


def _curves(lines: Sequence[Mapping[str, Any]], pictured: bool) -> str:
    """Curves as a picture, and as rows of bars for those who read text; the last value of everything measured."""
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    evaluations = [line for line in lines if "eval_loss" in line]
    curves = [
        ("training loss", losses),
        ("evaluation loss", [line["eval_loss"] for line in evaluations]),
    ]
    drawn = [
        f"{name:<16}{values[0]:>9.4f} {sparkline(values, _POINTS)} {values[-1]:.4f}"
        for name, values in curves
        if values
    ]
    picture = f"![Curves over steps]({CURVES})\n\n" if pictured else ""
    text = f"{picture}```\n" + "\n".join(drawn) + "\n```" if drawn else "No metrics were recorded."
    if evaluations:
        last = {name: value for name, value in evaluations[-1].items() if name.startswith("eval_")}
        text += f"\n\nAt step {evaluations[-1]['step']:,}:\n\n"
        text += _table(
            {name: f"{value:.6g}" for name, value in last.items() if isinstance(value, int | float)}
        )
    return text


def _against_base(verdict: Mapping[str, Any]) -> str:
    """Each metric of the base model and of this one, with the interval and the test of those of answers."""
    base, best = dict(verdict.get("base") or {}), dict(verdict.get("best") or {})
    benchmarks = verdict.get("benchmarks") or ()
    if not base and not benchmarks:
        return ""
    measured = {f"eval_{line['metric']}": line for line in verdict.get("answers") or ()}
    for line in benchmarks:
        name = line["metric"]
        base[name], best[name] = line["before"], line["after"]
        measured |= {name: line} if "test" in line else {}
    rows = ["| metric | base | tuned | 95 % | gained | lost | p |", "|---|---|---|---|---|---|---|"]
    for name, value in base.items():
        line, tuned = measured.get(name), best.get(name)
        sure = "| | | |"
        if line is not None:
            low, high = line["after_interval"]
            sure = f"{low:.3g}–{high:.3g} | {line['gained']} | {line['lost']} | {line['p_value']:.2g} |"
        rows.append(f"| {name} | {value:.4g} | {'' if tuned is None else f'{tuned:.4g}'} | {sure}")
    where = ", and benchmarks of lm-evaluation-harness" if benchmarks else ""
    return f"\n\nThe base model against this one, on the evaluation data{where}:\n\n" + "\n".join(
        rows
    )


def _licence_files(names: Sequence[str]) -> str:
    return (
        f" (copied from it: {', '.join(f'[{name}](<{name}>)' for name in names)})" if names else ""
    )


def _proof(proof: Mapping[str, Any]) -> str:
    rows = [
        f"| {c['what']} | {c['difference']:.1e} | {c['tolerance']:.0e} | {c['agreement']:.2%} |"
        for c in proof["comparisons"]
    ]
    head = ["| logits of | largest difference | allowed | same first choice |", "|---|---|---|---|"]
    return "\n".join(
        [
            f"On {proof['rows']} {proof['origin']} ({proof['tokens']:,} tokens), relative:",
            "",
            *head,
            *rows,
        ]
    )
