"""`kubetune cluster`: make a Kubernetes cluster with GPUs and shared storage on Nebius, look at it, and delete it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import shell_word
from kubetune.base.locks import lock
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.remote.run_on_cluster import asker
from kubetune.cli.tables import print_table
from kubetune.errors import OK, ConfigError
from kubetune.plugins.nebius.cluster_file import NebiusCluster, load_cluster

if TYPE_CHECKING:
    from kubetune.plugins.nebius.provision import Provisioner

GONE = "is not there"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser(
        "create", help="create what does not exist yet; run it again to continue after a stop"
    )
    create.add_argument(
        "--dry-run", action="store_true", help="print the commands as a bash script and do nothing"
    )

    status = actions.add_parser("status", help="show what exists, and its state")
    add_json(status, "it as JSON")

    credentials = actions.add_parser(
        "credentials", help="add the cluster to the kubeconfig, as a new context"
    )

    delete = actions.add_parser(
        "delete", help="remove what `create` made, and nothing else; asks first"
    )
    delete.add_argument(
        "--node-group",
        nargs="*",
        metavar="NAME",
        help="delete only this node group; without NAME, all of them. Frees the GPUs and keeps the rest",
    )
    delete.add_argument("--yes", action="store_true", help="do not ask")

    for action in (create, status, credentials, delete):
        action.add_argument(
            "-f", "--file", required=True, metavar="FILE", type=Path, help="the cluster file"
        )


def run(args: argparse.Namespace) -> int:
    """Do what `args.action` says. Raise ConfigError, EnvironmentFault."""
    if args.action == "status":
        # It changes nothing, so it may look on while another command creates.
        return _status(args)
    config = load_cluster(args.file)
    if args.action == "create" and args.dry_run:
        from kubetune.plugins.nebius.script import script
        from kubetune.plugins.nebius.steps import steps

        sys.stdout.write(script(steps(config)))
        return OK
    actions = {"create": _create, "credentials": _credentials, "delete": _delete}
    # Two that create at once would make everything twice.
    with lock(args.file.with_suffix(".lock"), wait=False):
        return actions[args.action](args, config)


def _provisioner(args: argparse.Namespace, *, quiet: bool = False) -> Provisioner:
    from kubetune.plugins.nebius.provision import (
        INSTALL,
        Provisioner,
        ProvisionState,
        require_programs,
    )

    # Looking and deleting nodes needs no helm.
    only_looks = args.action in ("status", "credentials")
    deletes_nodes = getattr(args, "node_group", None) is not None
    programs = list(INSTALL)
    if only_looks or deletes_nodes:
        programs = ["nebius"]
    require_programs(programs)
    state = ProvisionState.read(args.file.with_suffix(".state.json"))

    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    return Provisioner(state, say)


def _create(args: argparse.Namespace, config: NebiusCluster) -> int:
    from kubetune.plugins.nebius.steps import STORAGE_CLASS, steps

    provisioner = _provisioner(args)
    provisioner.create(steps(config))
    print(f"kubetune: {config.name} is ready: kubectl --context {config.context} get nodes")
    # What a run file must say to write to the shared storage.
    if config.filesystem is not None:
        print(
            "kubetune: in run files: kubernetes.storage.outputs: "
            f"{{size: 1Ti, storage_class: {STORAGE_CLASS}}}"
        )
    print(f"kubetune: what was made is in {provisioner.state.path}; keep it, `delete` needs it")
    return OK


def _credentials(args: argparse.Namespace, config: NebiusCluster) -> int:
    from kubetune.plugins.nebius.steps import credentials

    provisioner = _provisioner(args)
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
    provisioner = _provisioner(args, quiet=True)
    things = []
    for key, record in provisioner.state.records.items():
        # Somebody may have deleted it by other means.
        thing = provisioner.look(record)
        state = GONE
        created_at = None
        if thing is not None:
            state = _state(thing)
            created_at = thing["metadata"].get("created_at")
        things.append(
            {
                "key": key,
                "what": KINDS[record.kind].title,
                "name": record.name,
                "id": record.id,
                "state": state,
                "made_here": record.created,
                "created_at": created_at,
            }
        )
    return Answer({"things": things}, lambda: _show_status(args.file, config, things))


def _show_status(file: Path, config: NebiusCluster, things: Sequence[dict[str, Any]]) -> None:
    """Print a table of all things."""
    if not things:
        create = f"kubetune cluster create -f {shell_word(file)}"
        print(f"kubetune: nothing is known of {config.name}; `{create}` makes it")
        return
    rows = []
    for thing in things:
        made_here = "no"
        if thing["made_here"]:
            made_here = "yes"
        rows.append((thing["what"], thing["name"], thing["id"], thing["state"], made_here))
    print_table(("WHAT", "NAME", "ID", "STATE", "MADE HERE"), rows)

    # Nebius bills by the hour.
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


def _delete(args: argparse.Namespace, config: NebiusCluster) -> int:
    provisioner = _provisioner(args)
    if args.node_group is not None:
        return _delete_nodes(args, config, provisioner)
    # The newest record comes last; deletion goes backwards, as later things depend on earlier ones.
    keys = list(provisioner.state.records)
    if not keys:
        print(
            f"kubetune: {provisioner.state.path} knows of nothing that was made here; nothing was deleted"
        )
        return OK

    # Say what would be lost, ask, and only then delete.
    if "filesystem" in _show_fates(provisioner, keys):
        print("kubetune: all files on the shared filesystem are lost for ever")
    print(
        "kubetune: disks of claims with another storage class stay and cost: delete such claims first",
        flush=True,
    )
    if not asker(args)(f"Delete {config.name}"):
        raise ConfigError("nothing was deleted")
    provisioner.delete(keys)
    provisioner.state.path.unlink()
    print(f"kubetune: done; the context {config.context} may still be in your kubeconfig")
    return OK


def _delete_nodes(args: argparse.Namespace, config: NebiusCluster, provisioner: Provisioner) -> int:
    """Give back nodes, those named or all, and with them the GPU clusters that were made for them."""
    path = provisioner.state.path
    records = provisioner.state.records
    # A node group may have a GPU cluster of the same name, which is of no use without it.
    of_nodes = [key for key in records if key.startswith(("node-group/", "gpu-cluster/"))]
    known = list(dict.fromkeys(records[key].name for key in of_nodes))
    unknown = sorted(set(args.node_group) - set(known))
    if unknown:
        raise ConfigError(
            f"{path} knows of no nodes {', '.join(unknown)}, but of {', '.join(known) or 'none'}. "
            "Nothing was deleted."
        )

    wanted = []
    for key in of_nodes:
        name = records[key].name
        nodes = records.get(f"node-group/{name}")
        # What was made for nodes that stay is theirs.
        stay = nodes is not None and nodes.id is not None and not nodes.created
        if name in (args.node_group or known) and not stay:
            wanted.append(key)
    if not wanted:
        print(f"kubetune: {path} knows of no nodes that were made here; nothing was deleted")
        return OK

    _show_fates(provisioner, wanted)
    print(
        "kubetune: what runs on these nodes is stopped, and their boot disks go; all else stays",
        flush=True,
    )
    if not asker(args)(f"Delete nodes of {config.name}"):
        raise ConfigError("nothing was deleted")
    provisioner.delete(wanted)
    print(f"kubetune: done; kubetune cluster create -f {shell_word(args.file)} makes them again")
    return OK


def _show_fates(provisioner: Provisioner, keys: Sequence[str]) -> list[str]:
    """Print what will become of the things with these keys; return the keys of those that are deleted."""
    print("kubetune: of what is known:")
    doomed = []
    for key in reversed(keys):
        record = provisioner.completed(key)
        fate = "is deleted"
        if record.id is None:
            fate = "was never made"
        elif not record.created:
            fate = "stays: it was not made here"
        else:
            doomed.append(key)
        print(f"  {record.title}: {fate}")
    return doomed
