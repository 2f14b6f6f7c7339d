"""`kubetune status`: how the runs of a namespace stand, or all that is known of one."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import brief, counted, visible
from kubetune.cli.json_answers import print_json
from kubetune.cli.remote.run_on_cluster import add_run, connect
from kubetune.cli.tables import print_table
from kubetune.errors import OK, ConfigError, only_followed

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster, Object
    from kubetune.k8s.cluster.runs import ObservedRun

_SHOWN_EVENTS = 5
_SAME_END_SECONDS = 900.0
# A longer reason gets a line of its own.
_LONG_REASON = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Print how things stand. Raises ConfigError when there is no such run."""
    cluster, name = connect(args)
    from kubetune.k8s.cluster.runs import find_run, list_runs, observe, on_all

    if name is None:
        names = list_runs(cluster)
        if not names:
            cluster.require_namespace()

        def look(found: str) -> ObservedRun | Unread:
            try:
                return observe(cluster, find_run(cluster, found))
            except ConfigError as error:
                return Unread(found, str(error))

        _print_runs(cluster, on_all(look, names), as_json=args.json)
        return OK
    observed = observe(cluster, find_run(cluster, name))
    if args.json:
        print_json(facts(observed))
        return OK
    for line in headline(observed):
        print(visible(line))
    if there := [*observed.preparing, *observed.pods]:
        print()
        print_table(
            ("POD", "NODE", "MACHINE", "PHASE", "RESTARTS", "AGE", "WHY"),
            [_row(observed, p) for p in there],
        )
    for line in warning_lines(observed):
        print(visible(line))
    return OK


def warning_lines(observed: ObservedRun) -> Iterator[str]:
    """The last warnings, and how many came before them."""
    from kubetune.k8s.cluster import pods

    news, times = _without_repeats(_news(observed))
    if len(news) > _SHOWN_EVENTS:
        earlier = sum(times[_kind_of(event)] for event in news[:-_SHOWN_EVENTS])
        said = f"{counted(earlier, 'earlier warning')}: kubetune events {observed.spec.name}"
        yield f"! {said} -n {observed.spec.kubernetes.namespace}"
    for event in news[-_SHOWN_EVENTS:]:
        said = f"{event.get('reason') or '?'}: {pods.words_of(event)}"
        if times[_kind_of(event)] > 1:
            said += f" ({times[_kind_of(event)]} times)"
        yield f"! {brief(pods.age_seconds(pods.event_time(event)))} ago, {pods.about(event).get('name') or '?'}: {said}"


def _kind_of(event: Object) -> tuple[str, str, str]:
    """Return what events have in common that say the same."""
    from kubetune.k8s.cluster import pods

    about = str(pods.about(event).get("name"))
    return about, str(event.get("reason")), pods.without_names(pods.words_of(event))


def _without_repeats(
    events: Sequence[Object],
) -> tuple[list[Object], Counter[tuple[str, str, str]]]:
    """Return the last of all events that say the same, in order, and how many there were of each."""
    last: dict[tuple[str, str, str], Object] = {}
    for event in events:
        last.pop(_kind_of(event), None)
        last[_kind_of(event)] = event
    return list(last.values()), Counter(map(_kind_of, events))


@dataclass(frozen=True)
class Unread:
    """A run whose config this version of kubetune cannot read: it hides none of the others."""

    name: str
    why: str


def _print_runs(cluster: Cluster, runs: Sequence[ObservedRun | Unread], *, as_json: bool) -> None:
    if as_json:
        every = [
            {**asdict(s), "state": "unknown"} if isinstance(s, Unread) else facts(s) for s in runs
        ]
        print_json(every)
    elif not runs:
        print(f"no runs in namespace {cluster.namespace}")
    else:
        rows: list[tuple[object, ...]] = []
        for observed in runs:
            if isinstance(observed, Unread):
                rows.append((observed.name, "", "unknown", observed.why))
                continue
            told = facts(observed)
            step = f"{told['step']}/{told['steps'] or '?'}" if told["step"] is not None else ""
            eta = brief(told["seconds_left"]) if observed.state == "running" else ""
            there = f"{sum(pod['phase'] == 'Running' for pod in told['pods'])}/{told['nodes']}"
            numbers = [
                _number(told[key], form, "")
                for key, form in (("loss", ".4f"), ("tokens_per_second", ",.0f"))
            ]
            rows.append(
                (
                    told["name"],
                    told["kind"],
                    told["state"],
                    there,
                    told["restarts"],
                    step,
                    *numbers,
                    eta,
                    visible(told["why"]),
                )
            )
        print_table(
            ("RUN", "KIND", "STATE", "PODS", "RESTARTS", "STEP", "LOSS", "TOKENS/S", "ETA", "WHY"),
            rows,
        )


def facts(observed: ObservedRun) -> dict[str, Any]:
    """Facts that `--json` prints: everything, with None for what is not known."""
    from kubetune.k8s.cluster import pods
    from kubetune.k8s.cluster.runs import workload_kind

    progress = observed.progress or {}
    restarts = progress.get("restarts")
    if restarts is None:
        restarts = ((observed.workload or {}).get("status") or {}).get("restarts")
    return {
        "name": observed.spec.name,
        "namespace": observed.spec.kubernetes.namespace,
        "kind": workload_kind(observed.spec),
        "state": observed.state,
        "why": why(observed),
        "nodes": observed.spec.nodes,
        "restarts": restarts,
        "phase": progress.get("phase"),
        "starting": progress.get("starting"),
        "step": progress.get("step"),
        "steps": progress.get("steps"),
        "loss": progress.get("loss"),
        "tokens_per_second": progress.get("tokens_per_second"),
        "seconds_left": progress.get("seconds_left"),
        "evaluation": progress.get("evaluation"),
        "saved_step": progress.get("saved_step"),
        "last_exit": progress.get("last_exit"),
        "cause": observed.cause,
        "not_asked": observed.silence or None,
        "pods": [
            {
                "name": pods.name_of(pod),
                "node": pods.node_number(pod),
                "machine": pod["spec"].get("nodeName"),
                "phase": pods.phase_of(pod),
                "restarts": pods.trainer_status(pod).get("restartCount", 0),
                "exit_code": pods.exit_code(pod),
                "why": pods.why(pod, _events_of(observed, pod)),
            }
            for pod in observed.pods
        ],
        "warnings": [pods.words_of(event) for event in _warnings(observed)],
    }


def why(observed: ObservedRun) -> str:
    """Reason why a run is not running: the cause of its end, or what it waits for."""
    from kubetune.k8s.cluster import pods

    if observed.state == "done":
        return _reservation(observed)
    if observed.state in ("running", "stopped"):
        return ""
    if observed.state == "absent":
        return "its pods were removed; submit it again to go on with it"
    reasons = [
        reason for pod in observed.pods if (reason := pods.why(pod, _events_of(observed, pod)))
    ]
    if observed.state == "failed":
        guilty = pods.culprit(observed.pods)
        told = pods.message_of(guilty) if guilty else None
        if told and told["reason"]:
            return str(told["reason"])
        if guilty and pods.node_number(guilty) and not pods.only_followed(guilty):
            return f"{pods.name_of(guilty)}: {pods.why(guilty)}"
        return next(iter(reasons), observed.reason)
    # Pods of earlier starts are there still; why the next do not come is asked here.
    coming = [pod for pod in observed.pods if not pods.has_ended(pod)]
    coming_reasons = [
        reason for pod in coming if (reason := pods.why(pod, _events_of(observed, pod)))
    ]
    guilty = pods.culprit(observed.pods)
    if not coming_reasons and guilty is not None:
        # The cause, before what only followed it.
        coming_reasons = [pods.why(guilty)]
    reasons = coming_reasons or reasons
    queue = observed.spec.kubernetes.queue
    if queue and observed.workload is not None and pods.is_suspended(observed.workload):
        return ": ".join(filter(None, (f"waiting in queue {queue}", observed.reason)))
    refused = [
        pods.words_of(event) for event in observed.events if event.get("reason") == "FailedCreate"
    ]
    return next(iter(reasons), refused[-1] if refused and not observed.pods else observed.reason)


def _reservation(observed: ObservedRun) -> str:
    """Reservation of a run that ended well against its result, such as a loss that ran away."""
    from kubetune.k8s.cluster import pods
    from kubetune.k8s.cluster.runs import exit_status_in
    from kubetune.rundir.exit_status import DONE

    left = [
        message
        for pod in observed.pods
        if pods.node_number(pod) == 0 and (message := pods.message_of(pod))
    ]
    told = left[-1] if left else exit_status_in(observed.progress) or {}
    return (
        str(told.get("reason") or "").removeprefix(DONE).removeprefix(", ")
        if told.get("code") == OK
        else ""
    )


def headline(observed: ObservedRun) -> Iterator[str]:
    """One line on how the run stands, and one on how far it is."""
    told = facts(observed)
    running = sum(pod["phase"] == "Running" for pod in told["pods"])
    parts = [
        f"{told['name']}: {told['kind']} in {told['namespace']}, {told['state']}",
        f"{running} of {told['nodes']} pods running"
        if observed.state in ("running", "waiting")
        else "",
        counted(told["restarts"], "restart") if told["restarts"] else "",
    ]
    reason = told["why"]
    if len(reason) <= _LONG_REASON:
        yield ", ".join(filter(None, [*parts, reason]))
    else:
        yield ", ".join(filter(None, parts))
        yield f"why: {reason}"
    if told["step"] is not None:
        yield _numbers(observed, told)
    elif told["phase"] and observed.state == "running":
        yield f"no step yet; rank 0: {told['phase']}"
    if observed.state != "failed" and told["restarts"] and (said := last_stop(told)):
        yield said
    if observed.silence:
        yield f"! its pods could not be asked how far they are: {observed.silence.splitlines()[0]}"


def _numbers(observed: ObservedRun, told: dict[str, Any]) -> str:
    """Return how far a run is; speed and time left only where they are of the start that runs."""
    numbers = [
        f"step {told['step']}/{told['steps'] or '?'}",
        f"loss {_number(told['loss'], '.4f')}",
    ]
    is_running = observed.state == "running"
    if is_running and told["starting"]:
        numbers.append("of the start before, this one prepares")
    else:
        numbers.append(f"{_number(told['tokens_per_second'], ',.0f')} tokens/s")
        if is_running and told["seconds_left"]:
            numbers.append(f"ETA {brief(told['seconds_left'])}")
    if evaluation := told["evaluation"]:
        numbers.append(f"eval_loss {evaluation['eval_loss']:.4f} at step {evaluation['step']}")
    if told["saved_step"] is not None:
        numbers.append(f"saved step {told['saved_step']}")
    return " · ".join(numbers)


def last_stop(told: dict[str, Any]) -> str:
    """Cause of the last start's end: by its ranks, or by Kubernetes where those only followed a pod's death."""
    last, cause = told["last_exit"], told["cause"]
    is_known = last is not None and not only_followed(last["code"], last.get("error"))
    if cause and not is_known and _is_of_one_end(last, cause):
        return f"last stop {cause['time']}: {cause['pod']}: {cause['reason']}"
    return f"last stop {last['time']}: exit code {last['code']}, {last['reason']}" if last else ""


def _is_of_one_end(last: dict[str, Any] | None, cause: dict[str, Any]) -> bool:
    """The exits that followed a death may have followed this one."""
    from kubetune.k8s.cluster.pods import age_seconds

    if last is None:
        return True
    after = (age_seconds(cause["time"]) or 0.0) - (age_seconds(last["time"]) or 0.0)
    return abs(after) < _SAME_END_SECONDS


def _number(value: float | None, form: str, unknown: str = "?") -> str:
    return unknown if value is None else format(value, form)


def _events_of(observed: ObservedRun, pod: Object) -> list[Object]:
    name = pod["metadata"]["name"]
    uid = pod["metadata"].get("uid")
    from kubetune.k8s.cluster import pods

    refs = [(pods.about(event), event) for event in observed.events]
    return [event for ref, event in refs if ref.get("name") == name and ref.get("uid", uid) == uid]


def _news(observed: ObservedRun) -> list[Object]:
    """Warnings that say more than the pods themselves."""
    from kubetune.k8s.cluster import pods

    told = [pods.why(pod) for pod in (*observed.preparing, *observed.pods)]
    return [
        event
        for event in _warnings(observed)
        if not any(pods.words_of(event) in reason for reason in told)
    ]


def _warnings(observed: ObservedRun) -> list[Object]:
    """Warnings of what is not over: of a container that has started since, or of pods that others stand for."""
    from kubetune.k8s.cluster import pods

    there = {pod["metadata"].get("uid"): pod for pod in (*observed.preparing, *observed.pods)}
    all_run = sum(map(pods.is_running, observed.pods)) >= observed.spec.nodes

    def matters(event: Object) -> bool:
        pod = there.get(pods.about(event).get("uid"))
        if event.get("type") != "Warning" or observed.state in ("done", "stopped"):
            return False
        if pod is None:
            # A pod that is gone waits for no node.
            return not all_run and event.get("reason") != "FailedScheduling"
        if pods.is_of_scheduling(event, pod):
            return False
        began = pods.began(pod)
        return began is None or pods.event_time(event)[: len(began) - 1] >= began[:-1]

    return [event for event in observed.events if matters(event)]


def _row(observed: ObservedRun, pod: Object) -> tuple[object, ...]:
    from kubetune.k8s.cluster import pods

    status = pods.trainer_status(pod)
    age = brief(pods.age_seconds(pod["metadata"].get("creationTimestamp")))
    return (
        pods.name_of(pod),
        "" if pod in observed.preparing else pods.node_number(pod),
        pod["spec"].get("nodeName"),
        pods.phase_of(pod),
        status.get("restartCount", 0),
        age,
        visible(pods.why(pod, _events_of(observed, pod), advise=False)),  # the headline advises
    )
