"""The command line of a run: a run file, `key=value` overrides and flags for runs without a file.

A flag is only another way to write a key: its destination is the dotted path of that key. Light at import, since the
dispatcher imports it for every verb.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import nearest
from kubetune.errors import ConfigError

if TYPE_CHECKING:
    from kubetune.config.schema import Config

log = logging.getLogger(__name__)

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]-]*=")
_MORE = ("inputs", "prompts", "overrides")
"""Names of positional arguments of which a verb takes any number."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what describes a run: used by every verb that takes one, so that they all understand the same words."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="run.yaml | key=value",
        help="run file, and overrides such as training.seed=1",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", dest="model.path", metavar="ID", help="hub id or folder of the model"
    )
    model.add_argument(
        "--model-local-dir",
        metavar="DIR",
        help="folder of the model; takes precedence over --model",
    )
    model.add_argument(
        "--tokenizer-local-dir",
        dest="model.tokenizer",
        metavar="DIR",
        help="folder of the tokenizer",
    )
    _switch(model, "--local-files-only", "model.local_files_only", True, "never ask the hub")
    _switch(model, "--bf16", "model.dtype", "bfloat16", "compute in bfloat16")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", dest="data.train", action="append", metavar="PATH[#N]", help="may be repeated"
    )
    data.add_argument(
        "--eval",
        dest="data.eval",
        type=_share_or_path,
        metavar="PATH|SHARE",
        help="0.05 holds out 5 %%",
    )
    data.add_argument(
        "--seq-len",
        dest="data.max_length",
        type=int,
        metavar="N",
        help="longest sequence in tokens",
    )
    data.add_argument(
        "--add-special-tokens",
        dest="data.add_special_tokens",
        action=argparse.BooleanOptionalAction,
        help="let the tokenizer add its BOS (and the like) to plain text",
    )

    lora = parser.add_argument_group("LoRA", "each of these switches it on")
    _switch(lora, "--lora", "lora", {}, "train adapters instead of every parameter")
    lora.add_argument("--lora-r", dest="lora.r", type=int, metavar="N", help="rank")
    lora.add_argument(
        "--lora-alpha",
        dest="lora.alpha",
        type=float,
        metavar="X",
        help="scale; default twice the rank",
    )
    lora.add_argument(
        "--lora-dropout",
        dest="lora.dropout",
        type=float,
        metavar="X",
        help="dropout of adapter inputs",
    )
    lora.add_argument(
        "--target-modules",
        dest="lora.target_modules",
        nargs="+",
        metavar="NAME",
        help="default all-linear",
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--epochs",
        dest="training.num_train_epochs",
        type=float,
        metavar="X",
        help="may be a fraction",
    )
    training.add_argument(
        "--max-steps", dest="training.max_steps", type=int, metavar="N", help="instead of epochs"
    )
    training.add_argument(
        "--batch",
        dest="training.per_device_train_batch_size",
        type=int,
        metavar="N",
        help="samples per micro-batch",
    )
    training.add_argument(
        "--grad-accum",
        dest="training.gradient_accumulation_steps",
        type=int,
        metavar="N",
        help="micro-batches per step",
    )
    training.add_argument(
        "--learning-rate", "--lr", dest="training.learning_rate", type=float, metavar="X"
    )
    training.add_argument("--seed", dest="training.seed", type=int, metavar="N")

    output = parser.add_argument_group("output")
    output.add_argument("--output", dest="output", metavar="DIR", help="run directory")
    output.add_argument(
        "--log-level", dest="logging.level", type=str.upper, metavar="LEVEL", help="DEBUG … ERROR"
    )
    output.add_argument(
        "--log-batches", dest="logging.batches", metavar="WHICH", help="all, first-last or none"
    )
    output.add_argument(
        "--report-json", dest="logging.report_json", metavar="FILE", help="copy the report there"
    )


def _switch(group: argparse._ArgumentGroup, flag: str, key: str, value: Any, meaning: str) -> None:
    group.add_argument(flag, dest=key, action="store_const", const=value, help=meaning)


def _share_or_path(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """`parser.parse_args`, but `key=value` and prompts may also stand after flags, where argparse knows them no more.

    What is not recognised is told by `args.parser`, the verb's own, where that is set.
    """
    args, rest = parser.parse_known_args(argv)
    given, any_word = next(
        ((vars(args)[name], name != "overrides") for name in _MORE if name in args), (None, False)
    )
    at = rest.index("--") if any_word and "--" in rest else len(rest)
    unknown = [
        word
        for word in rest[:at]
        if word.startswith("-") or not (any_word or _OVERRIDE.match(word))
    ]
    if rest and (given is None or unknown):
        verb = getattr(args, "parser", parser)
        verb.error(f"unrecognized arguments: {' '.join(rest)}{_meant(verb, rest)}")
    if given is not None:
        given += rest[:at] + rest[at + 1 :]
    return args


def _meant(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """The option that one of the words may be a mistyped form of, as a question."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in words:
        if word.startswith("--") and (close := nearest(word.partition("=")[0], known)):
            return f"; did you mean {close}?"
    return ""


def run_file(args: argparse.Namespace) -> Path | None:
    """The run file on the command line. Raises ConfigError when there are two."""
    files = [word for word in args.inputs if not _OVERRIDE.match(word)]
    if len(files) > 1:
        raise ConfigError(
            f"command line: found {' and '.join(files)}; expected one run file, and overrides key=value"
        )
    return Path(files[0]) if files else None


def config_from_args(args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """The config that a command line describes. Raises ConfigError with every problem."""
    from kubetune.config.load import load_config

    path, settings = sources_of(args, environ)
    return load_config(path, **settings)


def sources_of(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Path | None, dict[str, Any]]:
    """The run file of a command line, and what else `load_config` takes. Raises ConfigError where there is nothing."""
    from kubetune.config.environment import VARIABLES

    given = vars(args)
    flags = {key: given[key] for key in ("lora", "output") if given[key] is not None}
    flags |= {key: value for key, value in given.items() if "." in key and value is not None}
    if args.model_local_dir is not None:
        flags["model.path"] = args.model_local_dir
    if "lora" not in flags and any(key.startswith("lora.") for key in flags):
        log.info("LoRA is on, because a flag of it is given")
    overrides = [word for word in args.inputs if _OVERRIDE.match(word)]
    path = run_file(args)
    if path is None and not flags and not overrides and not VARIABLES.keys() & environ.keys():
        raise ConfigError(
            "command line: found nothing to run; expected a run file (`kubetune init -o run.yaml` writes one), "
            "or --model and --data"
        )
    if targets := flags.get("lora.target_modules"):
        flags["lora.target_modules"] = targets[0] if len(targets) == 1 else targets
    return path, {"overrides": overrides, "flags": flags, "environ": environ}
