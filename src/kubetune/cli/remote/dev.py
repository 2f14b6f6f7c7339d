"""`kubetune dev`: work in pods by hand. `start` makes pods that idle, `run` trains in them with this folder's code.

`stop` ends the training with a checkpoint, and `kubetune delete NAME-dev` gives the pods back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.cli.remote.exec import Marked
from kubetune.cli.remote.run_on_cluster import asker, message_on_leaving, prefix
from kubetune.errors import OK, USER, ConfigError
from kubetune.library.cluster_connection import open_cluster
from kubetune.supervisor.command_line import add_run_arguments, config_from_args, run_file

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.manifests.run_spec import RunSpec


_ACTIONS = ("start", "run", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "action",
        nargs="?",
        default="start",
        metavar="|".join(_ACTIONS),
        help="start (the default): make pods that idle; run: train in all of them, with the code of this folder; stop: "
        "end the training, the pods stay",
    )
    add_run_arguments(parser)
    more = parser.add_argument_group("cluster")
    more.add_argument(
        "-n",
        "--namespace",
        dest="kubernetes.namespace",
        metavar="NAME",
        help="namespace of the pods",
    )
    more.add_argument(
        "--fresh", action="store_true", help="run: set the run directory aside and begin anew"
    )
    more.add_argument("--yes", action="store_true", help="start: replace pods without asking")


def run(args: argparse.Namespace) -> int:
    """Carry out the action; `run` returns the exit code of the training. Raise ConfigError, EnvironmentFault."""
    from kubetune.k8s.cluster.submit import submit
    from kubetune.k8s.manifests import local_files
    from kubetune.k8s.manifests.run_spec import spec_of
    from kubetune.plugins.dev_pods import dev_config, idling

    # `dev RUN.YAML` is short for `dev start RUN.YAML`.
    if args.action not in _ACTIONS:
        if Path(args.action).suffix not in (".yaml", ".yml") and "=" not in args.action:
            raise ConfigError(
                f"command line: found {args.action!r}; expected {', '.join(_ACTIONS)}, or a run file"
            )
        args.inputs.insert(0, args.action)
        args.action = "start"

    config = dev_config(config_from_args(args, environ={}))
    assert config.kubernetes is not None
    files = local_files(config)
    cluster = open_cluster(config.kubernetes.namespace)
    spec = spec_of(config, files)

    if args.action == "start":
        submit(cluster, config, files, confirm=asker(args), change=idling)
        train = f"kubetune dev run {run_file(args) or '…'}"
        print(
            f"kubetune: {spec.nodes} pods of {spec.name} come up and idle; to train in them: {train}"
        )
        return OK
    if args.action == "run":
        return run_in_pods(cluster, spec, args)
    return stop_in_pods(cluster, spec)


def run_in_pods(cluster: Cluster, spec: RunSpec, args: argparse.Namespace) -> int:
    """Train in all pods, showing what they print. After Ctrl-C they go on; `dev stop` ends them."""
    from kubetune.k8s.api.client import say
    from kubetune.k8s.cluster.run_lookup import find_run
    from kubetune.plugins.dev_pods import all_running, follow_training, set_aside, start_training

    deployed = find_run(cluster, spec.name)
    # Pods have all files in one folder, so compare them by name.
    carried = {}
    for path, path_in_pod in spec.carried().items():
        carried[path_in_pod.rsplit("/", 1)[-1]] = spec.files[path]
    if carried != deployed.files:
        raise ConfigError(
            "the data files differ from those in the pods; bring them up to date: kubetune dev start"
        )

    # All pods see one run directory, so one of them sets it aside.
    targets = all_running(cluster, spec)
    if args.fresh:
        set_aside(cluster, spec, targets[0])
    start_training(cluster, spec, targets, Path.cwd())

    sinks = {}
    for target in targets:
        sinks[target] = Marked(sys.stdout.buffer, prefix(target.node, spec.nodes))
    with message_on_leaving("training goes on; kubetune dev stop ends it with a checkpoint"):
        codes = follow_training(cluster, targets, sinks.__getitem__)
    for sink in sinks.values():
        sink.end()

    # The first code that is not 0: the other nodes mostly ended because they lost this one.
    code = next((code for code in codes if code != OK), OK)
    if code == USER and not args.fresh:
        say("with --fresh it begins anew: the run directory is set aside")
    return code


def stop_in_pods(cluster: Cluster, spec: RunSpec) -> int:
    """End training in all pods with a checkpoint; the pods stay."""
    from kubetune.plugins.dev_pods import all_running, stop_training

    targets = all_running(cluster, spec)
    for target, code in zip(targets, stop_training(cluster, targets), strict=True):
        outcome = "no training ran" if code is None else f"training ended with exit code {code}"
        print(f"kubetune: node {target.node}: {outcome}")
    print(f"kubetune: the pods stay: kubetune delete {spec.typed} ends them")
    return OK
