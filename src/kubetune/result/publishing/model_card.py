"""The README.md of an exported model, in the hub's form: what it is, how it was made, how to load it.

It is written only from facts; nothing here reads a model. Facts that only the owner knows are left to be filled in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base import files
from kubetune.base.humanize import counted, sparkline
from kubetune.base.logs import scrub
from kubetune.config.naming import method_label, model_short_name
from kubetune.config.schema import Config
from kubetune.reporting.picture import draw
from kubetune.result.forms.draft import ExportDraft
from kubetune.result.forms.form import CardModel, Form
from kubetune.result.forms.wanted import base_name
from kubetune.rundir import metrics
from kubetune.rundir.metrics import is_evaluation
from kubetune.tasks import task_of

_TAGS = {"adapter": ["lora"], "merged": [], "model": ["full-fine-tuning"]}

CARD = "README.md"
# The name of the picture beside the card.
CURVES = "curves.svg"
# Metrics of evaluations that have a row of bars, with its title.
_CURVES_OF_EVALUATIONS = {"eval_loss": "evaluation loss", "eval_reward": "held-out reward"}

_POINTS = 60  # of a curve in text

# Settings of `training` that the card shows if they are set.
_SETTINGS = (
    "num_train_epochs", "max_steps", "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "seed",
)  # fmt: skip


def write(draft: ExportDraft, form: Form, facts: Mapping[str, Any]) -> None:
    """Write the card of an export, and the picture of its curves. `facts`: its provenance."""
    # They show what came before the checkpoint; the run may have gone on.
    result = draft.source.result
    step = facts["checkpoint"]["step"]
    lines = [line for line in metrics.read_metrics(result.run_dir) if line["step"] <= step]
    picture = draw(lines)
    if picture is not None:
        files.write_atomic(draft.folder / CURVES, picture)
    verdict = metrics.read_verdict(result.run_dir, step)
    verdict["benchmarks"] = metrics.read_benchmarks(result.run_dir, step).get("compared")
    # Paths of this machine say nothing to others: the base has its name on the hub, if it has one.
    config = result.trained
    model = CardModel(
        base_name(draft.source.model.path),
        draft.source.model.revision,
        config.lora,
        config.task_name,
        sees=config.sees,
        classifies=config.classifies,
    )
    title = facts["run"]["name"] or model_short_name(draft.source.model.path)
    metrics_of_run = _curves(lines, picture is not None) + _against_base(verdict)
    # In the order in which a reader asks: what it is, how to load it, how it was made, whether that holds.
    parts = form.card(facts, model)
    sections = [
        _front_matter(task_of(model.task).pipeline, facts["kind"], model.base),
        f"# {title}\n\n{_summary(facts, model.base, parts.weights)}",
        *parts.usage,
        f"## Training\n\n{_table(_settings(config, facts))}",
        f"## Metrics\n\n{metrics_of_run}",
        f"## Proof of export\n\n{_proof(facts['proof'])}",
        *parts.proof,
        "## Licence\n\nTo be filled in by whoever publishes this model. It has to agree with the licence of the base "
        f"model `{model.base}`{_licence_files(facts['base']['licence_files'])} and of the training data.",
        "Made with kubetune. `provenance.json` holds the whole config, versions, and the checksum of every file.",
    ]
    text = "\n\n".join(sections) + "\n"
    files.write_atomic(draft.folder / CARD, scrub(text))


def _front_matter(pipeline: str, kind: str, base: str) -> str:
    """Return the card's head for the hub, in YAML."""
    # The words of the hub for how a model comes from its base.
    relation = "finetune"
    library = "transformers"
    if kind == "adapter":
        relation = "adapter"
        library = "peft"
    lines = [
        f"library_name: {library}",
        f"pipeline_tag: {pipeline}",
        f"tags: [{', '.join(['kubetune', *_TAGS[kind]])}]",
        "# license: to be filled in",
    ]
    # The hub links the base by these. The name of a folder means nothing there.
    if "/" in base:
        lines = [
            f"base_model: {json.dumps(base)}",
            f"base_model_relation: {relation}",
            *lines,
        ]
    return "\n".join(["---", *lines, "---"])


def _summary(facts: Mapping[str, Any], base: str, weights: str) -> str:
    """Return what the model is, in a few sentences. `weights`: as the form names them."""
    kind = facts["kind"]
    what = {
        "adapter": f"LoRA adapter for `{base}`",
        "merged": f"`{base}` with its LoRA adapter merged into the weights",
        "model": f"`{base}`, fine-tuned in full",
    }[kind]
    text = f"{what}, after step {facts['checkpoint']['step']:,}. Weights are {weights}."
    if facts["base"]["quantization"] != "none" and kind == "merged":
        text += (
            f" The base was quantised ({facts['base']['quantization']}) in training; its weights were dequantised "
            "before merging, so they are those the adapter was trained on and not those of the original model."
        )
    elif facts["base"]["quantization"] != "none":
        text += f" The base was quantised ({facts['base']['quantization']}) in training."

    return text


def _global_batch(checkpoint: Mapping[str, Any]) -> str:
    """Return what a step was trained on: `32 samples`, or `about 65,536 tokens, 32 samples`."""
    samples = counted(checkpoint["global_batch_size"], "sample")
    # Batches that are cut by tokens have about as many samples each.
    tokens = checkpoint.get("global_batch_tokens")
    if not tokens:
        return samples
    return f"about {tokens:,} tokens, {samples}"


def _settings(config: Config, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the model was trained, as the rows of a table."""
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
        if not isinstance(targets, str):
            targets = ", ".join(targets)
        settings["target modules"] = targets
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
    """Return a table of two columns."""
    rows = [f"| {name} | {value} |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _curves(lines: Sequence[Mapping[str, Any]], pictured: bool) -> str:
    """Return the curves as a picture, and as rows of bars for those who read text; then all metrics of the end.

    training loss      2.3100 █▆▅▄▃▂▂▁▁ 1.2040
    """
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    evaluations = [line for line in lines if is_evaluation(line)]
    rows = []
    if losses:
        rows.append(_curve("training loss", losses))
    if evaluations:
        for name, title in _CURVES_OF_EVALUATIONS.items():
            curve = [line[name] for line in evaluations if line.get(name) is not None]
            if curve:
                rows.append(_curve(title, curve))
    if not rows:
        return "No metrics were recorded."

    text = "\n".join(["```", *rows, "```"])
    if pictured:
        text = f"![Curves over steps]({CURVES})\n\n{text}"
    if evaluations:
        last = evaluations[-1]
        values = {}
        for name, value in last.items():
            if name.startswith("eval_") and isinstance(value, int | float):
                values[name] = f"{value:.6g}"
        text += f"\n\nAt step {last['step']:,}:\n\n{_table(values)}"

    return text


def _curve(name: str, values: Sequence[float]) -> str:
    """Return a curve in one line, between its first and its last value."""
    return f"{name:<16}{values[0]:>9.4f} {sparkline(values, _POINTS)} {values[-1]:.4f}"


def _against_base(verdict: Mapping[str, Any]) -> str:
    """Return a table of each metric of the base model and of this one.

    Metrics of answers, and benchmarks with a test, have an interval, rows gained and lost, and p.
    """
    # Losses and metrics by name, then benchmarks, which have a line each with both values.
    base = dict(verdict.get("base") or {})
    best = dict(verdict.get("best") or {})
    tested = {f"eval_{line['metric']}": line for line in verdict.get("answers") or ()}
    benchmarks = verdict.get("benchmarks") or ()
    for line in benchmarks:
        name = line["metric"]
        base[name] = line["before"]
        best[name] = line["after"]
        if "test" in line:
            tested[name] = line

    if not base:
        return ""

    where = "on the evaluation data"
    if benchmarks:
        where += ", and benchmarks of lm-evaluation-harness"
    rows = [
        f"\n\nThe base model against this one, {where}:",
        "",
        "| metric | base | tuned | 95 % | gained | lost | p |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, value in base.items():
        tuned = ""
        if best.get(name) is not None:
            tuned = f"{best[name]:.4g}"
        test = "| | | |"
        if name in tested:
            line = tested[name]
            low, high = line["after_interval"]
            test = f"{low:.3g}–{high:.3g} | {line['gained']} | {line['lost']} | {line['p_value']:.2g} |"
        rows.append(f"| {name} | {value:.4g} | {tuned} | {test}")

    return "\n".join(rows)


def _licence_files(names: Sequence[str]) -> str:
    """Return a remark with links to the licence's files, or "" if there are none."""
    if not names:
        return ""
    links = [f"[{name}](<{name}>)" for name in names]
    return f" (copied from it: {', '.join(links)})"


def _proof(proof: Mapping[str, Any]) -> str:
    """Return a table of the comparisons that prove the export."""
    rows = [
        f"On {proof['rows']} {proof['origin']} ({proof['tokens']:,} tokens), relative:",
        "",
        "| logits of | largest difference | allowed | same first choice |",
        "|---|---|---|---|",
    ]
    for comparison in proof["comparisons"]:
        difference = f"{comparison['difference']:.1e}"
        allowed = f"{comparison['tolerance']:.0e}"
        agreement = f"{comparison['agreement']:.2%}"
        rows.append(f"| {comparison['what']} | {difference} | {allowed} | {agreement} |")

    return "\n".join(rows)
