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
# Names of positional arguments of which a verb takes any number.
_MORE = ("inputs", "prompts", "overrides")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a run. Every verb that takes a run has the same ones."""
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="run.yaml | key=value",
        help="run file, and overrides such as training.seed=1",
    )
    _add_model(parser.add_argument_group("model"))
    _add_data(parser.add_argument_group("data"))
    _add_lora(parser.add_argument_group("LoRA", "each of these switches it on"))
    _add_training(parser.add_argument_group("training"))
    _add_output(parser.add_argument_group("output"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", dest="model.path", metavar="ID", help="hub id or folder of the model"
    )
    group.add_argument(
        "--model-local-dir",
        metavar="DIR",
        help="folder of the model; takes precedence over --model",
    )
    group.add_argument(
        "--tokenizer-local-dir",
        dest="model.tokenizer",
        metavar="DIR",
        help="folder of the tokenizer",
    )
    _switch(group, "--local-files-only", "model.local_files_only", True, "never ask the hub")
    _switch(group, "--bf16", "model.dtype", "bfloat16", "compute in bfloat16")


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data", dest="data.train", action="append", metavar="PATH[#N]", help="may be repeated"
    )
    group.add_argument(
        "--columns",
        nargs="+",
        metavar="EXPECTED=NAME",
        help="columns of other names, such as prompt=question completion=solution",
    )
    group.add_argument(
        "--eval",
        dest="data.eval",
        type=_share_or_path,
        metavar="PATH|SHARE",
        help="0.05 holds out 5 %%",
    )
    group.add_argument(
        "--seq-len",
        dest="data.max_length",
        type=int,
        metavar="N",
        help="longest sequence in tokens",
    )
    group.add_argument(
        "--add-special-tokens",
        dest="data.add_special_tokens",
        action=argparse.BooleanOptionalAction,
        help="let the tokenizer add its BOS (and the like) to plain text",
    )


def _add_lora(group: argparse._ArgumentGroup) -> None:
    _switch(group, "--lora", "lora", {}, "train adapters (the default without a run file)")
    group.add_argument(
        "--full", action="store_true", help="train every parameter instead of adapters"
    )
    group.add_argument("--lora-r", dest="lora.r", type=int, metavar="N", help="rank")
    group.add_argument(
        "--lora-alpha",
        dest="lora.alpha",
        type=float,
        metavar="X",
        help="scale; default twice the rank",
    )
    group.add_argument(
        "--lora-dropout",
        dest="lora.dropout",
        type=float,
        metavar="X",
        help="dropout of adapter inputs",
    )
    group.add_argument(
        "--target-modules",
        dest="lora.target_modules",
        nargs="+",
        metavar="NAME",
        help="default all-linear",
    )


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--epochs",
        dest="training.num_train_epochs",
        type=float,
        metavar="X",
        help="may be a fraction",
    )
    group.add_argument(
        "--max-steps", dest="training.max_steps", type=int, metavar="N", help="instead of epochs"
    )
    group.add_argument(
        "--batch",
        dest="training.per_device_train_batch_size",
        type=int,
        metavar="N",
        help="samples per micro-batch",
    )
    group.add_argument(
        "--grad-accum",
        dest="training.gradient_accumulation_steps",
        type=int,
        metavar="N",
        help="micro-batches per step",
    )
    group.add_argument(
        "--learning-rate", "--lr", dest="training.learning_rate", type=float, metavar="X"
    )
    group.add_argument("--seed", dest="training.seed", type=int, metavar="N")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output", dest="output", metavar="DIR", help="run directory")
    group.add_argument(
        "--log-level", dest="logging.level", type=str.upper, metavar="LEVEL", help="DEBUG … ERROR"
    )
    group.add_argument(
        "--log-batches", dest="logging.batches", metavar="WHICH", help="all, first-last or none"
    )
    group.add_argument(
        "--report-json", dest="logging.report_json", metavar="FILE", help="copy the report there"
    )


def _switch(group: argparse._ArgumentGroup, flag: str, key: str, value: Any, meaning: str) -> None:
    group.add_argument(flag, dest=key, action="store_const", const=value, help=meaning)


def _share_or_path(text: str) -> float | str:
    # A file whose name is a number is still reached, as ./0.05.
    try:
        return float(text)
    except ValueError:
        return text


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line as `parser.parse_args` does, but let `key=value` and prompts follow flags.

    argparse takes positional arguments only in one place. The words that it leaves over are added here:

        train run.yaml --lora training.seed=1     inputs: run.yaml; left over: training.seed=1

    Errors are printed by `args.parser`, the parser of the verb, where that is set.
    """
    args, rest = parser.parse_known_args(argv)
    # A verb has one such argument at most.
    name = None
    for known in _MORE:
        if known in args:
            name = known
            break

    # A prompt may be any word, even one like a flag if `--` is before it. An override has its form.
    takes_any_word = name is not None and name != "overrides"
    end_of_flags = len(rest)
    if takes_any_word and "--" in rest:
        end_of_flags = rest.index("--")

    words = rest[:end_of_flags]
    unknown = []
    for word in words:
        is_override = _OVERRIDE.match(word) is not None
        if word.startswith("-") or not (takes_any_word or is_override):
            unknown.append(word)

    # A verb without such an argument takes no word that is left over.
    if rest and (name is None or unknown):
        verb = getattr(args, "parser", parser)
        verb.error(f"unrecognized arguments: {' '.join(rest)}{_suggestion(verb, rest)}")
    if name is not None:
        getattr(args, name).extend(words + rest[end_of_flags + 1 :])
    return args


# Options of kubectl that people try, and what kubetune has instead.
_OF_OTHERS = {
    "--context": "the current context is used: `kubectl config use-context NAME` changes it",
    "--kubeconfig": "the variable KUBECONFIG names the file",
    "--force": "nothing is ever overwritten: remove the file or folder first, or name another",
    "--dry-run": "`kubetune plan` shows what a run takes, and `kubetune render` what a cluster would get",
}


def _suggestion(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Return a question for the option that one of the words was meant to be, or ""."""
    options: list[str] = []
    for action in parser._actions:
        options += action.option_strings
    for word in words:
        other = _OF_OTHERS.get(word.partition("=")[0])
        if other is not None and word not in options:
            return f"; {other}"
        if word.startswith("--"):
            option = nearest(word.partition("=")[0], options)
            if option:
                return f"; did you mean {option}?"
    return ""


def run_file(args: argparse.Namespace) -> Path | None:
    """Return the run file of the command line, or None. Raise ConfigError if there are two."""
    files = [word for word in args.inputs if not _OVERRIDE.match(word)]
    if len(files) > 1:
        raise ConfigError(
            f"command line: found {' and '.join(files)}; expected one run file, and overrides key=value"
        )
    if not files:
        return None
    from kubetune.config.data_files import is_read

    # JSON is YAML too, so a run file may be one.
    if is_read(files[0]) and not files[0].endswith(".json"):
        raise ConfigError(
            f"{files[0]} is data; expected a run file. `kubetune init {files[0]} -o run.yaml` makes one for it"
        )
    return Path(files[0])


def config_from_args(args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Return the config that a command line describes. Raise ConfigError with every problem."""
    from kubetune.config.load import load_config

    path, settings = sources_of(args, environ)
    return load_config(path, **settings)


def sources_of(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Path | None, dict[str, Any]]:
    """Return the run file of a command line, and the other arguments of `load_config`.

    Raise ConfigError if the command line and the environment describe no run.
    """
    from kubetune.config.environment import VARIABLES
    from kubetune.config.starting_values import values_without_a_file

    # The destinations of flags are keys of the config. All of those with sections have a dot in them.
    flags = {}
    for key, value in vars(args).items():
        is_key_of_config = "." in key or key in ("lora", "output")
        if is_key_of_config and value is not None:
            flags[key] = value
    if args.model_local_dir is not None:
        flags["model.path"] = args.model_local_dir
    if args.full:
        if any(key.startswith("lora") for key in flags):
            raise ConfigError("command line: --full and LoRA's options exclude each other")
        flags["lora"] = None
    if args.columns:
        flags["data.train"] = _with_columns(flags.get("data.train"), args.columns)

    # A run may be described by any of these alone.
    overrides = [word for word in args.inputs if _OVERRIDE.match(word)]
    path = run_file(args)
    is_typed = path is not None or flags or overrides
    if not is_typed and not VARIABLES.keys() & environ.keys():
        raise ConfigError(
            "command line: found nothing to run; expected a run file (`kubetune init -o run.yaml` writes one), "
            "or --model and --data"
        )

    targets = flags.get("lora.target_modules")
    if targets is not None and len(targets) == 1:
        flags["lora.target_modules"] = targets[0]  # a single one may be "all-linear"
    settings: dict[str, Any] = {"overrides": overrides, "flags": flags, "environ": environ}
    # A run without a file starts from what `kubetune init` writes.
    if path is None and "data.train" in flags:
        typed = {word.partition("=")[0] for word in overrides} | flags.keys()
        for name, variable in VARIABLES.items():
            if environ.get(name, "").strip():
                typed.add(variable.path)
        settings["starting"] = values_without_a_file(typed)
    return path, settings


def _with_columns(paths: Sequence[str] | None, words: Sequence[str]) -> list[dict[str, Any]]:
    """Return the sources of `--data` with the names of their columns."""
    if not paths:
        raise ConfigError("command line: --columns names columns of --data, which is missing")
    columns = columns_of(words)
    return [{"path": path, "columns": columns} for path in paths]


def columns_of(words: Sequence[str]) -> dict[str, str]:
    """Return the columns that words such as `prompt=question` name. Raise ConfigError for other words."""
    columns = {}
    for word in words:
        expected, equals, name = word.partition("=")
        if not (expected and equals and name):
            raise ConfigError(
                f"command line: --columns {word}: expected EXPECTED=NAME, such as prompt=question"
            )
        columns[expected] = name
    return columns
