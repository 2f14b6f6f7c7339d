"""`kubetune data convert`: any data to JSON lines of one shape, and the recipes for published data sets."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from kubetune.base.humanize import visible
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.errors import OK, ConfigError
from kubetune.plugins.recipes import RECIPES

Number = TypeVar("Number", int, int | None)

# Time between lines that say how far it is.
LINE_SECONDS = 15.0

OPTIONS_OF_RECIPES = (
    "source",
    "style",
    "images",
    "skip_images",
    "max_samples",
    "max_history_rounds",
    "json",
)
# Attempts with their feedback that a state of FIRE holds by default.
_HISTORY_ROUNDS = 6
OPTIONS_OF_SHAPES = ("to", "format", "columns", "subset", "seed")
_EPILOG = """\
examples:
  kubetune data convert answers.csv --columns prompt=question completion=answer -o answers.jsonl
  kubetune data convert fire --source hub:PengxiangLi/FIRE --split train,test --images hub --output fire_bc
  kubetune data convert fire --source FIRE-test.json --images /data/coco --max-samples 100 --output fire_bc_100
  kubetune data convert volcano --source volcano-train.json --skip-images --output volcano
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of both kinds of input; `run` refuses those of the other kind."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "target",
        metavar="INPUT",
        help="file, folder, pattern or hub data set (`#N` takes a sample); or a recipe: `fire` or `volcano`",
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        help="JSONL file to write; with a recipe, the folder",
    )
    parser.add_argument(
        "--split", help="split of a hub data set, such as train[:1%%]; with a recipe: train,test"
    )
    _add_options_of_shapes(parser.add_argument_group("any data"))
    recipes = parser.add_argument_group(
        "recipes", "--output appears when it is whole; the same command begins anew after a stop"
    )
    _add_options_of_recipes(recipes)


def _add_options_of_shapes(group: argparse._ArgumentGroup) -> None:
    shapes = ("messages", "prompt_completion", "text", "preference", "judged")
    group.add_argument(
        "--to", choices=shapes, help="default messages; judged: a record for each answer of a pair"
    )
    group.add_argument("--format", help="shape of the records (default: recognised)")
    group.add_argument(
        "--columns", nargs="*", metavar="name=column", help="such as prompt=question"
    )
    group.add_argument("--subset", help="configuration of a hub data set")
    group.add_argument("--seed", type=int, help="decides the sample that `#N` takes (default 42)")


def _add_options_of_recipes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--source", metavar="hub:ID|PATH", help="data set: on the hub, a file, or a folder of files"
    )
    group.add_argument(
        "--style",
        help="fire: bc, a row for each attempt (default), or sharegpt, a row for each record",
    )
    group.add_argument(
        "--images",
        metavar="DIR|hub",
        help="where images are: a folder that holds them by the paths of the records, or `hub` for COCO on the hub",
    )
    group.add_argument(
        "--skip-images",
        action="store_true",
        default=None,
        help="do not look for images, and do not open them",
    )
    group.add_argument(
        "--max-samples",
        type=int,
        metavar="N",
        help="first N records of each split; 0 for all (default $MAX_SAMPLES)",
    )
    group.add_argument(
        "--max-history-rounds",
        type=int,
        metavar="N",
        help="fire: attempts with feedback in a state (default $MAX_HISTORY_ROUNDS, or 6)",
    )
    add_json(group, "the statistics as JSON")


def run(args: argparse.Namespace) -> int:
    """Convert and return the exit code."""
    is_recipe = args.target in RECIPES
    options_of_other: tuple[str, ...] = OPTIONS_OF_RECIPES
    whose = "of the recipes, fire and volcano"
    if is_recipe:
        options_of_other = OPTIONS_OF_SHAPES
        whose = "of any data, not of a recipe"

    flags = []
    for name in options_of_other:
        value = getattr(args, name)
        # Not `if value`: somebody may have given a seed of 0.
        if value is not None and value is not False:
            flags.append(f"--{name.replace('_', '-')}")
    if flags:
        raise ConfigError(
            f"{', '.join(flags)}: option {whose}; leave it out with {args.target}. See "
            "`kubetune data convert --help`. Nothing was written."
        )
    if is_recipe:
        return _convert_recipe(args)
    return _convert_shape(args)


def _convert_shape(args: argparse.Namespace) -> int:
    from kubetune.base.humanize import unused_keys
    from kubetune.config.schema import SourceConfig
    from kubetune.data.reading.convert import convert_source
    from kubetune.data.reading.sources import not_read

    # prompt=question: what the shape calls `prompt` is the column `question`.
    columns: dict[str, str] = {}
    bad = []
    for text in args.columns or ():
        name, equals, column = text.partition("=")
        columns[name] = column
        if not equals or not column:
            bad.append(text)
    if bad:
        raise ConfigError(
            f"--columns {' '.join(bad)}; expected name=column, such as prompt=question"
        )

    source = SourceConfig(
        path=args.target,
        format=args.format or "auto",
        columns=columns,
        subset=args.subset,
        split=args.split or "train",
    )
    # 42 is the seed of run files too, so `#N` takes the same sample there.
    seed = args.seed
    if seed is None:
        seed = 42
    counts, unused = convert_source(source, args.output, args.to or "messages", seed)

    written = counts["written"]
    read = counts["read"]
    line = f"{written:,} of {read:,} records written to {args.output}"
    if written > read:
        # A pair becomes two records where each answer is judged for itself.
        line = f"{written:,} records, of {read:,}, written to {args.output}"
    if counts["skipped"]:
        line += f", {counts['skipped']:,} without an answer left out"
    print(visible(line))
    for note in (unused_keys(unused), unused_keys(not_read([source]), "files not read")):
        if note:
            print(note)
    return OK


@prints_json
def _convert_recipe(args: argparse.Namespace) -> Answer:
    """Convert a published data set."""
    from kubetune.config.environment import max_samples
    from kubetune.plugins.recipes.conversion import ConversionRequest, convert_recipe
    from kubetune.plugins.recipes.dataset_files import HUB, locate_splits
    from kubetune.plugins.recipes.recipe import DataRecipe, Options

    # All mistakes of the command line are reported at once.
    recipe: DataRecipe = import_module(f"kubetune.plugins.recipes.{args.target}").RECIPE
    has_history = "bc" in recipe.styles
    problems = []
    if args.style not in (None, *recipe.styles):
        problems.append(f"--style {args.style}: expected {' or '.join(recipe.styles)}")
    if args.max_history_rounds is not None and not has_history:
        problems.append(f"--max-history-rounds: {recipe.name} has no attempts to remember")
    for flag, least in (("max_samples", 0), ("max_history_rounds", 0)):
        value = getattr(args, flag)
        if value is not None and value < least:
            problems.append(f"--{flag.replace('_', '-')} {value}: expected at least {least}")
    splits = _listed(args.split)
    if args.split is not None and not splits:
        problems.append("--split is empty; expected names such as train,test")
    if bool(args.images) == bool(args.skip_images):
        problems.append("expected --images with a folder or hub, or else --skip-images")
    if problems:
        raise ConfigError([*problems, "Nothing was written."])

    # 0 asks for all.
    samples = args.max_samples or None
    if args.max_samples is None:
        samples = _of_environment("MAX_SAMPLES", max_samples)
    rounds = args.max_history_rounds
    if rounds is None:
        rounds = 0
        if has_history:
            rounds = _of_environment("MAX_HISTORY_ROUNDS", _history_rounds)

    source = args.source or f"{HUB}{recipe.hub}"
    request = ConversionRequest(
        recipe=recipe,
        splits=locate_splits(source, splits or recipe.splits, are_given=splits is not None),
        options=Options(args.style or recipe.styles[0], rounds),
        images=args.images,
        output=args.output,
        max_samples=samples,
    )
    stats, done = convert_recipe(request, _ProgressLines().show)
    return Answer(stats, lambda: _tell(stats, args.output, done))


def _history_rounds(environ: Mapping[str, str]) -> int:
    text = environ.get("MAX_HISTORY_ROUNDS", "").strip() or str(_HISTORY_ROUNDS)
    if not text.isdecimal():
        raise ValueError(f"found {text!r}; expected a whole number of rounds")
    return int(text)


def _of_environment(name: str, read: Callable[[Mapping[str, str]], Number]) -> Number:
    try:
        return read(os.environ)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}: {error}. Nothing was written.") from error


def _listed(text: str | None) -> tuple[str, ...] | None:
    """Return the words of `a,b`, each once; None where nothing was given."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    return tuple(dict.fromkeys(word for word in words if word))


ERRORS_SHOWN = 3


def _tell(stats: dict[str, Any], output: Path, done: bool) -> None:
    from kubetune.base.humanize import counted, unused_keys

    for split, facts in stats.items():
        rows = counted(facts["examples_generated"], "row")
        records = counted(facts["samples_processed"] - facts["skipped"], "record")
        skipped = f"{facts['skipped']:,} of {facts['samples_processed']:,} skipped"
        print(f"{split}: {rows} of {records}, {skipped}")
        for reason, number in facts["skipped_by_reason"].items():
            print(f"  {number:,} {reason} (skipped)")
        for note, number in facts["notes"].items():
            print(f"  {number:,} {note}")
        keys = unused_keys(facts.get("keys_not_used", {}))
        if keys:
            print(f"  {keys}")
        for error in facts["errors"][:ERRORS_SHOWN]:
            print(f"  {error}")
    outcome = "written to"
    if not done:
        outcome = "nothing to do: these settings were converted already to"
    print(f"{outcome} {output}")


class _ProgressLines:
    """Say now and then on standard error how much is done."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()

    def show(self, what: str, done: int) -> None:
        """Print a line, unless the last one is recent."""
        now = time.monotonic()
        if now - self._shown_at >= LINE_SECONDS:
            self._shown_at = now
            print(f"{what}: {done:,} so far", file=sys.stderr, flush=True)
