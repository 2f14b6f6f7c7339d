"""`kubetune push`: export the result of a run, unless that is done, and upload it to the Hugging Face hub."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import cpu
from kubetune.base.logs import scrub
from kubetune.base.signals import stoppable
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.result.export import add_export_options, tell
from kubetune.cli.result.export import show as show_export
from kubetune.config import consent
from kubetune.config.load import read_config
from kubetune.config.schema.tracking import PushConfig
from kubetune.rundir import metrics

# Environment variable that names the repository.
REPOSITORY = "RESULT_MODEL_ID"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "repo",
        nargs="?",
        metavar="ORG/NAME",
        help=f"left out: ${REPOSITORY}, or `push` of the run's config",
    )
    add_export_options(parser)
    parser.add_argument(
        "--public", action="store_true", help="make the repository public; it is private otherwise"
    )
    parser.add_argument(
        "--despite-gate",
        action="store_true",
        help="upload also what misses the run's evaluation.gate",
    )
    add_json(parser, "where it is as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Upload, and print the address. The run's events say how it ended."""
    cpu.give_back()
    # Where to, and whether the result is good enough, is known before anything is exported.
    config = read_config(args.run_dir)
    wanted = _wanted(args, config.push, consent.effects_of(config, ["push"]))
    if not args.despite_gate:
        _require_gate(args.run_dir)
    try:
        with stoppable():
            folder, facts = _exported(args, wanted)
            from kubetune.result.publishing.hub_upload import upload

            tell(f"uploading {folder} to {wanted.repo}")
            message = f"{facts['kind'].capitalize()} of {config.name or args.run_dir.name}, step {facts['step']}"
            pushed = upload(folder, wanted.repo, private=wanted.private, message=message, tell=tell)
    except errors.KubetuneError as error:
        reason = scrub(str(error))
        metrics.record_event(args.run_dir, "push", repo=wanted.repo, ok=False, reason=reason)
        raise

    place = {"repo": wanted.repo, "url": pushed.url, "commit": pushed.commit}
    metrics.record_event(args.run_dir, "push", ok=True, **place, **facts)

    def show() -> None:
        who_sees = "private" if pushed.private else "public"
        print(f"pushed to {pushed.url} ({who_sees}), commit {pushed.commit[:12]}")

    address = {"url": pushed.url, "commit": pushed.commit, "private": pushed.private}
    return Answer(address | facts, show)


def _require_gate(run_dir: Path) -> None:
    """Raise ConfigError for the result of a run that missed its gate."""
    # A run without a gate, or one that was not judged, has none to miss.
    gate = metrics.read_verdict(run_dir).get("gate")
    if gate and not gate["passed"]:
        missed = "; ".join(check["said"] for check in gate["checks"] if not check["holds"])
        raise errors.ConfigError(
            f"{run_dir} missed its gate: {missed}. Nothing was sent; --despite-gate uploads it all the same"
        )


def _wanted(
    args: argparse.Namespace, of_run: PushConfig | None, address: Sequence[consent.Effect]
) -> PushConfig:
    """Return the settings: the command line's, else the environment's, else the run's.

    `address`: what the run's settings name, which the user may not have allowed. Raise ConfigError if nothing names a
    repository.
    """
    # What the command says comes first; options can only add to what the run asks for.
    repo = args.repo or os.environ.get(REPOSITORY, "").strip()
    merge = args.merge
    private = not args.public
    if of_run is not None:
        if not repo:
            consent.require(address, args.run_dir, instead="give ORG/NAME in the command")
            repo = of_run.repo
        merge = merge or of_run.merge
        # A run directory of somebody else does not make the user's repository public.
        if all(consent.is_allowed(effect) for effect in address):
            private = private and of_run.private
    if not repo:
        raise errors.ConfigError(
            f"where to? give ORG/NAME, set {REPOSITORY}, or set `push: ORG/NAME` in the run's config. Nothing was sent."
        )
    try:
        return PushConfig(repo=repo, merge=merge, private=private)
    except ValueError:
        raise errors.ConfigError(
            f"{repo!r} is no name of a repository; expected ORG/NAME. Nothing was sent."
        ) from None


def _exported(args: argparse.Namespace, wanted: PushConfig) -> tuple[Path, dict[str, Any]]:
    """Return the export to send, which is made now unless it exists, with its kind and step."""
    from kubetune.result.publishing.export import export_run, find_export

    # An export of the same checkpoint in the same form is sent as it is.
    export = find_export(
        args.run_dir, args.checkpoint, merged=wanted.merge, dtype=args.dtype, model=args.model
    )
    if export is None:
        export = export_run(
            args.run_dir,
            args.checkpoint,
            merged=wanted.merge,
            dtype=args.dtype,
            device=args.device,
            model=args.model,
            trust_code=args.trust_code,
            tell=tell,
        )
        show_export(export)
    else:
        tell(f"{export.path} is exported already")
    return export.path, {"kind": export.kind, "step": export.facts["checkpoint"]["step"]}
