"""`kubetune data convert`: any data to JSON lines of one shape, and the recipes for published data sets."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kubetune.base.humanize import visible
from kubetune.errors import OK, ConfigError

if TYPE_CHECKING:
    from kubetune.plugins.recipes.conversion import Progress

Number = TypeVar("Number", int, int | None)

RECIPES = ("fire", "volcano")
LINE_SECONDS = 15.0
"""Time between lines that say how far it is, where there is no terminal."""

_OF_RECIPES = (
    "source",
    "style",
    "images",
    "skip_images",
    "max_samples",
    "max_history_rounds",
    "keep_sources",
    "workers",
)
_HISTORY_ROUNDS = 6
"""Attempts with their feedback that a state of FIRE holds, where nothing else is said."""
_OF_SHAPES = ("to", "format", "columns", "subset", "seed")
_EPILOG = """\
examples:
  kubetune data convert answers.csv --columns prompt=question completion=answer -o answers.jsonl
  kubetune data convert fire --source hub:PengxiangLi/FIRE --split train,test --images hub --output fire_bc
  kubetune data convert fire --source FIRE-test.json --images coco=/data/coco --max-samples 100 --output fire_bc_100
  kubetune data convert volcano --source volcano-train.json --skip-images --output volcano
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of both kinds; which of them belong together is looked at when they are known."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "target", metavar="INPUT", help="file, folder, pattern or hub data set (`#N` takes a sample); or a recipe: "
        "`fire` or `volcano`"
    )  # fmt: skip
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
    shape = parser.add_argument_group("any data")
    shapes = ("messages", "prompt_completion", "text", "preference", "judged")
    shape.add_argument(
        "--to", choices=shapes, help="default messages; judged: each answer of a pair for itself"
    )
    shape.add_argument("--format", help="shape of the records (default: recognised)")
    shape.add_argument(
        "--columns", nargs="*", metavar="name=column", help="such as prompt=question"
    )
    shape.add_argument("--subset", help="configuration of a hub data set")
    shape.add_argument("--seed", type=int, help="decides the sample that `#N` takes (default 42)")
    recipe = parser.add_argument_group(
        "recipes",
        "stopped or killed, the same command goes on from where it was; --output appears when it is whole",
    )
    recipe.add_argument(
        "--source", metavar="hub:ID|PATH", help="data set: on the hub, a file, or a folder of files"
    )
    recipe.add_argument(
        "--style",
        help="fire: bc, a row for each attempt (default), or sharegpt, one for each record",
    )
    recipe.add_argument(
        "--images",
        action="append",
        metavar="[SET=]DIR|hub[:ID]",
        help="where images are: a folder that holds them by the paths of the records, `coco=DIR` for one source set, "
        "`hub` for COCO on the hub; may be repeated",
    )
    recipe.add_argument(
        "--skip-images",
        action="store_true",
        default=None,
        help="neither look for images nor at them",
    )
    recipe.add_argument(
        "--max-samples",
        type=int,
        metavar="N",
        help="first N records of each split; 0 for all (default $MAX_SAMPLES)",
    )
    recipe.add_argument(
        "--max-history-rounds",
        type=int,
        metavar="N",
        help="fire: attempts with feedback in a state (default $MAX_HISTORY_ROUNDS, or 6)",
    )
    recipe.add_argument(
        "--keep-sources",
        metavar="SET,…",
        help="only records whose image is of these source sets, such as coco,gqa",
    )
    recipe.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes (default: usable cores; with --skip-images one less, for reading)",
    )
    recipe.add_argument(
        "--json", action="store_true", default=None, help="print the statistics as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Convert and return the exit code."""
    is_recipe = args.target in RECIPES
    foreign = [
        name
        for name in (_OF_SHAPES if is_recipe else (*_OF_RECIPES, "json"))
        if getattr(args, name) is not None
    ]
    if foreign:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
        other = (
            f"the recipe {args.target}" if is_recipe else "data; the recipes, fire and volcano, do"
        )
        raise ConfigError(
            f"{flags}: not known to {other}. See `kubetune data convert --help`. Nothing was written."
        )
    return _convert_recipe(args) if is_recipe else _convert_shape(args)


def _convert_shape(args: argparse.Namespace) -> int:
    from kubetune.base.humanize import unused_keys
    from kubetune.config.schema import SourceConfig
    from kubetune.data.reading.convert import convert_source
    from kubetune.data.reading.sources import not_read

    columns = args.columns or []
    pairs = [text.partition("=") for text in columns]
    if bad := [
        text
        for text, (_, sign, column) in zip(columns, pairs, strict=True)
        if not sign or not column
    ]:
        raise ConfigError(
            f"--columns {' '.join(bad)}; expected name=column, such as prompt=question"
        )
    source = SourceConfig(
        path=args.target,
        format=args.format or "auto",
        columns={name: column for name, _, column in pairs},
        subset=args.subset,
        split=args.split or "train",
    )
    seed = 42 if args.seed is None else args.seed
    counts, unused = convert_source(source, args.output, args.to or "messages", seed)
    skipped = f", {counts['skipped']:,} without an answer left out" if counts["skipped"] else ""
    written, read = counts["written"], counts["read"]  # two answers of each pair are more
    said = (
        f"{written:,} of {read:,} records"
        if written <= read
        else f"{written:,} records, of {read:,},"
    )
    print(visible(f"{said} written to {args.output}{skipped}"))
    for line in filter(
        None, (unused_keys(unused), unused_keys(not_read([source]), "files not read"))
    ):
        print(line)
    return OK


def _convert_recipe(args: argparse.Namespace) -> int:
    from kubetune.base.processes import usable_cores
    from kubetune.config.environment import max_samples
    from kubetune.plugins.recipes.conversion import (
        Request,
        convert_recipe,
        load_recipe,
        locate_origins,
    )
    from kubetune.plugins.recipes.image_sources import ImageSources
    from kubetune.plugins.recipes.recipe import Options

    recipe = load_recipe(args.target)
    problems = []
    if args.style not in (None, *recipe.styles):
        problems.append(f"--style {args.style}: expected {' or '.join(recipe.styles)}")
    if args.max_history_rounds is not None and not recipe.rounds:
        problems.append(f"--max-history-rounds: {recipe.name} has no attempts to remember")
    for flag, least in (("max_samples", 0), ("max_history_rounds", 0), ("workers", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            problems.append(f"--{flag.replace('_', '-')} {value}: expected at least {least}")
    splits = _listed(args.split)
    if args.split is not None and not splits:
        problems.append("--split is empty; expected names such as train,test")
    if problems:
        raise ConfigError([*problems, "Nothing was written."])
    samples = (
        args.max_samples or None
        if args.max_samples is not None
        else _of_environment("MAX_SAMPLES", max_samples)
    )
    rounds = args.max_history_rounds
    if rounds is None:
        rounds = _of_environment("MAX_HISTORY_ROUNDS", _history_rounds) if recipe.rounds else 0
    request = Request(
        recipe=recipe,
        images=ImageSources.parse(args.images or (), skip=bool(args.skip_images)),
        origins=locate_origins(recipe, args.source, splits),
        options=Options(args.style or recipe.styles[0], rounds, _listed(args.keep_sources) or ()),
        output=args.output,
        max_samples=samples,
        # Without images there is so little to do for a record that reading and writing keep a core busy.
        workers=args.workers or max(1, usable_cores() - bool(args.skip_images)),
    )
    try:
        with _Shown() as shown:
            stats, done = convert_recipe(request, shown)
    except KeyboardInterrupt:
        print("kubetune: stopped; run the same command again to go on from here", file=sys.stderr)
        raise
    if args.json:
        print(json.dumps(stats, indent=2, ensure_ascii=False))
    else:
        _tell(stats, args.output, done)
    return OK


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
    """The words of `a,b`, each once; None where nothing was given."""
    return (
        None
        if text is None
        else tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    )


def _tell(stats: dict[str, Any], output: Path, done: bool) -> None:
    from kubetune.base.humanize import counted, unused_keys

    for split, facts in stats.items():
        print(
            f"{split}: {counted(facts['examples_generated'], 'row')} of {counted(facts['samples_used'], 'record')}, "
            f"{facts['skipped']:,} of {facts['samples_processed']:,} skipped"
        )
        for kind in ("skipped_by_reason", "notes"):
            for reason, number in facts[kind].items():
                print(f"  {number:,} {reason}" + ("" if kind == "notes" else " (skipped)"))
        if told := unused_keys(facts.get("keys_not_used", {})):
            print(f"  {told}")
        for error in facts["errors"][:3]:
            print(f"  {error}")
    print(
        f"{'written to' if done else 'nothing to do: these settings were converted already to'} {output}"
    )


class _Shown:
    """Progress as people want it: a bar on a terminal, elsewhere a line now and then, on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,  # a thread of its own would be there when processes are forked
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}
        self._began: dict[str, tuple[float, int]] = {}
        self._shown_at = time.monotonic()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self._update

    def __exit__(self, *_: object) -> None:
        self._bar.refresh()
        self._bar.stop()

    def _update(self, what: str, total: int, done: int) -> None:
        now = time.monotonic()
        began, first = self._began.setdefault(what, (now, done))
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, completed=done, rate="")
        total = max(total, done)
        rate = (done - first) / (now - began) if now > began else 0.0
        self._bar.update(
            self._tasks[what], total=total, completed=done, rate=f"{rate:,.0f}/s" if rate else ""
        )
        if self._bar.disable:
            if now - self._shown_at >= LINE_SECONDS:
                self._shown_at = now
                left = f", {(total - done) / rate:,.0f} s left" if rate else ""
                print(
                    f"{what}: {done:,} of {total:,}, {rate:,.0f}/s{left}",
                    file=sys.stderr,
                    flush=True,
                )
        elif now - self._shown_at >= 0.2 or done == total:
            self._shown_at = now
            self._bar.refresh()
