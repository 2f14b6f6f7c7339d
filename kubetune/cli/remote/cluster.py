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
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.remote.run_on_cluster import asker
from kubetune.cli.tables import print_table
from kubetune.errors import OK, ConfigError
from kubetune.plugins.nebius.cluster_file import HOURS_PER_MONTH, NebiusCluster, costs, load_cluster

if TYPE_CHECKING:
    from kubetune.plugins.nebius.provision import Provisioner, Record

GONE = "is not there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create", help="make what is not there yet; run again, it goes on where it stopped"
    )
    create.add_argument(
        "--dry-run", action="store_true", help="print it all as a bash script and do nothing"
    )
    status = actions.add_parser("status", help="what there is, how it stands, and what it costs")
    add_json(status, "it as JSON")
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
    """Do what `args.action` says. Raise ConfigError, EnvironmentFault."""
    config = load_cluster(args.file)
    if args.action == "create" and args.dry_run:
        from kubetune.plugins.nebius.script import script
        from kubetune.plugins.nebius.steps import steps

        sys.stdout.write(script(steps(config), config.context))
        return OK
    actions = {
        "create": _create,
        "status": _status,
        "credentials": _credentials,
        "delete": _delete,
    }
    with lock(args.file.with_suffix(".lock"), wait=False):
        return actions[args.action](args)


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


def _create(args: argparse.Namespace) -> int:
    from kubetune.plugins.nebius.steps import steps

    config = load_cluster(args.file)
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


def _credentials(args: argparse.Namespace) -> int:
    from kubetune.plugins.nebius.steps import credentials

    config = load_cluster(args.file)
    provisioner = _provisioner(args, config)
    if "cluster" not in provisioner.state.records:
        raise ConfigError(
            f"{provisioner.state.path} knows of no cluster; run `kubetune cluster create` first"
        )
    provisioner.create([credentials(config)])
    return OK


@prints_json
def _status(args: argparse.Namespace) -> Answer:
    """Ask Nebius for the state of everything that the state file knows."""
    from kubetune.plugins.nebius.steps import KINDS

    config = load_cluster(args.file)
    provisioner = _provisioner(args, config, quiet=True)
    things = []
    for key, record in provisioner.state.records.items():
        kind = KINDS[record.kind]
        if not kind.get or not kind.remove:
            continue
        answer = provisioner.look(record)
        thing = json.loads(answer.out) if answer else {}
        things.append(
            {
                "key": key,
                "what": kind.title,
                "name": record.name,
                "id": record.id,
                "state": _state(thing) if answer else GONE,
                "made_here": record.created,
                "created_at": thing.get("metadata", {}).get("created_at"),
            }
        )
    keys = {str(thing["key"]) for thing in things if thing["state"] != GONE}
    prices = [{"what": what, "per_hour": price} for what, price in costs(config, keys)]
    facts = {"things": things, "costs": prices, "currency": config.currency}
    return Answer(facts, lambda: _show_status(args.file, config, things, keys))


def _show_status(
    file: Path, config: NebiusCluster, things: Sequence[dict[str, Any]], keys: Collection[str]
) -> None:
    """Print a table of all things, and the costs of those that exist, which have these keys."""
    if not things:
        create = f"kubetune cluster create -f {shell_word(file)}"
        print(f"kubetune: nothing is known of {config.name}; `{create}` makes it")
        return
    rows = []
    for thing in things:
        made_here = "yes" if thing["made_here"] else "no"
        rows.append((thing["what"], thing["name"], thing["id"], thing["state"], made_here))
    print_table(("WHAT", "NAME", "ID", "STATE", "MADE HERE"), rows)
    if keys:
        for line in _bill(config, keys):
            print(line)
    for thing in things:
        if thing["key"] == "cluster" and thing["created_at"]:
            age = datetime.now(UTC) - datetime.fromisoformat(thing["created_at"])
            hours = age.total_seconds() / 3600
            print(f"kubetune: the cluster has existed for {hours:,.1f} hours")


def _state(thing: dict[str, Any]) -> str:
    """Return the state of a thing in Nebius's words, with the nodes of a node group."""
    status = thing.get("status", {})
    state = status.get("state", "exists")
    nodes = status.get("target_node_count", status.get("node_count"))
    if nodes is None:
        return str(state)
    return f"{state}, {status.get('ready_node_count', 0)} of {nodes} nodes ready"


def _delete(args: argparse.Namespace) -> int:
    config = load_cluster(args.file)
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
