"""`kubetune init`: a run file made for data that it looks at, or else a commented starter file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.files import write_atomic
from kubetune.base.humanize import visible
from kubetune.cli.prepare.starter import TASKS, starter
from kubetune.errors import ConfigError, KubetuneError

if TYPE_CHECKING:
    from kubetune.config.schema import Config

# What `--model` takes for the model of `kubetune demo`, which comes with the package.
DEMO_MODEL = "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", nargs="?", metavar="DATA", help="file, folder or hub data set to make the run for"
    )
    parser.add_argument(
        "--model",
        metavar="ID",
        help="hub id or folder of the model; demo: the one that comes with kubetune (0.8 M parameters), to try things",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the run file here; left out: print it",
    )
    parser.add_argument(
        "--task", choices=TASKS, help="kind of run; left out: what suits DATA, or causal_lm"
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="EXPECTED=NAME",
        help="columns of other names, such as prompt=question completion=solution",
    )
    parser.add_argument(
        "--schema",
        action="store_true",
        help="print the JSON Schema of run files instead, for editors",
    )


def run(args: argparse.Namespace) -> int:
    """Print or write the run file. Raise ConfigError rather than overwrite anything, DataError for unusable data."""
    if args.output is not None and args.output.exists():
        raise ConfigError(
            f"{args.output} exists already; choose another name, or remove it. Nothing was written."
        )
    if args.data is None and args.columns:
        raise ConfigError("command line: --columns names columns of DATA, which is missing")
    purpose = ""
    made: _Made | None = None
    if args.model == DEMO_MODEL:
        from kubetune.cli.local.demo import EMBEDDED

        args.model = str(EMBEDDED / "model")
    if args.schema:
        text = _schema_text()
    elif args.data is None:
        text = starter(args.task or "causal_lm", args.model)
    else:
        made = _for_data(args)
        text = made.text
        purpose = made.purpose

    if args.output is None:
        print(text, end="")
    else:
        write_atomic(args.output, text)
        print(visible(f"wrote {args.output}{purpose}"))
        if made is not None:
            for sentence in (*made.unused, *made.verdict.warnings):
                print(visible(sentence))
    if made is not None and made.verdict.problems:
        # The file is a start, and the problems say what to change in it.
        raise ConfigError(made.verdict.problems)
    if args.output is not None and not args.schema:
        from kubetune.cli.program import next_commands

        is_looked_at = made is not None and made.verdict.is_looked_at
        verb = "plan" if is_looked_at else "data check"
        print(next_commands((verb, "train"), args.output))
    return 0


@dataclass(frozen=True)
class _Verdict:
    """What is known of a run before it starts."""

    problems: Sequence[str] = ()  # what keeps it from training
    warnings: Sequence[str] = ()  # about its rows, and what this machine lacks now
    is_looked_at: bool = True  # all rows were, not only the first


@dataclass(frozen=True)
class _Made:
    """A run file for data."""

    text: str
    purpose: str  # what it is for, in a few words
    unused: Sequence[str]  # sentences on what it leaves out of the data
    verdict: _Verdict


def _for_data(args: argparse.Namespace) -> _Made:
    """Return the run file for data that are looked at."""
    from kubetune.base.yaml_reader import FileText
    from kubetune.cli.busy import busy
    from kubetune.cli.prepare.run_file import run_file
    from kubetune.config.load import load_config
    from kubetune.config.schema import SourceConfig
    from kubetune.data.proposed.by_split import propose_by_split
    from kubetune.data.proposed.proposed_values import model_facts
    from kubetune.data.proposed.proposing import settle_format
    from kubetune.data.reading.sources import require_hub_data
    from kubetune.supervisor.command_line import columns_of

    source = SourceConfig(path=args.data, columns=columns_of(args.columns or ()))
    require_hub_data({"train": [source]}, os.environ)
    with busy(f"looking at {visible(args.data)}"):
        proposal = propose_by_split(source, args.task)
        facts = model_facts(args.model, proposal.task.value, os.environ)
        if facts.has_template is False:
            settle_format(proposal, has_template=False)
    text = run_file(proposal, args.model, facts)
    # A mistake of ours in the text is found before anything is written.
    config = load_config(FileText(args.output or Path("run.yaml"), text))
    with busy("judging the run"):
        verdict = _verdict(config, proposal.explained, has_model=args.model is not None)
    purpose = f" ({proposal.task.value}: {proposal.task.reason})"
    unused = proposal.unused
    if proposal.held_out is not None:
        unused = [proposal.remarks[-1], *unused]
    return _Made(text, purpose, unused, verdict)


def _verdict(config: Config, explained: Sequence[str], *, has_model: bool) -> _Verdict:
    """Return what `plan` would say, each column that nothing reads once, and without those that are `explained`.

    `has_model`: False for an example that is to be replaced by a model.
    """
    if not has_model:
        return _Verdict()
    from kubetune.data.findings.group_findings import NAMED_GROUPS
    from kubetune.library.plan_forecast import forecast_run
    from kubetune.library.verdict.run_problems import sentences

    try:
        forecast = forecast_run(config, os.environ)
    except KubetuneError as error:
        return _Verdict(problems=sentences([error]))
    warnings = [f"warning: {text}" for text in forecast.warnings]
    for finding in forecast.findings or ():
        # Of the names of files the proposal says it.
        is_known = finding.id == NAMED_GROUPS or (
            finding.id == "unused_column"
            and (
                # A source is read by both splits, if rows of it are held out.
                finding.split != "train"
                or any(f"`{name}` (" in finding.sentence for name in explained)
            )
        )
        if finding.severity == "warning" and not is_known:
            warnings.append(f"warning: {finding.line}")
    return _Verdict(forecast.problems, warnings, forecast.is_looked_at)


def _schema_text() -> str:
    from kubetune.config.json_schema import editor_schema

    return json.dumps(editor_schema(), indent=2, ensure_ascii=False) + "\n"
