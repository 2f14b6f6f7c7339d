"""`kubetune status`: the state of a namespace's runs, or all that is known of one."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import brief, visible
from kubetune.base.logs import scrub
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.remote.run_on_cluster import add_run, connect
from kubetune.cli.tables import print_table
from kubetune.errors import ConfigError

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster, Object
    from kubetune.k8s.cluster.cluster_runs import ObservedRun

# A longer reason that the headline says is not said again in the table.
_LONG_CELL = 100


POD_HEAD = ("POD", "NODE", "MACHINE", "PHASE", "RESTARTS", "AGE", "WHY")
RUN_HEAD = ("RUN", "KIND", "STATE", "PODS", "RESTARTS", "STEP", "LOSS", "TOKENS/S", "ETA", "WHY")


@dataclass(frozen=True)
class UnreadableRun:
    """A run whose config this version of kubetune cannot read. The other runs are shown all the same."""

    name: str
    why: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser, optional=True)
    add_json(parser, "everything as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Show one run, or all of a namespace. Raise ConfigError when there is no such run."""

    cluster, name = connect(args)
    from kubetune.k8s.cluster import run_status
    from kubetune.k8s.cluster.cluster_runs import observe
    from kubetune.k8s.cluster.run_lookup import find_run

    if name is None:
        return _all_runs(cluster)

    observed = observe(cluster, find_run(cluster, name))
    return Answer(run_status.facts(observed), lambda: _show_run(observed))


def _show_run(observed: ObservedRun) -> None:
    """Print the state of a run, its pods and its warnings."""
    from kubetune.k8s.cluster import run_status

    for line in run_status.headline(observed):
        print(visible(scrub(line)))

    # The pods that prepare come first, as they do in time.
    pods = [*observed.preparing, *observed.pods, *observed.samplers]
    if pods:
        print()
        print_table(POD_HEAD, [_pod_row(observed, pod) for pod in pods])
    for line in run_status.warning_lines(observed):
        print(visible(scrub(line)))


def _all_runs(cluster: Cluster) -> Answer:
    """Look at all runs of a namespace at once."""
    from kubetune.k8s.cluster.asking_pods import on_all
    from kubetune.k8s.cluster.cluster_runs import observe
    from kubetune.k8s.cluster.run_lookup import find_run, list_runs

    # An empty list may mean that the namespace does not exist, which is an error.
    names = list_runs(cluster)
    if not names:
        cluster.require_namespace()

    # One request after the other would take seconds for each run, so runs are looked at side by side.
    def look(name: str) -> ObservedRun | UnreadableRun:
        try:
            return observe(cluster, find_run(cluster, name))
        except ConfigError as error:
            return UnreadableRun(name, str(error))

    runs = on_all(look, names)

    def show() -> None:
        if runs:
            print_table(RUN_HEAD, [_run_row(observed) for observed in runs])
        else:
            print(f"no runs in namespace {cluster.namespace}")

    return Answer([_facts_of(observed) for observed in runs], show)


def _facts_of(observed: ObservedRun | UnreadableRun) -> dict[str, Any]:
    if isinstance(observed, UnreadableRun):
        return asdict(observed) | {"state": "unknown"}
    from kubetune.k8s.cluster.run_status import facts

    return facts(observed)


def _run_row(observed: ObservedRun | UnreadableRun) -> tuple[object, ...]:
    """Return the line of a run in the table of all."""
    if isinstance(observed, UnreadableRun):
        return observed.name, "", "unknown", observed.why

    from kubetune.k8s.cluster.run_status import facts, number_or

    run_facts = facts(observed)
    step = ""
    if run_facts["step"] is not None:
        step = f"{run_facts['step']}/{run_facts['steps'] or '?'}"
    running_pods = [pod for pod in run_facts["pods"] if pod["phase"] == "Running"]
    # The speed of a run that stands still says nothing about its end.
    time_left = ""
    if observed.state == "running":
        time_left = brief(run_facts["seconds_left"])

    return (
        run_facts["name"],
        run_facts["kind"],
        run_facts["state"],
        f"{len(running_pods)}/{run_facts['nodes']}",
        run_facts["restarts"],
        step,
        number_or(run_facts["loss"], ".4f", ""),
        number_or(run_facts["tokens_per_second"], ",.0f", ""),
        time_left,
        visible(run_facts["why"]),
    )


def _pod_row(observed: ObservedRun, pod: Object) -> tuple[object, ...]:
    from kubetune.k8s.cluster import pods
    from kubetune.k8s.cluster.run_status import events_of_pod, why

    status = pods.trainer_status(pod)
    age = brief(pods.age_seconds(pod["metadata"].get("creationTimestamp")))
    # The headline says already what to do.
    reason = pods.why(pod, events_of_pod(observed, pod), advise=False)
    # What is long stands there once, and here how it begins: `exit code 6`.
    beginning, _, rest = reason.partition(": ")
    if len(rest) > _LONG_CELL and rest in why(observed):
        reason = f"{beginning}, see above"
    place = str(pods.node_number(pod))
    if pod in observed.preparing:
        place = ""
    if any(host.name == pod["spec"].get("nodeName") for host in observed.lost_hosts):
        reason = reason or "its host is lost"
    if pod in observed.samplers:
        place = f"sampler {place}"
        reason = pods.why_server(pod, events_of_pod(observed, pod), advise=False)
    return (
        pods.name_of(pod),
        place,
        pod["spec"].get("nodeName"),
        pods.phase_of(pod),
        status.get("restartCount", 0),
        age,
        visible(reason),
    )
