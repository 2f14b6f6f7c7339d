"""`kubetune data`: check, prepare and convert data."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from kubetune.base.humanize import visible
from kubetune.cli.busy import busy
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.prepare import data_convert
from kubetune.cli.prepare.data_check import check_data, load_target
from kubetune.cli.prepare.shown_report import counts_of
from kubetune.plan.base_model import require_kind
from kubetune.plan.model_shapes import ModelFiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the verb and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="find every bad record and say what would be trained; writes nothing"
    )

    check.add_argument("target", help="run file, or a data file, folder or hub data set")
    check.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes to the run file"
    )
    check.add_argument(
        "--model", help="model whose tokenizer is used; needed for tokens when TARGET is data"
    )
    check.add_argument(
        "--columns",
        nargs="+",
        metavar="EXPECTED=NAME",
        help="columns of other names in a data file, such as prompt=question completion=solution",
    )
    check.add_argument(
        "--samples", type=int, default=2, metavar="N", help="rendered rows to show (default 2)"
    )
    add_json(check, "the report as JSON, with every bad record")
    check.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write it as a page too, with rows as the model sees them",
    )

    prepare = actions.add_parser(
        "prepare", help="tokenise the data of a run into the cache, as `train` does"
    )
    prepare.add_argument("target", help="run file")
    prepare.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="changes to the run file"
    )
    add_json(prepare, "the statistics as JSON")

    convert = actions.add_parser(
        "convert", help="turn any data, or a published data set, into JSON lines to train on"
    )
    data_convert.add_arguments(convert)


def run(args: argparse.Namespace) -> int:
    """Do what `args.action` says and return the exit code."""
    actions = {"check": check_data, "prepare": _prepare, "convert": data_convert.run}
    return actions[args.action](args)


@prints_json
def _prepare(args: argparse.Namespace) -> Answer:
    """Prepare the data of a run in the cache."""
    from kubetune.data.findings.checked import findings_of, prepare_run

    config = load_target(args)
    require_kind(config.task, ModelFiles(config.model.path, os.environ))
    with busy("loading the tokenizer") as work:
        prepared = prepare_run(config, progress=partial(work.count, "preparing records", None))
        findings = findings_of(prepared)

    def show() -> None:
        # Labels are learned in place of tokens, and so are answers that are drawn.
        has_share = prepared.labels is None and config.task != "grpo"
        for split, stats in prepared.stats.items():
            print(f"{split}: {counts_of(stats, has_share=has_share)}")
        for finding in findings:
            print(f"{finding.severity}: {finding.line}")
        print(visible(f"prepared data: {prepared.path}"))

    facts = {
        "path": str(prepared.path),
        "fingerprint": prepared.fingerprint,
        "splits": prepared.stats,
        "findings": [finding.to_json() for finding in findings],
    }
    return Answer(facts, show)
