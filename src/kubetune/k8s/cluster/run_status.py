"""What is told of a run on a cluster: its facts, why it does not run, its headline and the warnings that still hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from kubetune.base.humanize import brief, counted
from kubetune.errors import OK, only_followed
from kubetune.k8s.api.client import Object
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.causes import culprit_left
from kubetune.k8s.cluster.cluster_runs import ObservedRun, exit_status_in
from kubetune.k8s.cluster.run_lookup import workload_kind
from kubetune.rundir.exit_status import DONE
from kubetune.rundir.metrics import is_number

_SHOWN_EVENTS: Final = 5
_SAME_END_SECONDS: Final = 900.0
# A longer reason gets a line of its own.
_LONG_REASON: Final = 200


def facts(observed: ObservedRun) -> dict[str, Any]:
    """Return what `--json` prints: everything, with None for what is not known."""

    progress = observed.progress or {}
    restarts = progress.get("restarts")

    # Before the trainer wrote anything, the kinds that restart pods count for it.
    if restarts is None:
        status = (observed.workload or {}).get("status") or {}
        restarts = status.get("restarts")

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
        "waits_for": progress.get("waits_for"),
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
        "lost_hosts": [asdict(host) for host in observed.lost_hosts],
        "pods": [_pod_facts(observed, pod) for pod in observed.pods],
        "samplers": [_sampler_facts(observed, pod) for pod in observed.samplers],
        "servers": [_server_facts(pod) for pod in observed.servers],
        "warnings": [pods.words_of(event) for event in _warnings(observed)],
    }


def _pod_facts(observed: ObservedRun, pod: Object) -> dict[str, Any]:
    """Return what `--json` prints about one pod of the trainer."""

    return {
        "name": pods.name_of(pod),
        "node": pods.node_number(pod),
        "machine": pod["spec"].get("nodeName"),
        "phase": pods.phase_of(pod),
        "restarts": pods.trainer_status(pod).get("restartCount", 0),
        "exit_code": pods.exit_code(pod),
        "why": pods.why(pod, events_of_pod(observed, pod)),
    }


def _sampler_facts(observed: ObservedRun, pod: Object) -> dict[str, Any]:
    """Return what `--json` prints about one pod that draws answers."""

    pod_facts = _pod_facts(observed, pod)
    del pod_facts["node"]
    return {
        **pod_facts,
        "index": pods.node_number(pod),
        "ready": pods.condition(pod, "Ready") is not None,
        "why": pods.why_server(pod, events_of_pod(observed, pod)),
    }


def _server_facts(pod: Object) -> dict[str, Any]:
    """Return what `--json` prints about one pod of a server beside the run."""

    return {
        "name": pods.name_of(pod),
        "server": pods.component_of(pod),
        "phase": pods.phase_of(pod),
        "restarts": pods.trainer_status(pod).get("restartCount", 0),
        "ready": pods.condition(pod, "Ready") is not None,
        "why": pods.why_beside(pod),
    }


def why(observed: ObservedRun) -> str:
    """Return why a run is not running: the cause of its end, or what it waits for."""

    # The state alone may say why.
    if observed.state == "done":
        return _reservation(observed)
    # Whatever its pods wait for, they wait for that. A stopped run has a pod that does not go.
    for host in observed.lost_hosts:
        return host.advice()
    if observed.state == "stopped":
        return ""
    if observed.state == "running":
        return _why_without_servers(observed)
    if observed.state == "absent":
        return "its pods were removed; submit it again to continue it"
    if observed.state == "failed":
        return _why_failed(observed)

    # Kueue holds back the workload, so there are no pods to ask.
    workload = observed.workload
    if workload is not None and pods.queue_of(workload) and pods.is_suspended(workload):
        reason = f"waiting in queue {pods.queue_of(workload)}"
        if observed.reason:
            reason += f": {observed.reason}"
        return reason

    # Pods of earlier starts still exist; the question here is why the next ones do not run. How a container ended that
    # only lost the others says nothing of that.
    next_pods = []
    for pod in observed.pods:
        if not pods.has_ended(pod) and not pods.lost_others(pod):
            next_pods.append(pod)
    for reason in _reasons(observed, next_pods):
        return reason

    # None of them knows, so the pods that have ended are asked: first the one by which the start ended.
    guilty = culprit_left(observed.pods, observed.events)
    if guilty is not None and pods.lost_others(guilty):
        return "the last start failed because of a pod that is gone or terminating; restarting"
    if guilty is not None:
        return pods.why(guilty)
    others = [pod for pod in observed.pods if not pods.exit_code(pod)]
    for reason in _reasons(observed, others):
        return reason

    if not observed.pods:
        return _why_none_is_made(observed) or observed.reason
    return observed.reason


def _why_none_is_made(observed: ObservedRun) -> str:
    """Return why pods are not made at all, such as a quota or a webhook. Only an event of the Job's says so."""

    for event in reversed(observed.events):
        if event.get("reason") == "FailedCreate":
            return pods.words_of(event)
    return ""


def _why_without_servers(observed: ObservedRun) -> str:
    """Return why servers do not answer that a run waits for; empty where all do, or the run has none."""

    settings = observed.spec.kubernetes.samplers
    if settings is None:
        return ""
    current = [pod for pod in observed.samplers if not pods.has_ended(pod)]
    for pod in current:
        reason = pods.why_server(pod, events_of_pod(observed, pod))
        if reason:
            return f"{pods.name_of(pod)}: {reason}"
    if len(current) < settings.replicas:
        missing = settings.replicas - len(current)
        reason = _why_none_is_made(observed) or "their pods are not made yet"
        return f"{missing} of {settings.replicas} samplers are missing: {reason}"
    return ""


def _why_failed(observed: ObservedRun) -> str:
    """Return the cause of a failure: what the pod that failed first left behind, else what Kubernetes knows of it."""

    guilty = pods.culprit(observed.pods)
    if guilty is not None:
        # The agent leaves its reason in the pod's termination message. A pod that was killed leaves none.
        message = pods.message_of(guilty)
        if message and message["reason"]:
            return str(message["reason"])
        if pods.node_number(guilty) and not pods.only_followed(guilty):
            return f"{pods.name_of(guilty)}: {pods.why(guilty)}"
    for reason in _reasons(observed, observed.pods):
        return reason
    return observed.reason


def _reasons(observed: ObservedRun, some_pods: Iterable[Object]) -> Iterator[str]:
    """Yield why these pods do not run, of those that do not."""

    for pod in some_pods:
        reason = pods.why(pod, events_of_pod(observed, pod))
        if reason:
            yield reason


def _reservation(observed: ObservedRun) -> str:
    """Return what a run that ended well warns of in its result, such as a loss that ran away."""

    ending: Mapping[str, Any] = exit_status_in(observed.progress) or {}
    for pod in observed.pods:
        # The last pod of node 0 knows it best.
        message = pods.message_of(pod)
        if message and pods.node_number(pod) == 0:
            ending = message
    if ending.get("code") != OK:
        return ""
    return str(ending.get("reason") or "").removeprefix(DONE).removeprefix(", ")


def headline(observed: ObservedRun) -> Iterator[str]:
    """Yield a line on the state of a run, and lines on its progress, its last stop and servers beside it."""

    run_facts = facts(observed)
    parts = [
        f"{run_facts['name']}: {run_facts['kind']} in {run_facts['namespace']}, {run_facts['state']}"
    ]
    if observed.state in ("running", "waiting"):
        running_pods = [pod for pod in run_facts["pods"] if pod["phase"] == "Running"]
        parts.append(f"{len(running_pods)} of {run_facts['nodes']} pods running")
        samplers = observed.spec.kubernetes.samplers
        if samplers is not None:
            answering = [pod for pod in run_facts["samplers"] if pod["ready"]]
            parts.append(f"{len(answering)} of {samplers.replicas} samplers answer")
    if run_facts["restarts"]:
        parts.append(counted(run_facts["restarts"], "restart"))

    # A short reason ends the first line, a long one is the second.
    reason = run_facts["why"]
    is_long = len(reason) > _LONG_REASON
    if reason and not is_long:
        parts.append(reason)
    yield ", ".join(parts)
    if is_long:
        yield f"why: {reason}"

    if run_facts["step"] is not None:
        yield _numbers(observed, run_facts)
    elif run_facts["waits_for"] and observed.state == "running":
        yield f"no step yet; {run_facts['waits_for']}"
    elif run_facts["phase"] and observed.state == "running":
        yield f"no step yet; rank 0: {run_facts['phase']}"

    # What a failed run says of its end is above already.
    stop = last_stop(run_facts)
    if stop and run_facts["restarts"] and observed.state != "failed":
        yield stop

    for pod in observed.servers:
        trouble = pods.why_beside(pod)
        if trouble:
            yield f"! {pods.component_of(pod)} does not answer: {trouble}"

    if observed.silence:
        yield f"! its pods could not be asked for progress: {observed.silence.splitlines()[0]}"


def _numbers(observed: ObservedRun, run_facts: dict[str, Any]) -> str:
    """Return the progress of a run; speed and time left only if the current start measured them."""
    numbers = [
        f"step {run_facts['step']}/{run_facts['steps'] or '?'}",
        f"loss {number_or(run_facts['loss'], '.4f')}",
    ]

    is_running = observed.state == "running"
    if is_running and run_facts["starting"]:
        waits_for = run_facts["waits_for"]
        doing = f"in which {waits_for}" if waits_for else "which is still preparing"
        numbers.append(f"from before the restart, {doing}")
    else:
        numbers.append(f"{number_or(run_facts['tokens_per_second'], ',.0f')} tokens/s")
        if is_running and run_facts["seconds_left"]:
            numbers.append(f"ETA {brief(run_facts['seconds_left'])}")

    evaluation = run_facts["evaluation"]
    if evaluation:
        # Anybody in a pod may have written it, so that only numbers are shown as such.
        for name in ("eval_reward", "eval_loss"):
            if is_number(evaluation.get(name)):
                numbers.append(f"{name} {evaluation[name]:.4f} at step {evaluation['step']}")
                break
    if run_facts["saved_step"] is not None:
        numbers.append(f"saved step {run_facts['saved_step']}")
    return " · ".join(numbers)


def last_stop(run_facts: dict[str, Any]) -> str:
    """Return why the last start ended; empty where nothing is known.

    The ranks know it, but for those that only lost a peer: then Kubernetes knows which pod died.
    """
    last_exit = run_facts["last_exit"]
    cause = run_facts["cause"]
    ranks_know = last_exit is not None and not only_followed(
        last_exit["code"], last_exit.get("error")
    )
    if cause and not ranks_know and _is_of_one_end(last_exit, cause):
        return f"last stop {cause['time']}: {cause['pod']}: {cause['reason']}"
    if not last_exit:
        return ""
    return f"last stop {last_exit['time']}: exit code {last_exit['code']}, {last_exit['reason']}"


def _is_of_one_end(last: dict[str, Any] | None, cause: dict[str, Any]) -> bool:
    """True if the exit and the death of the pod are close enough in time to belong together."""

    if last is None:
        return True
    age_of_death = pods.age_seconds(cause["time"]) or 0.0
    age_of_exit = pods.age_seconds(last["time"]) or 0.0
    return abs(age_of_death - age_of_exit) < _SAME_END_SECONDS


def number_or(value: float | None, form: str, unknown: str = "?") -> str:
    """Return a number in a form such as `.4f`; `unknown` for none."""
    return unknown if value is None else format(value, form)


def warning_lines(observed: ObservedRun) -> Iterator[str]:
    """Yield the last warnings, and how many came before them."""

    news, times = _without_repeats(_news(observed))
    if len(news) > _SHOWN_EVENTS:
        earlier = sum(times[_kind_of(event)] for event in news[:-_SHOWN_EVENTS])
        command = f"kubetune events {observed.spec.name} -n {observed.spec.kubernetes.namespace}"
        yield f"! {counted(earlier, 'earlier warning')}: {command}"

    for event in news[-_SHOWN_EVENTS:]:
        age = brief(pods.age_seconds(pods.event_time(event)))
        name = pods.about(event).get("name") or "?"
        line = f"! {age} ago, {name}: {event.get('reason') or '?'}: {pods.words_of(event)}"
        count = times[_kind_of(event)]
        if count > 1:
            line += f" ({count} times)"
        yield line


def _kind_of(event: Object) -> tuple[str, str, str]:
    """Return what events have in common that say the same."""

    about = str(pods.about(event).get("name"))
    reason = str(event.get("reason"))
    # Names of machines in the text differ with each try.
    words = pods.without_names(pods.words_of(event))
    return about, reason, words


def _without_repeats(
    events: Sequence[Object],
) -> tuple[list[Object], Counter[tuple[str, str, str]]]:
    """Return the last of all events that say the same, in order, and how many there were of each."""
    last: dict[tuple[str, str, str], Object] = {}
    times: Counter[tuple[str, str, str]] = Counter()
    for event in events:
        kind = _kind_of(event)
        times[kind] += 1
        # A dict keeps the place of a key that it has, so the key is taken out to come last.
        last.pop(kind, None)
        last[kind] = event
    return list(last.values()), times


def events_of_pod(observed: ObservedRun, pod: Object) -> list[Object]:
    """Return what Kubernetes has told of a pod, of this one alone if others had its name."""
    name = pod["metadata"]["name"]
    uid = pod["metadata"].get("uid")

    events = []
    for event in observed.events:
        subject = pods.about(event)
        # The uid tells a pod from an earlier one of the same name.
        if subject.get("name") == name and subject.get("uid", uid) == uid:
            events.append(event)
    return events


def _news(observed: ObservedRun) -> list[Object]:
    """Return the warnings that the lines of the pods do not repeat."""

    shown = (*observed.preparing, *observed.pods, *observed.samplers)
    reasons = [pods.why(pod) for pod in shown]
    news = []
    for event in _warnings(observed):
        # The line of a pod quotes what holds it back.
        text = pods.words_of(event)
        if not any(text in reason for reason in reasons):
            news.append(event)
    return news


def _warnings(observed: ObservedRun) -> list[Object]:
    """Return the warnings that still hold: not of containers that started since, nor of pods that were replaced."""

    by_uid: dict[Any, Object] = {}
    for pod in (*observed.preparing, *observed.pods, *observed.samplers):
        by_uid[pod["metadata"].get("uid")] = pod

    running_pods = [pod for pod in observed.pods if pods.is_running(pod)]
    all_run = len(running_pods) >= observed.spec.nodes

    def matters(event: Object) -> bool:
        pod = by_uid.get(pods.about(event).get("uid"))
        if event.get("type") != "Warning" or observed.state in ("done", "stopped"):
            return False
        if pod is None:
            # A deleted pod waits for no node.
            return not all_run and event.get("reason") != "FailedScheduling"
        if pods.is_of_scheduling(event, pod):
            return False

        # A warning from before the pod's container started is about the container before.
        began = pods.began(pod)
        if began is None:
            return True
        # Both are UTC; the event may have fractions of a second before its Z.
        return pods.event_time(event)[: len(began) - 1] >= began[:-1]

    return [event for event in observed.events if matters(event)]
