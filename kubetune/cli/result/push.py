"""`kubetune push`: export the result of a run, unless that is done, and upload it to the Hugging Face hub."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base import allocator
from kubetune.base.logs import scrub
from kubetune.base.processes import output_on_stderr
from kubetune.base.signals import stoppable
from kubetune.cli.json_answers import print_json
from kubetune.cli.result.export import add_export_options, describe, tell
from kubetune.config.load import read_config
from kubetune.config.schema import Config
from kubetune.config.schema.tracking import PushConfig
from kubetune.rundir import metrics

REPOSITORY = "RESULT_MODEL_ID"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--json", action="store_true", help="print where it is as JSON")


def run(args: argparse.Namespace) -> int:
    """Upload; print the address. The run's events tell of success and failure alike."""
    allocator.give_back()
    config = read_config(args.run_dir)
    wanted = _wanted(args, config)
    if not args.despite_gate:
        _require_gate(args.run_dir)
    try:
        with output_on_stderr() if args.json else nullcontext(), stoppable():
            folder, facts = _exported(args, wanted)
            from kubetune.result.publishing.hub_upload import upload

            tell(f"uploading {folder} to {wanted.repo}")
            message = f"{facts['kind'].capitalize()} of {config.name or args.run_dir.name}, step {facts['step']}"
            pushed = upload(folder, wanted.repo, private=wanted.private, message=message, tell=tell)
    except errors.KubetuneError as error:
        metrics.record_event(
            args.run_dir, "push", repo=wanted.repo, ok=False, reason=scrub(str(error))
        )
        raise
    metrics.record_event(
        args.run_dir,
        "push",
        repo=wanted.repo,
        ok=True,
        url=pushed.url,
        commit=pushed.commit,
        **facts,
    )
    if args.json:
        told = {"url": pushed.url, "commit": pushed.commit, "private": pushed.private, **facts}
        print_json(told)
        return errors.OK
    print(
        f"pushed to {pushed.url} ({'private' if pushed.private else 'public'}), commit {pushed.commit[:12]}"
    )
    return errors.OK


def _require_gate(run_dir: Path) -> None:
    """Raise ConfigError for the result of a run that missed its gate."""
    gate = metrics.read_verdict(run_dir).get("gate")
    if gate and not gate["passed"]:
        missed = "; ".join(check["said"] for check in gate["checks"] if not check["holds"])
        raise errors.ConfigError(
            f"{run_dir} missed its gate: {missed}. Nothing was sent; --despite-gate uploads it all the same"
        )


def _wanted(args: argparse.Namespace, config: Config) -> PushConfig:
    """Settings by the command line, over the environment, over the run's config. Raises ConfigError for no name."""
    given = config.push
    repo = args.repo or os.environ.get(REPOSITORY, "").strip() or (given.repo if given else None)
    if not repo:
        raise errors.ConfigError(
            f"where to? give ORG/NAME, set {REPOSITORY}, or set `push: ORG/NAME` in the run's config. Nothing was sent."
        )
    try:
        return PushConfig(
            repo=repo,
            merge=args.merge or bool(given and given.merge),
            private=not args.public and (given is None or given.private),
        )
    except ValueError:
        raise errors.ConfigError(
            f"{repo!r} is no name of a repository; expected ORG/NAME. Nothing was sent."
        ) from None


def _exported(args: argparse.Namespace, wanted: PushConfig) -> tuple[Path, dict[str, Any]]:
    """The export to send, made now unless it is there; with its kind and step."""
    from kubetune.result.publishing.export import export_run, find_export

    found = find_export(
        args.run_dir, args.checkpoint, merged=wanted.merge, dtype=args.dtype, model=args.model
    )
    if found is None:
        found = export_run(
            args.run_dir,
            args.checkpoint,
            merged=wanted.merge,
            dtype=args.dtype,
            device=args.device,
            model=args.model,
            trust_code=args.trust_code,
            tell=tell,
        )
        for label, text in describe(found):
            print(f"{label:<12} {text}")
    else:
        tell(f"{found.path} is exported already")
    return found.path, {"kind": found.kind, "step": found.facts["checkpoint"]["step"]}
