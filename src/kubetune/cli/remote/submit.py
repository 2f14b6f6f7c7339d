"""`kubetune submit`: run on a cluster what `kubetune train` runs here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.cli.remote.render import SMOKE_HELP, rendered
from kubetune.cli.remote.run_on_cluster import asker, local_folder, message_on_leaving
from kubetune.k8s.manifests import KINDS, dump
from kubetune.k8s.manifests.run_spec import plan_without_data
from kubetune.k8s.manifests.smoke_manifests import testing
from kubetune.library.cluster_connection import open_cluster
from kubetune.library.clusters import check_data
from kubetune.supervisor.command_line import add_run_arguments

if TYPE_CHECKING:
    from kubetune.config.schema import Config
    from kubetune.k8s.api.client import Cluster
    from kubetune.k8s.cluster.cluster_runs import ObservedRun
    from kubetune.k8s.cluster.log_follow import Source
    from kubetune.k8s.cluster.submit import JobRef
    from kubetune.k8s.manifests.run_spec import Manifest, RunSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run_arguments(parser)

    target = parser.add_argument_group("cluster")
    target.add_argument("--kind", dest="kubernetes.kind", choices=KINDS, help="what runs the pods")
    target.add_argument(
        "-n",
        "--namespace",
        dest="kubernetes.namespace",
        metavar="NAME",
        help="namespace of the run",
    )
    target.add_argument(
        "--dry-run",
        choices=("client", "server"),
        nargs="?",
        const="server",
        help="client: print the manifests; server: have the cluster check them; neither changes anything",
    )
    target.add_argument("--smoke", action="store_true", help=SMOKE_HELP)
    target.add_argument(
        "--no-check",
        action="store_true",
        help="do not check first that the data files on this machine can be read",
    )
    target.add_argument(
        "--wait", action="store_true", help="wait until the run ends, and exit with its code"
    )
    target.add_argument("--follow", action="store_true", help="as --wait, and show the logs")
    target.add_argument(
        "--yes", action="store_true", help="replace pods of this run without asking"
    )


def run(args: argparse.Namespace) -> int:
    """Submit; returns 0, or with --wait the exit code of the run. Raise ConfigError, EnvironmentFault."""
    # The same checks as `render`, so nothing that is wrong reaches the cluster.
    config, files, objects, _ = rendered(args, strict=False)

    if args.dry_run == "client":
        print(dump(objects), end="")
        return errors.OK

    # A mistake in the data would show only when pods hold GPUs.
    if not (args.no_check or args.smoke):
        check_data(chain(*config.sources.values()), files, skip_option="--no-check")
    assert config.kubernetes is not None
    cluster = open_cluster(config.kubernetes.namespace)
    return submit_config(cluster, config, files, args)


def submit_config(
    cluster: Cluster, config: Config, files: dict[str, str], args: argparse.Namespace
) -> int:
    """Apply the objects, print the outcome, and wait where that was asked for."""
    from kubetune.k8s.cluster.submit import submit
    from kubetune.k8s.manifests.run_spec import spec_of

    # The smoke test runs in the same pods, with another command.
    change: Callable[[list[Manifest]], list[Manifest]] = _unchanged
    if args.smoke:
        change = partial(testing, plan=plan_without_data(config))
    job = submit(
        cluster,
        config,
        files,
        confirm=asker(args),
        dry_run=args.dry_run == "server",
        change=change,
        wait=_waiter_for_preparation(cluster, show_logs=args.follow),
    )

    where = f"{job.kind} {job.name} in namespace {job.namespace}"
    if job.outcome == "checked":
        print(f"kubetune: the cluster would accept {_checked(job, where)}. Nothing was changed.")
        return errors.OK

    # How other commands name this run, for the hints below.
    typed = f"{job.name} -n {job.namespace}"
    states = {
        "done": ", which is done",
        "stopped": f", which is stopped: kubetune resume {typed}",
    }
    outcome = f"was {job.outcome}"
    if job.outcome == "unchanged":
        outcome = f"was there already{states.get(job.state, '')}"
    print(f"kubetune: {where} {outcome}", flush=True)

    if args.wait or args.follow:
        return wait_for_end(cluster, spec_of(config, files), show_logs=args.follow)
    print(f"kubetune: see kubetune status {typed}, and kubetune logs -f {typed}")
    return errors.OK


def _checked(job: JobRef, where: str) -> str:
    """Return what a dry run has checked, and what it could not."""
    if not job.unchecked:
        return where
    rest = ", ".join(job.unchecked)
    return (
        f"what it can check of {where}; it cannot check {rest} before the object exists that it refers to. submit checks "
        "that first, and removes all again if it is refused"
    )


def _unchanged(objects: list[Manifest]) -> list[Manifest]:
    return objects


def _silent(source: Source, text: str) -> None:
    """Print nothing. Logs are read all the same, to keep them: those of pods vanish with them."""


def _waiter_for_preparation(cluster: Cluster, *, show_logs: bool) -> Callable[[RunSpec], None]:
    """Return a function that waits for the Job that prepares a run. Ctrl-C ends the waiting, not the Job."""
    from kubetune.cli.remote.logs import printer, teller
    from kubetune.k8s.api.client import say
    from kubetune.k8s.cluster.log_follow import wait_for_job
    from kubetune.k8s.manifests.initialisers import preprocess_name

    def wait(spec: RunSpec) -> None:
        name = preprocess_name(spec)
        say(
            f"Job {name} fetches and prepares first; should this command end, submit again to go on"
        )
        emit: Callable[[Source, str], None] = _silent
        if show_logs:
            emit = printer(spec)
        fate = f"Job {name} goes on, but trains nothing after it; submit again for that"
        with message_on_leaving(fate):
            wait_for_job(cluster, spec, emit, teller(cluster, spec))

    return wait


def wait_for_end(cluster: Cluster, spec: RunSpec, *, show_logs: bool) -> int:
    """Follow a run to its end, telling what it waits for; returns its exit code. Ctrl-C leaves it running."""
    from kubetune.cli.remote.logs import printer, teller
    from kubetune.k8s.cluster.cluster_runs import observe
    from kubetune.k8s.cluster.log_follow import LogFollower, follow_to_end
    from kubetune.k8s.cluster.run_status import headline

    keep = local_folder(spec) / "logs" / "pods"
    emit: Callable[[Source, str], None] = _silent
    if show_logs:
        emit = printer(spec)
    with message_on_leaving(f"{spec.name} goes on; kubetune stop {spec.typed} would stop it"):
        follower = LogFollower(cluster, spec, emit, keep=keep, look=teller(cluster, spec))
        follow_to_end(cluster, follower)

    observed = observe(cluster, spec)
    for line in headline(observed):
        print(line)
    return exit_code(observed)


def exit_code(observed: ObservedRun) -> int:
    """Return the exit code of a run that has ended: its own, else that of the pod that the headline names as the cause.

    Where no pod tells, the cluster has ended it: its deadline was over, or somebody deleted it.
    """
    from kubetune.k8s.cluster import pods
    from kubetune.k8s.cluster.cluster_runs import exit_status_in

    if observed.state == "done":
        return errors.OK
    if observed.state == "stopped":
        return errors.PREEMPTED
    exit_status = exit_status_in(observed.progress)
    if exit_status:
        return int(exit_status["code"])
    # Progress that a dead pod left behind has no exit status.
    guilty = pods.culprit(observed.pods or observed.preparing)
    code = None
    if guilty is not None:
        code = pods.exit_code(guilty)
    return code or errors.ENVIRONMENT
