"""`kubetune cluster`: make a Kubernetes cluster with GPUs and shared storage on Nebius, look at it, and delete it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.files import lock
from kubetune.base.humanize import shell_word
from kubetune.cli.json_answers import print_json
from kubetune.cli.remote.run_on_cluster import asker
from kubetune.cli.tables import print_table
from kubetune.errors import OK, ConfigError
from kubetune.plugins.nebius.cluster_file import HOURS_PER_MONTH, NebiusCluster, costs, load_cluster

if TYPE_CHECKING:
    from kubetune.plugins.nebius.provision import Provisioner, Record

GONE = "is not there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create", help="make what is not there yet; run again, it goes on where it stopped"
    )
    create.add_argument(
        "--dry-run", action="store_true", help="print it all as a bash script and do nothing"
    )
    status = actions.add_parser("status", help="what there is, how it stands, and what it costs")
    status.add_argument("--json", action="store_true", help="print it as JSON")
    credentials = actions.add_parser(
        "credentials", help="put the cluster into the kubeconfig, as a context of its own"
    )
    delete = actions.add_parser(
        "delete", help="remove what `create` made, and nothing else; asks first"
    )
    delete.add_argument(
        "--node-group",
        nargs="*",
        metavar="NAME",
        help="only these nodes, or without NAME all: gives back the GPUs and keeps the rest",
    )
    delete.add_argument("--yes", action="store_true", help="do not ask")
    for action in (create, status, credentials, delete):
        action.add_argument(
            "-f", "--file", required=True, metavar="FILE", type=Path, help="the cluster file"
        )


def run(args: argparse.Namespace) -> int:
    """Do what `args.action` says. Raises ConfigError, EnvironmentFault."""
    config = load_cluster(args.file)
    if args.action == "create" and args.dry_run:
        from kubetune.plugins.nebius.script import script
        from kubetune.plugins.nebius.steps import steps

        sys.stdout.write(script(steps(config), config.context))
        return OK
    with lock(args.file.with_suffix(".lock"), wait=False):
        return {
            "create": _create,
            "status": _status,
            "credentials": _credentials,
            "delete": _delete,
        }[args.action](args, config)


def _provisioner(
    args: argparse.Namespace, config: NebiusCluster, *, quiet: bool = False
) -> Provisioner:
    from kubetune.plugins.nebius.provision import INSTALL, Provisioner, State, require_programs

    is_nebius_enough = (
        args.action in ("status", "credentials") or getattr(args, "node_group", None) is not None
    )
    require_programs(["nebius"] if is_nebius_enough else list(INSTALL))
    state = State.read(args.file.with_suffix(".state.json"), config.context)

    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    return Provisioner(state, say, config.ready_minutes)


def _create(args: argparse.Namespace, config: NebiusCluster) -> int:
    from kubetune.plugins.nebius.steps import steps

    provisioner = _provisioner(args, config)
    for line in _bill(config):
        print(line)
    provisioner.create(steps(config))
    print(f"kubetune: {config.name} is ready: kubectl --context {config.context} get nodes")
    for claim in config.claims:
        print(
            f"kubetune: in run files: kubernetes.storage.outputs: {{claim: {claim.name}}}, namespace {claim.namespace}"
        )
    print(f"kubetune: what was made is in {provisioner.state.path}; keep it, `delete` needs it")
    return OK


def _credentials(args: argparse.Namespace, config: NebiusCluster) -> int:
    from kubetune.plugins.nebius.steps import credentials

    provisioner = _provisioner(args, config)
    if "cluster" not in provisioner.state.records:
        raise ConfigError(
            f"{provisioner.state.path} knows of no cluster; run `kubetune cluster create` first"
        )
    provisioner.create([credentials(config)])
    return OK


def _status(args: argparse.Namespace, config: NebiusCluster) -> int:
    from kubetune.plugins.nebius.steps import KINDS

    provisioner = _provisioner(args, config, quiet=True)
    rows = []
    for key, record in provisioner.state.records.items():
        kind = KINDS[record.kind]
        if not kind.get or not kind.remove:
            continue
        answer = provisioner.look(record)
        found = json.loads(answer.out) if answer else {}
        rows.append(
            {
                "key": key,
                "what": kind.title,
                "name": record.name,
                "id": record.id,
                "state": _state(found) if answer else GONE,
                "made_here": record.created,
                "created_at": found.get("metadata", {}).get("created_at"),
            }
        )
    there = {row["key"] for row in rows if row["state"] != GONE}
    prices = [{"what": what, "per_hour": price} for what, price in costs(config, there)]
    if args.json:
        print_json({"things": rows, "costs": prices, "currency": config.currency})
        return OK
    if not rows:
        print(
            f"kubetune: nothing is known of {config.name}; `kubetune cluster create -f {shell_word(args.file)}` makes it"
        )
        return OK
    head = ("WHAT", "NAME", "ID", "STATE", "MADE HERE")
    print_table(
        head,
        [
            (r["what"], r["name"], r["id"], r["state"], "yes" if r["made_here"] else "no")
            for r in rows
        ],
    )
    if there:
        for line in _bill(config, there):
            print(line)
    if since := next((r["created_at"] for r in rows if r["key"] == "cluster"), None):
        hours = (datetime.now(UTC) - datetime.fromisoformat(str(since))).total_seconds() / 3600
        print(f"kubetune: the cluster has been there for {hours:,.1f} hours")
    return OK


def _state(found: dict[str, Any]) -> str:
    status = found.get("status", {})
    nodes = status.get("target_node_count", status.get("node_count"))
    ready = (
        f", {status.get('ready_node_count', 0)} of {nodes} nodes ready" if nodes is not None else ""
    )
    return f"{status.get('state', 'there')}{ready}"


def _delete(args: argparse.Namespace, config: NebiusCluster) -> int:
    provisioner = _provisioner(args, config)
    if args.node_group is not None:
        return _delete_nodes(args, config, provisioner)
    doomed = list(provisioner.doomed())
    if not doomed:
        print(
            f"kubetune: {provisioner.state.path} knows of nothing that was made here; nothing was deleted"
        )
        return OK
    print("kubetune: of what is known:")
    _show(doomed)
    if any(record.kind == "filesystem" and record.created for _, record, _ in doomed):
        print("kubetune: all files on the shared filesystem are lost for ever")
    print(
        "kubetune: disks of claims with another storage class stay and cost: delete such claims first",
        flush=True,
    )
    if not asker(args)(f"Delete {config.name}"):
        raise ConfigError("nothing was deleted")
    provisioner.delete()
    print(f"kubetune: done; the context {config.context} may still be in your kubeconfig")
    return OK


def _delete_nodes(args: argparse.Namespace, config: NebiusCluster, provisioner: Provisioner) -> int:
    """Give back nodes, those named or all, and with them the GPU clusters that were made for them."""
    keys = [key.partition("/") for key in provisioner.state.records]
    known = list(
        dict.fromkeys(name for kind, _, name in keys if kind in ("node-group", "gpu-cluster"))
    )
    if unknown := sorted(set(args.node_group) - set(known)):
        raise ConfigError(
            f"{provisioner.state.path} knows of no nodes {', '.join(unknown)}, but of {', '.join(known) or 'none'}. "
            "Nothing was deleted."
        )
    wanted = set()
    for name in args.node_group or known:
        nodes = provisioner.state.records.get(f"node-group/{name}")
        # What was made for nodes that stay is theirs.
        stays = nodes is not None and nodes.id is not None and not nodes.created
        wanted |= {f"node-group/{name}"} | (set() if stays else {f"gpu-cluster/{name}"})
    doomed = list(provisioner.doomed(wanted))
    if not any(record.created and record.id for _, record, _ in doomed):
        print(
            f"kubetune: {provisioner.state.path} knows of no nodes that were made here; nothing was deleted"
        )
        return OK
    print("kubetune: of what is known:")
    _show(doomed)
    print(
        "kubetune: what runs on these nodes is stopped, and their boot disks go; all else stays",
        flush=True,
    )
    if not asker(args)(f"Delete nodes of {config.name}"):
        raise ConfigError("nothing was deleted")
    provisioner.delete(wanted)
    print(f"kubetune: done; kubetune cluster create -f {shell_word(args.file)} makes them again")
    return OK


def _show(doomed: Sequence[tuple[str, Record, str]]) -> None:
    from kubetune.plugins.nebius.steps import KINDS

    for _, record, fate in doomed:
        print(
            f"  {f'{KINDS[record.kind].title} {record.name}'.strip()} ({record.id or 'no id'}): {fate}"
        )


def _bill(config: NebiusCluster, there: Collection[str] | None = None) -> Iterator[str]:
    """Cost of the cluster by the prices that the file states, and what has no price there.

    `there`: only of the parts with these keys.
    """
    parts = list(costs(config, there))
    if not parts:
        return
    total = sum(price for _, price in parts if price is not None)
    if not any(price is not None for _, price in parts):
        yield "kubetune: the cluster file states no prices, so no cost can be told; it does cost from now on"
        return
    for what, price in parts:
        yield f"  {what:<50} " + (
            "no price stated" if price is None else f"{price:8.3f} {config.currency}/h"
        )
    known = "" if all(price is not None for _, price in parts) else " and what has no price"
    yield (
        f"kubetune: {total:,.2f} {config.currency} an hour, {total * 24:,.0f} a day, "
        f"{total * HOURS_PER_MONTH:,.0f} a month{known}"
    )
