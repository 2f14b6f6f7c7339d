"""`kubetune plan`: what a run will take, before it holds anything. Reads data, but no weights; `--write` writes the file."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubetune.base.humanize import shell_word, visible
from kubetune.base.provenance import dotted
from kubetune.base.terminal import BOLD, coloured
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.program import program
from kubetune.cli.tables import print_fact, print_table
from kubetune.config.load import read_tree
from kubetune.config.resolved import resolved, values_by_path
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.errors import ConfigError, ModelError
from kubetune.library.plan_forecast import forecast_run
from kubetune.supervisor.command_line import (
    add_run_arguments,
    config_from_args,
    run_file,
    sources_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run_arguments(parser)
    add_json(parser, "the plan as JSON")
    parser.add_argument(
        "--origins", action="store_true", help="print every setting and where it comes from instead"
    )
    parser.add_argument(
        "--propose",
        action="store_true",
        help="print the ways to train the run on the GPUs there are instead, the best first",
    )
    parser.add_argument(
        "--gpus",
        metavar="2x24GB",
        help="GPUs to propose for: their number and the memory of each (4x8x80GB: nodes too), or cluster for those of "
        "its nodes; default those of `compute`, else those here",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the best proposal in the run file"
    )


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Print the plan of a run. Raise ConfigError for an impossible one, DataError for data that do not exist."""
    show_notes()
    config = config_from_args(args, os.environ)
    if args.origins:
        return _origins(args, resolved(config))
    _require_model_here(config.model.path, config.kubernetes)
    if args.propose:
        return _proposals(args, config)
    if args.gpus is not None or args.write:
        raise ConfigError("--gpus and --write: they belong to --propose; add that")
    with busy("reading the model's sizes and the data"):
        forecast = forecast_run(config, os.environ)

    def show() -> None:
        print(coloured(forecast.headline(), BOLD))
        for label, text in forecast.describe():
            print_fact(label, text, 17)
        goes_on = forecast.has_gpus and not forecast.problems
        if goes_on and args.inputs and run_file(args) is not None:
            verb = "train" if config.kubernetes is None else "submit"
            verbs = (verb,) if forecast.is_looked_at else ("data check", verb)
            if forecast.is_in_doubt:
                verbs = ("data check",)
            words = " ".join(shell_word(word) for word in args.inputs)
            commands = " · ".join(f"{program()} {name} {words}" for name in verbs)
            print(visible(f"\nNext: {commands}"))

    # The problems are said last, where a terminal still shows them.
    problems = None
    if forecast.problems:
        problems = ConfigError(list(forecast.problems))
    return Answer(forecast.to_json(), show, error=problems)


def _require_model_here(path: str, kubernetes: KubernetesConfig | None) -> None:
    """Raise ModelError for a model that lies on a volume of the cluster alone, with the ways out."""
    if kubernetes is None or Path(path).is_dir():
        return
    from kubetune.k8s.run_names import on_volume

    if not on_volume(kubernetes, path):
        return
    raise ModelError(
        f"model {path}: the pods mount this folder, but it is not on this machine, where `plan` reads the sizes and "
        "the tokenizer of the model; name a copy here with `kubetune plan RUN_FILE model.path=FOLDER`, which then names "
        "that folder as a problem. `submit` and `render` do not need the folder"
    )


def _proposals(args: argparse.Namespace, config: Config) -> Answer:
    """Return the ways to train a run on certain GPUs, and write the best one if that is asked for."""
    from kubetune.library.gpu_pools import gpu_pool
    from kubetune.library.proposed_changes import COLUMNS, proposed, write_way, written

    file = run_file(args)
    if args.write and file is None:
        raise ConfigError("--write: there is no run file to write in; name one")
    with busy("reading the model's sizes and the data"):
        pool = gpu_pool(config.compute, config.kubernetes, args.gpus, os.environ)
        answer = proposed(config, pool, os.environ)
    best = answer.proposals.best
    if args.write and file is not None and best is not None:
        write_way(Path(file), best, pool)

    def show() -> None:
        print(coloured(answer.headline(), BOLD))
        print_table(COLUMNS, list(answer.rows()))
        for changes, why in answer.proposals.refused:
            print(visible(f"not possible: {written(changes) or 'as it is'}: {why}"))
        for part, name in answer.parts():
            print_fact("", f"{part:>10}  {name}", 17)
        if best is not None and args.write:
            print(visible(f"\nThe first is written in {file}"))

    problem = answer.problem()
    error = None if problem is None else ConfigError(problem)
    return Answer(answer.to_json(), show, error=error)


def _origins(args: argparse.Namespace, settings: Mapping[str, Any]) -> Answer:
    """Return each setting as the run will have it, with the file and line, variable or option that it comes from."""
    file, sources = sources_of(args, os.environ)
    tree, _ = read_tree(file, **sources)
    rows = []
    # Only the tree of the run file knows the lines; the config has the values as they were understood.
    for path, value in values_by_path(settings):
        origin = tree.origin_of(path)
        # `model: ID` is short for model.path, and has the origin.
        if origin is None and tree.find(path[:-1]) == value:
            origin = tree.origin_of(path[:-1])
        where = str(origin) if origin else "kubetune's default"
        rows.append({"key": dotted(path), "value": value, "origin": where})

    def show() -> None:
        lines = [(row["key"], json.dumps(row["value"]), row["origin"]) for row in rows]
        print_table(("KEY", "VALUE", "FROM"), lines)

    return Answer(rows, show)


def show_notes() -> None:
    """Let the notes that reading a config makes reach the terminal, such as variables that decide a setting.

    In a notebook somebody else shows what is logged, but for notes as long as nobody asks for them.
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("kubetune").setLevel(logging.INFO)
