"""`kubetune stop`: have a run save a checkpoint and end, on a cluster or on this machine.

On a cluster it gives up its nodes. `kubetune resume` continues a run of a cluster, `kubetune train` one of this machine.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune.base.humanize import shell_word, visible
from kubetune.cli.remote.run_on_cluster import add_run, find, message_on_leaving
from kubetune.errors import OK, ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster, Object
    from kubetune.k8s.cluster.log_follow import LogFollower
    from kubetune.k8s.manifests.run_spec import RunSpec
    from kubetune.rundir.exit_status import ExitStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser, or_folder=True)
    parser.add_argument(
        "--no-wait", action="store_true", help="do not wait until the run has saved and ended"
    )


def run(args: argparse.Namespace) -> int:
    """Stop the run, and print the last message of each node. Raise ConfigError when the run is not running."""
    if args.namespace is None and Path(args.run_name).is_dir():
        return _stop_here(Path(args.run_name), wait=not args.no_wait)
    cluster, spec = find(args)
    from kubetune.k8s.cluster.asking_pods import read_progress
    from kubetune.k8s.cluster.cluster_runs import trainer_pods
    from kubetune.k8s.cluster.stopping import stop
    from kubetune.k8s.cluster.termination import note_progress

    # Progress is read before the pods go and kept on the ConfigMap of the run, where `status` finds it.
    trainers = trainer_pods(cluster, spec)
    progress = read_progress(cluster, spec, trainers)

    def ask() -> None:
        with message_on_leaving(f"{spec.name} may not have been asked to stop; repeat the command"):
            stop(cluster, spec)
        if progress:
            with message_on_leaving(_going_on(spec)):
                note_progress(cluster, spec, progress)

    if args.no_wait:
        ask()
        print(f"kubetune: {spec.name} was asked to save and stop")
        return OK
    _stop_and_wait(cluster, spec, trainers, ask)
    print(
        f"kubetune: {spec.name} is stopped and holds no node; go on: kubetune resume {spec.typed}"
    )
    return OK


def _stop_and_wait(
    cluster: Cluster, spec: RunSpec, trainers: Sequence[Object], ask: Callable[[], None]
) -> None:
    """Ask a run to stop, wait until its pods are gone, and print what each node printed last."""
    from kubetune.k8s.api.api_errors import ApiError
    from kubetune.k8s.cluster.log_follow import LogFollower, Source
    from kubetune.k8s.cluster.pods import has_ended
    from kubetune.k8s.cluster.stopping import Departure
    from kubetune.k8s.cluster.termination import left_progress, note_progress

    # The last line that each node printed.
    last: dict[int, str] = {}

    def remember(source: Source, text: str) -> None:
        # The agent's own last line only repeats the exit code.
        if text.strip() and not text.startswith("kubetune: ended"):
            last[source.node] = text

    def show_last() -> None:
        for node, text in sorted(last.items()):
            print(f"node {node}: {text}", flush=True)

    # A Job keeps pods of earlier starts, whose words are not of this end.
    earlier = {pod["metadata"]["uid"] for pod in trainers if has_ended(pod)}

    def note_newest() -> None:
        # The pods may have written newer progress when they ended.
        newest = left_progress(follower.pods_seen())
        if newest:
            note_progress(cluster, spec, newest)

    departure = Departure(cluster, spec)
    follower = LogFollower(
        cluster,
        spec,
        remember,
        wanted=lambda pod: pod["metadata"]["uid"] not in earlier,
        check=departure.look_at_all,
    )
    # Pods may save and be gone before the next request, and their logs with them.
    with follower.opened():
        ask()
        try:
            with message_on_leaving(_going_on(spec)):
                _wait_until_gone(cluster, spec, follower)
        except ApiError:
            show_last()
            raise
        except EnvironmentFault:
            # A pod stays, as on a lost host. The others have saved.
            note_newest()
            show_last()
            raise
    note_newest()
    show_last()


def _going_on(spec: RunSpec) -> str:
    """Return what becomes of a run that was asked to stop by a command which ends early."""
    return f"{spec.name} saves and stops all the same; see kubetune status {spec.typed}"


def _wait_until_gone(cluster: Cluster, spec: RunSpec, follower: LogFollower) -> None:
    """Read all logs and wait until no pod is left. Raise EnvironmentFault where one stays."""
    from kubetune.k8s.cluster.log_follow import UnreadableLog
    from kubetune.k8s.cluster.stopping import wait_gone

    try:
        follower.read_to_end()
    except UnreadableLog as error:
        cluster.tell_once(str(error))
    wait_gone(cluster, spec)


def _stop_here(run_dir: Path, *, wait: bool) -> int:
    """Ask the processes of a run of this machine to save and end. Raise ConfigError where none of them runs."""
    import psutil

    from kubetune.config.resolved import read_config
    from kubetune.rundir.exit_status import read_exit_status
    from kubetune.supervisor.place import holders

    # It raises ConfigError for a folder that is no run directory.
    read_config(run_dir)
    processes = holders(run_dir)
    ended = read_exit_status(run_dir)
    if not processes and ended is not None:
        raise ConfigError(f"{run_dir} has ended already: {_how(ended)}")
    if not processes:
        raise ConfigError(
            f"{run_dir}, a folder here, does not run on this machine; stop it where it was started. "
            "A run on a cluster is named with -n NAMESPACE"
        )
    for process in processes:
        process.send_signal(signal.SIGTERM)
    if not wait:
        print(visible(f"kubetune: {run_dir} was asked to save and stop"))
        return OK
    with message_on_leaving(
        f"{run_dir} saves and stops all the same; see kubetune watch {shell_word(run_dir)}"
    ):
        psutil.wait_procs(processes)
    ended = read_exit_status(run_dir)
    ending = "" if ended is None else f": {_how(ended)}"
    print(visible(f"kubetune: {run_dir} has ended{ending}"))
    return OK


def _how(ended: ExitStatus) -> str:
    """Return how a run ended. The reason of a stop says itself that it is one."""
    if ended.reason.startswith(ended.state):
        return ended.reason
    return f"{ended.state}, {ended.reason}"
