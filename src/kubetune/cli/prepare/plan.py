"""`kubetune plan`: what a run will take, before anything is held. Reads data but no weights, and writes nothing."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from pathlib import Path

from kubetune.base.humanize import shell_word, visible
from kubetune.base.provenance import dotted
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.program import program
from kubetune.cli.tables import BOLD, coloured, print_fact, print_table
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


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Print the plan of a run. Raise ConfigError for an impossible one, DataError for data that do not exist."""
    show_notes()
    config = config_from_args(args, os.environ)
    if args.origins:
        return _origins(args, config)
    _require_model_here(config.model.path, config.kubernetes)
    with busy("reading the model's sizes and the data"):
        forecast = forecast_run(config, os.environ)

    def show() -> None:
        print(coloured(forecast.headline(), BOLD))
        for label, text in forecast.describe():
            print_fact(label, text, 17)
        if not forecast.problems and args.inputs and run_file(args) is not None:
            verb = "train" if config.kubernetes is None else "submit"
            words = " ".join(shell_word(word) for word in args.inputs)
            print(visible(f"\nNext: {program()} {verb} {words}"))

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
        "the tokenizer of the model; name a copy here with `kubetune plan RUN_FILE model.path=FOLDER`. `submit` and "
        "`render` do not need the folder"
    )


def _origins(args: argparse.Namespace, config: Config) -> Answer:
    """Return each setting as the run will have it, with the file and line, variable or option that it comes from."""
    file, sources = sources_of(args, os.environ)
    tree, _ = read_tree(file, **sources)
    rows = []
    # Only the tree of the run file knows the lines; the config has the values as they were understood.
    for path, value in values_by_path(resolved(config)):
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
