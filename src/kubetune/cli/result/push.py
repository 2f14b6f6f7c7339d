"""`kubetune push`: export the result of a run, unless that is done, and send it to the Hugging Face hub or a registry."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubetune import errors
from kubetune.base.cpu import heap
from kubetune.base.humanize import size, visible
from kubetune.base.logs import scrub
from kubetune.base.registry.address import Address
from kubetune.base.signals import stoppable
from kubetune.cli.busy import busy, tell
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.result.export import add_export_options
from kubetune.cli.result.export import show as show_export
from kubetune.config.resolved import read_config
from kubetune.result.publishing.push_target import (
    REPOSITORY,
    PushTarget,
    WantedPush,
    find_target,
    require_way,
)
from kubetune.rundir import metrics

Show = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory")
    parser.add_argument(
        "repo",
        nargs="?",
        metavar="ORG/NAME|oci://REGISTRY/NAME:TAG",
        help=f"repository on the hub, or image in a registry; left out: ${REPOSITORY}, or `push` of the run's config",
    )
    add_export_options(parser)
    parser.add_argument(
        "--public", action="store_true", help="make the repository public; it is private otherwise"
    )
    parser.add_argument(
        "--despite-gate",
        action="store_true",
        help="upload even if the result misses the run's evaluation.gate",
    )
    parser.add_argument(
        "--modelpack",
        action="store_true",
        help="oci://: push a ModelPack artifact, which CRI-O mounts (default: an image, which every runtime mounts)",
    )
    parser.add_argument(
        "--plain-http",
        action="store_true",
        help="oci://: connect without encryption, as always to a registry on this machine",
    )
    add_json(parser, "where it is as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Upload, and print the address. The run's events say how it ended."""
    heap.give_back()
    # Where to, and whether the result is good enough, is known before anything is exported.
    wanted = WantedPush(
        args.repo,
        merge=args.merge,
        public=args.public,
        despite_gate=args.despite_gate,
        modelpack=args.modelpack,
        plain_http=args.plain_http,
    )
    target = find_target(args.run_dir, wanted)
    title = read_config(args.run_dir).name or args.run_dir.name
    try:
        with stoppable():
            require_way(target)
            folder, facts = _exported(args, target)
            # The hub's library draws bars of its own.
            tell(f"uploading {folder} to {target.place}")
            if target.image is None:
                place, show = _to_hub(folder, target, title, facts)
            else:
                place, show = _to_registry(folder, target.image, title, as_modelpack=args.modelpack)
    except errors.KubetuneError as error:
        reason = scrub(str(error))
        metrics.record_event(args.run_dir, "push", repo=target.place, ok=False, reason=reason)
        raise

    metrics.record_event(
        args.run_dir,
        "push",
        ok=True,
        repo=target.place,
        url=place["url"],
        commit=place.get("commit") or place["digest"],
        **facts,
    )
    return Answer(place | facts, show)


def _to_hub(
    folder: Path, target: PushTarget, title: str, facts: dict[str, Any]
) -> tuple[dict[str, Any], Show]:
    """Upload an export to the hub. Return where it is, and what prints that."""
    from kubetune.result.publishing.hub_upload import upload

    message = f"{facts['kind'].capitalize()} of {title}, step {facts['step']}"
    pushed = upload(folder, target.place, private=target.private, message=message, tell=tell)

    def show() -> None:
        who_sees = "private" if pushed.private else "public"
        print(f"pushed to {pushed.url} ({who_sees}), commit {pushed.commit[:12]}")

    return {"url": pushed.url, "commit": pushed.commit, "private": pushed.private}, show


def _to_registry(
    folder: Path, address: Address, title: str, *, as_modelpack: bool
) -> tuple[dict[str, Any], Show]:
    """Send an export to a registry. Return where it is, and what prints that."""
    from kubetune.result.publishing.oci_image import push

    with busy("reading the export") as work:
        pushed = push(folder, address, title, as_modelpack=as_modelpack, tell=work.tell)

    def show() -> None:
        print(
            f"pushed to {address}, {pushed.digest}\n"
            f"{pushed.layers} layers of {size(pushed.size)}, {pushed.sent} sent now; "
            "what the registry gives back is the same"
        )

    place = {"url": str(address), "digest": pushed.digest, "layers": pushed.layers}
    return place | {"sent": pushed.sent, "bytes": pushed.size}, show


def _exported(args: argparse.Namespace, target: PushTarget) -> tuple[Path, dict[str, Any]]:
    """Return the export to send, which is made now unless it exists, with its kind and step."""
    with busy(f"loading what exports {visible(str(args.run_dir))}") as work:
        from kubetune.result.forms.wanted import WantedExport
        from kubetune.result.publishing.exporting import export_run
        from kubetune.result.publishing.written_export import find_export

        # An export of the same checkpoint in the same form is sent as it is.
        export = find_export(
            args.run_dir, args.checkpoint, merged=target.merge, dtype=args.dtype, model=args.model
        )
        if export is None:
            export = export_run(
                args.run_dir,
                args.checkpoint,
                WantedExport(merged=target.merge, dtype=args.dtype),
                device=args.device,
                model=args.model,
                trust_code=args.trust_code,
                tell=work.tell,
            )
            show_export(export)
        else:
            tell(f"{export.path} is exported already")
    return export.path, {"kind": export.kind, "step": export.facts["checkpoint"]["step"]}
