"""`kubetune plan`: what a run comes to, before anything is held. Reads data but no weights, and writes nothing."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator
from datetime import datetime

from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import counted
from kubetune.cli.prepare import plan_forecast
from kubetune.cli.tables import print_fact, print_table
from kubetune.config.load import dotted_values, read_tree, resolved
from kubetune.config.naming import default_output
from kubetune.config.schema import Config
from kubetune.config.schema.training import TrainingConfig
from kubetune.data.inspect.estimate import Lengths, estimate_lengths, estimate_rows, is_upper_bound, makes_data
from kubetune.planning import measured
from kubetune.planning.base_model import may_lack_targets, positions_of, require_kind
from kubetune.planning.forecast import quantization_of
from kubetune.planning.linears import shape_of
from kubetune.planning.model_shapes import read_weights
from kubetune.planning.plan import Plan, make_plan
from kubetune.scoring.own_functions import require_file
from kubetune.supervisor.command_line import add_run_arguments, config_from_args, sources_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--origins", action="store_true", help="print every setting and where it comes from instead")


def run(args: argparse.Namespace) -> int:
    """Print the plan of a run. Raises ConfigError for an impossible one, DataError for data that are nowhere."""
    show_notes()
    config = config_from_args(args, os.environ)
    if args.origins:
        return _show_origins(args, config)
    require_kind(config, os.environ)
    if config.evaluation.metrics is not None:
        require_file(config.evaluation.metrics)
    rows, eval_rows = estimate_rows(config)
    lengths = estimate_lengths(config, os.environ)
    positions = positions_of(config, os.environ)
    if positions is not None and lengths is not None:
        positions.require(lengths.longest)
    _require_targets(config)
    tokens = lengths.tokens(rows) if lengths is not None else None
    spared = lengths.spared if lengths is not None else 0.0
    plan = make_plan(config, rows, eval_rows, visible_gpus(os.environ), tokens=tokens, spared_share=spared)
    config, chosen = _as_measured(config, plan, tokens)
    longest = lengths.longest_of(rows) if lengths is not None else None
    ahead = plan_forecast.look_ahead(config, plan, tokens, os.environ, longest)
    if args.json:
        at_most = is_upper_bound(config, config.data.train)
        facts = {"measured": chosen, "rows_at_most": at_most, **plan_forecast.as_json(config, plan, ahead)}
        print(json.dumps(plan.model_dump(mode="json") | facts, indent=2))
        return 0
    told = [("measured here", text) for text in chosen]
    for label, text in (*describe(config, plan, lengths), *told, *plan_forecast.describe(config, plan, ahead)):
        print_fact(label, text, 17)
    return 0


def _as_measured(config: Config, plan: Plan, tokens: int | None) -> tuple[Config, list[str]]:
    """The config with what this machine's measurements choose for a run here, and each choice in words."""
    weights, said = read_weights(config.model.path, os.environ), []
    shape = shape_of(weights) if weights is not None else None
    if plan.device == "cpu" and config.model.dtype == "auto" and config.kubernetes is None:
        found = measured.cpu_dtype(shape.hidden if shape is not None else None)
        said.append("model.dtype: auto -> {}, because {}".format(*(found or ("what is faster", "runs measure it"))))
        if found is not None:
            config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": found[0]})})
    gpu = plan_forecast.gpu_here() if plan.device == "cuda" else None
    is_elsewhere = config.kubernetes is not None or (plan.device == "cuda" and gpu is None)
    known = measured.Choices() if is_elsewhere else measured.read(gpu)
    total = float(tokens or 0) * plan.num_epochs
    compiles = (
        measured.compiles(config, known, weights.parameters, total, plan.device)
        if weights is not None and config.training.compile == "auto"
        else config.training.compile
    )
    if compiles != config.training.compile:
        said.append(
            f"training.compile: auto -> {str(compiles).lower()}, because {known.why} (measured on {known.time[:10]})"
        )
        config = config.model_copy(update={"training": config.training.model_copy(update={"compile": compiles})})
    return config, said


def _show_origins(args: argparse.Namespace, config: Config) -> int:
    """Print each setting as the run will have it, with the file and line, variable or option that it comes from."""
    file, sources = sources_of(args, os.environ)
    tree, _ = read_tree(file, **sources)
    rows = []
    for key, value in dotted_values(resolved(config)):
        path = tuple(key.split("."))
        # `model: ID` is short for model.path
        origin = tree.origin_of(path) or (tree.origin_of(path[:-1]) if tree.find(path[:-1]) == value else None)
        rows.append({"key": key, "value": value, "origin": str(origin) if origin else "kubetune's default"})
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        print_table(("KEY", "VALUE", "FROM"), [(row["key"], json.dumps(row["value"]), row["origin"]) for row in rows])
    return 0


def _require_targets(config: Config) -> None:
    """Raise ConfigError for target modules that the model lacks. It is built, without weights, only where in doubt."""
    lora, weights = config.lora, read_weights(config.model.path, os.environ)
    if lora is None or weights is None or config.model.trust_remote_code or not may_lack_targets(config, weights):
        return
    import transformers

    from kubetune.models.loading import skeleton
    from kubetune.models.lora import add_lora
    from kubetune.tasks import task_module

    auto_class = getattr(transformers, task_module(config).AUTO_CLASS)
    add_lora(skeleton(auto_class, config.model), lora, task_type="CAUSAL_LM", seed=0)


def show_notes() -> None:
    """Let the notes that reading a config makes reach the terminal, such as variables that decide a setting.

    In a notebook somebody else shows what is logged, but for notes as long as nobody asks for them.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("kubetune").setLevel(logging.INFO)


def _without(training: TrainingConfig) -> str:
    """Settings that a run without evaluations makes no use of, in words."""
    defaults = TrainingConfig()
    names = [
        f"training.{name}"
        for name in ("metric_for_best_model", "greater_is_better", "eval_steps")
        if getattr(training, name) != getattr(defaults, name)
    ]
    return f": no data.eval, so {' and '.join(names)} {'is' if len(names) == 1 else 'are'} not used" if names else ""


def describe(config: Config, plan: Plan, lengths: Lengths | None) -> Iterator[tuple[str, str]]:
    """The facts of a plan as labelled lines."""
    training = config.training
    yield "model", config.model.path
    base = quantization_of(config, plan)
    quantised = f", {base} base" if base != "none" else ""
    if config.quantization == "auto":
        quantised += f" (quantization: auto is {base} here)"
    yield "method", f"{plan.method}{quantised}, {training.parallelism} on {plan.device} ({plan.backend})"
    processes = f"{counted(plan.nodes, 'node')} × {counted(plan.processes_per_node, 'process')}"
    yield "world", f"{plan.world_size} = {processes}"
    label, _, text = plan.batch_line().partition(" batch ")
    yield f"{label} batch", text
    yield "rows", _rows(config, plan)
    yield "tokens", _tokens(config, plan, lengths)
    if lengths is not None and lengths.spared:
        yield "shared beginnings", f"about {lengths.spared:.0%} of the tokens, which are computed once"
    positions = positions_of(config, os.environ)
    if positions is not None and lengths is not None and lengths.longest > positions.limit:
        yield "positions", positions.say(lengths.longest)
    about = "at most " if is_upper_bound(config, config.data.train) else "about " if plan.global_batch_tokens else ""
    yield "steps per epoch", _steps(plan.steps_per_epoch, about)
    yield "steps", f"{_steps(plan.num_steps, '' if config.training.max_steps else about)} ({_epochs(plan.num_epochs)})"
    bound = "" if training.warmup_steps is not None or training.max_steps else about
    warmup = f"warm-up {bound}{counted(plan.warmup_steps, 'step')}" if plan.num_steps else "warm-up"
    yield "learning rate", f"{plan.learning_rate:g}, {plan.lr_scheduler_type}, {warmup}"
    # An epoch of so many steps at most has no number of steps.
    save, evaluate = (
        0 if about and asked == "epoch" else steps
        for asked, steps in ((training.save_steps, plan.save_steps), (training.eval_steps, plan.eval_steps))
    )
    yield "evaluation", f"{_every(evaluate)}, and at the end" if config.data.eval else f"none{_without(training)}"
    yield "checkpoints", f"{_every(save)}, and at the end; {training.save_total_limit} kept"
    yield "output", config.output or default_output(config, datetime.now())


def _steps(number: int, about: str) -> str:
    return f"{about}{number:,}" if number else "unknown until the data are read"


def _every(steps: int) -> str:
    """An interval in words; one of an epoch has no number before the data are read."""
    if steps == 1:
        return "every step"
    return f"every {counted(steps, 'step')}" if steps else "every epoch"


def _epochs(number: float) -> str:
    return f"{number:.4g} epoch{'' if number == 1 else 's'}"


def _rows(config: Config, plan: Plan) -> str:
    if plan.rows is None and makes_data(config):
        return "unknown: the data are not on this machine; kubernetes.preprocess makes them on the cluster"
    if plan.rows is None:
        return "unknown: the data are no files on this machine; `kubetune data prepare` fetches and counts them"
    tested = config.data.eval if isinstance(config.data.eval, tuple) else config.data.train
    bounded = [is_upper_bound(config, sources) for sources in (config.data.train, tested)]
    rows, eval_rows = (
        f"{'at most ' if bound else ''}{number or 0:,}"
        for bound, number in zip(bounded, (plan.rows, plan.eval_rows), strict=True)
    )
    evaluated = f", {eval_rows} for evaluation" if plan.eval_rows else ""
    if any(bounded[: 2 if plan.eval_rows else 1]):
        return f"{rows}{evaluated}: of data that are not here no more than #N; `kubetune data prepare` counts them"
    return f"{rows}{evaluated}, before checks leave any out"


def _tokens(config: Config, plan: Plan, lengths: Lengths | None) -> str:
    tokens = plan.tokens_per_epoch
    if plan.rows is None:
        return "unknown, as the rows are"
    if tokens is None or lengths is None:
        return "unknown: the tokenizer is not on this machine, or none of the first rows can be read"
    text = f"about {tokens:,} an epoch, {lengths.tokens_per_row:,.0f} a row (from {lengths.sampled} rows)"
    if lengths.overlong_share:
        text += f"; {lengths.overlong_share:.1%} longer than {lengths.limit:,}: {config.data.overlong}"
    if lengths.bad_share:
        text += f"; {lengths.bad_share:.1%} unreadable, see `kubetune data check`"
    return text
