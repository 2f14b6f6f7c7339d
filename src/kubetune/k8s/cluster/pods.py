"""Meaning of the status of pods and workloads: a pod's node, what it waits for, the state of a run.

Pure functions of plain dicts as the API server returns them. Requests to the server are in api/client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kubetune import errors
from kubetune.k8s.manifests.kinds.kind import State
from kubetune.k8s.manifests.kinds.registry import kinds_by_object
from kubetune.k8s.manifests.run_spec import COMPONENT, QUEUE_NAME

Object = Mapping[str, Any]
# Last word of the command of trainers that `kubetune dev` makes.
IDLE = "idle"
# Annotation of a workload that `stop` has taken from its queue.
STOPPED = "kubetune/stopped"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"

_POD_NAME = re.compile(r'\bpods? "[^"]*"')

# What to do about a reason of Kubernetes for that a container waits.
_ADVICE = {
    "ImagePullBackOff": "check kubernetes.image, and kubernetes.image_pull_secrets for a private registry",
    "ErrImagePull": "check kubernetes.image, and kubernetes.image_pull_secrets for a private registry",
    "InvalidImageName": "check kubernetes.image",
    "ErrImageNeverPull": "its node has no such image (any more): load it again, or change kubernetes.image_pull_policy",
    "CreateContainerConfigError": "make the missing Secret: kubetune secret set HF_TOKEN",
    "CrashLoopBackOff": "it ends again and again; see kubetune logs",
}
# Reasons of an end that Kubernetes itself knows better than an exit code says: memory, and a program that cannot start.
_ENDS_OF_KUBERNETES = ("OOMKilled", "StartError", "ContainerCannotRun")
# What an exit code means where nobody left a message: kubetune's own codes, and 128 plus the signal.
_EXIT_MEANING = {
    errors.USER: "a mistake in the config or the data",
    errors.ENVIRONMENT: "disk, device or cluster",
    errors.DIVERGED: "the loss diverged",
    errors.GATE: "the gate of the evaluation failed",
    errors.OUT_OF_MEMORY: "out of memory twice at the same place",
    errors.PREEMPTED: "stopped early with a good checkpoint",
    errors.LOST_PEER: "lost another node",
    126: "its image's program may not be started",
    127: "its image has no such program",
    137: "killed (SIGKILL): out of memory, or its grace period was over",
    139: "crashed (SIGSEGV)",
    135: "crashed (SIGBUS): often too small a /dev/shm, see kubernetes.shm_size",
}


def name_of(obj: Object) -> str:
    """Return an object's name."""
    return str(obj["metadata"]["name"])


def labels_of(obj: Object) -> Mapping[str, str]:
    """Return an object's labels."""
    return obj["metadata"].get("labels") or {}


def component_of(pod: Object) -> str:
    """Return the purpose of a pod: `trainer`, `sampler`, `preprocess`, `tensorboard`, `ui` …"""
    return labels_of(pod).get(COMPONENT, "")


def node_number(pod: Object) -> int:
    """Return the node of the run that a trainer pod is, from 0. A pod of another component is 0."""
    for kind in kinds_by_object().values():
        node = kind.node_of(pod)
        if node is not None:
            return node
    return 0


def trainer_container(pod: Object) -> str:
    """Return the name of the container that trains (for other components: of the first)."""
    # Operators and patches may add containers beside it.
    names = [str(container["name"]) for container in pod["spec"]["containers"]]
    trainers = {kind.container for kind in kinds_by_object().values()}
    for name in names:
        if name in trainers:
            return name
    return names[0]


def container_statuses(pod: Object) -> list[Object]:
    """Return the statuses of the containers in the order in which they run, so init containers first."""
    status = pod.get("status") or {}
    of_init = status.get("initContainerStatuses") or []
    of_main = status.get("containerStatuses") or []
    return [*of_init, *of_main]


def container_status(pod: Object, name: str) -> Object:
    """Return the status of a container; empty while the pod has none."""
    for status in container_statuses(pod):
        if status["name"] == name:
            return status
    return {}


def trainer_status(pod: Object) -> Object:
    """Return the status of the container that trains; empty while the pod has none."""
    return container_status(pod, trainer_container(pod))


def phase_of(pod: Object) -> str:
    """Return `Running`, `Pending`, `Succeeded`, `Failed`, `Unknown` or, while it is deleted, `Terminating`."""
    phase = str((pod.get("status") or {}).get("phase") or "Pending")
    if "deletionTimestamp" in pod["metadata"] and phase not in ("Succeeded", "Failed"):
        return "Terminating"
    return phase


def is_running(pod: Object) -> bool:
    """True if commands can be run in its trainer's container."""
    # A pod that is being deleted still runs, but takes no more commands.
    if "deletionTimestamp" in pod["metadata"]:
        return False
    return "running" in (trainer_status(pod).get("state") or {})


def has_begun(pod: Object) -> bool:
    """True if the container of its trainer has a log."""
    return exit_code(pod) is not None or is_running(pod)


def has_ended(pod: Object) -> bool:
    """True if its containers will write no more."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def exit_code(pod: Object) -> int | None:
    """Return the exit code of the trainer's last end, or of what failed before it; None before any end."""
    ended = last_end(pod)
    if ended is None:
        return None
    return int(ended["exitCode"])


def last_end(pod: Object) -> Object | None:
    """Return the `terminated` of the trainer's last end, or of what failed before it; None before any end."""
    name = failed_container(pod) or trainer_container(pod)
    return _terminated(container_status(pod, name))


def _terminated(status: Object) -> Object | None:
    """Return how a container ended last; None before any end.

    A container that restarts has its last end in `lastState`, and `state` says what it does now.
    """
    for state in (status.get("state") or {}, status.get("lastState") or {}):
        if "terminated" in state:
            end: Object = state["terminated"]
            return end
    return None


def began(pod: Object) -> str | None:
    """Return the time the trainer's container started last; None while it has not."""
    state: Object = trainer_status(pod).get("state") or {}
    started = state.get("running") or state.get("terminated") or {}
    time: str | None = started.get("startedAt")
    return time


def message_of(pod: Object) -> Object | None:
    """Return the agent's message at its last end: `code`, `reason`, `step`, `progress`; None without."""
    end = _terminated(trainer_status(pod))
    if end is None:
        return None
    try:
        message = json.loads(end.get("message") or "")
    except (ValueError, RecursionError):
        # Any program in the pod may write there.
        return None
    if isinstance(message, dict) and isinstance(message.get("reason"), str):
        return message
    return None


def culprit(pods: Sequence[Object]) -> Object | None:
    """Return the pod that brought the end about; None where none failed. `pods` are by node, older ones first.

    Of each node the last pod that failed counts. Of these comes first:

        0  one whose error another start would repeat, such as a bad config, however many lost their peers by it
        1  any other that failed by itself
        2  one that only lost its peer, or was asked to stop
        3  one of an earlier start, which had ended when the pod that ended last began
    """
    last_failed = {node_number(pod): pod for pod in pods if exit_code(pod)}
    ends = [last_end(pod) or {} for pod in last_failed.values()]
    newest = max(ends, key=_finished, default={})
    since = str(newest.get("startedAt") or "")

    def order(pod: Object) -> int:
        if exit_code(pod) in errors.FINAL:
            return 0
        if _finished(last_end(pod) or {}) < since:
            return 3
        if only_followed(pod):
            return 2
        return 1

    return min(last_failed.values(), key=order, default=None)


def _finished(end: Object) -> str:
    return str(end.get("finishedAt") or "")


def only_followed(pod: Object) -> bool:
    """True if a pod ended because another did, or because it was asked to."""
    error = (message_of(pod) or {}).get("error")
    return errors.only_followed(exit_code(pod) or 0, error)


def lost_others(pod: Object) -> bool:
    """True if a pod ended because it lost another one, of which more is to be known."""
    return exit_code(pod) == errors.LOST_PEER and only_followed(pod)


def failed_container(pod: Object) -> str | None:
    """Return the name of the first container whose last end was a failure; None where there is none.

    The trainer comes first: other containers of the pod, as those of a service mesh, end because it has.
    """
    # Sidecars are init containers that restart always. They do not decide how a pod ends.
    sidecars = set()
    for entry in pod["spec"].get("initContainers") or []:
        if entry.get("restartPolicy") == "Always":
            sidecars.add(entry["name"])
    trainer = trainer_container(pod)
    statuses = [status for status in container_statuses(pod) if status["name"] not in sidecars]
    statuses.sort(key=lambda status: status["name"] != trainer)
    for status in statuses:
        end = _terminated(status)
        if end is not None and end["exitCode"]:
            return str(status["name"])
    return None


def age_seconds(stamp: str | None) -> float | None:
    """Return the seconds since a time such as `2026-11-20T10:15:00Z`; None for what is no time."""
    try:
        then = datetime.fromisoformat((stamp or "").replace("Z", "+00:00"))
    except ValueError:
        return None
    then = then.replace(tzinfo=then.tzinfo or UTC)
    return (datetime.now(UTC) - then).total_seconds()


def to_seconds(stamp: str) -> str:
    """Cut a time to whole seconds, so that it compares with creation times, which have no more."""
    return stamp[: len("2026-11-20T10:15:00")]


def times_seen(event: Object) -> int:
    """Return how often an event was seen."""
    return int((event.get("series") or {}).get("count") or event.get("count") or 1)


def about(event: Object) -> Object:
    """Return the reference to an event's object: `kind`, `name` and `uid`, as far as they are known."""
    return dict(event.get("involvedObject") or {})


def event_time(event: Object) -> str:
    """Return the time an event was last seen."""
    # Newer controllers count repeats in a series; older ones set lastTimestamp.
    return str(
        (event.get("series") or {}).get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or (event.get("metadata") or {}).get("creationTimestamp")
        or ""
    )


def words_of(event: Object) -> str:
    """Return the message of an event; its reason where it has none."""
    return str(event.get("message") or event.get("reason") or "an event without a word")


def why(pod: Object, events: Sequence[Object] = (), *, advise: bool = True) -> str:
    """Return why a pod does not run, or how it ended; empty while all is well. `events` are those of the pod.

    `advise`: with what to do about it, where that is known.
    """
    # It has no node.
    unschedulable = condition(pod, "PodScheduled", "False")
    if unschedulable is not None and unschedulable.get("reason") == "SchedulingGated":
        return "held back: something, such as a queue, has to let it go first"
    if unschedulable is not None and not pod["spec"].get("nodeName"):
        return f"no node fits: {unschedulable.get('message') or unschedulable.get('reason')}"

    # It has a node, and a container cannot start.
    for status in container_statuses(pod):
        waiting = (status.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in ("PodInitializing", "ContainerCreating"):
            reason = str(waiting.get("reason"))
            text = f"{reason}: {waiting.get('message', '')}".strip(": ")
            # The container's log, if there is one, is that of its last start.
            ended = _terminated(status)
            if ended is not None:
                text += f"; {_how_ended(ended)}"
            if advise and reason in _ADVICE:
                text += f"; {_ADVICE[reason]}"
            return text

    # It has failed, or was ended from outside.
    disruption = _disruption(pod)
    code = exit_code(pod)
    if code:
        status = container_status(pod, failed_container(pod) or "")
        terminated = (status.get("state") or {}).get("terminated") or {}
        if terminated.get("reason") in _ENDS_OF_KUBERNETES:
            return _how_ended(terminated)
        message = message_of(pod) or {"reason": ""}
        reasons = [str(message["reason"]).partition("\n")[0], disruption]
        return ended_with(code, "; ".join(filter(None, reasons)))
    if disruption and phase_of(pod) != "Succeeded":
        return disruption

    # It waits, and only events can say for what.
    if phase_of(pod) != "Pending":
        return ""
    for event in reversed(events):
        if event.get("type") == "Warning" and not is_of_scheduling(event, pod):
            return words_of(event)
    return ""


def _how_ended(terminated: Object) -> str:
    """Return how a container ended, by what Kubernetes knows: "exit code 137: out of memory (OOMKilled)"."""
    code = int(terminated["exitCode"])
    reason = terminated.get("reason")
    if reason == "OOMKilled":
        return f"exit code {code}: out of memory (OOMKilled)"
    words = ""
    if reason in _ENDS_OF_KUBERNETES:
        # failed to create containerd task: … container process: exec: "vllm": executable file not found in $PATH
        _, exec_word, rest = str(terminated.get("message") or "").rpartition("exec: ")
        words = f"{reason}: {exec_word}{rest}".strip(": ")
    return ended_with(code, words)


def why_server(pod: Object, events: Sequence[Object] = (), *, advise: bool = True) -> str:
    """Return why a pod with a server is not asked yet, or how it ended; empty while its server answers."""
    reason = why(pod, events, advise=advise)
    if not reason and is_running(pod) and condition(pod, "Ready") is None:
        return "its server does not answer yet"
    return reason


def why_beside(pod: Object) -> str:
    """Return why a server beside a run does not answer; empty while it does. Its log is no part of `kubetune logs`."""
    if condition(pod, "Ready") is not None:
        return ""
    reason = why_server(pod, advise=False)
    name = name_of(pod)
    if exit_code(pod):
        reason += f"; see kubectl logs -n {pod['metadata'].get('namespace', 'default')} {name}"
    return reason and f"{name}: {reason}"


def is_of_scheduling(event: Object, pod: Object) -> bool:
    """True if a warning is of the time before its pod had a node, which is over."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled is None and not pod["spec"].get("nodeName"):
        return False
    if event.get("reason") == "FailedScheduling":
        return True
    since = str((scheduled or {}).get("lastTransitionTime") or "")
    return to_seconds(event_time(event)) < to_seconds(since)


def without_names(text: str) -> str:
    """Return a message without the names of pods, which are random: by it repeats are known."""
    return _POD_NAME.sub("pods", text)


def _disruption(pod: Object) -> str:
    """Return Kubernetes' own reason to end a pod, or not to begin it: evicted, preempted, too old, its node lost."""
    cause = pod.get("status") or {}
    if not cause.get("reason"):
        cause = condition(pod, "DisruptionTarget") or {}
    return f"{cause.get('reason') or ''}: {cause.get('message') or ''}".strip(": ")


def ended_with(code: int, reason: str = "") -> str:
    """Return an exit code with its reason, or with what the code means."""
    meaning = reason.partition("\n")[0] or _EXIT_MEANING.get(code)
    if not meaning:
        return f"exit code {code}"
    return f"exit code {code}: {meaning}"


def condition(obj: Object, kind: str, value: str = "True") -> Object | None:
    """Return the condition of that type and value, or None."""
    for entry in (obj.get("status") or {}).get("conditions") or []:
        if entry["type"] == kind and entry["status"] == value:
            match: Object = entry
            return match
    return None


def is_suspended(workload: Object) -> bool:
    """True if a workload is asked to have no pods."""
    return kinds_by_object()[workload["kind"]].suspends(workload)


def stopped_note(*, stopped: bool) -> dict[str, Any]:
    """Return the patch of the annotation that says of a run in a queue that `stop` has taken it out."""
    return {"metadata": {"annotations": {STOPPED: "true" if stopped else None}}}


def queue_of(workload: Object) -> str:
    """Return Kueue's queue of a workload, empty where it has none. Kueue puts what names none into the namespace's."""
    return str(labels_of(workload).get(QUEUE_NAME, ""))


def is_held_back(workload: Object) -> bool:
    """True if a suspended workload waits for Kueue, rather than for `resume`."""
    kind = kinds_by_object()[workload["kind"]]
    if not queue_of(workload) or not kind.is_suspended_by_kueue:
        return False
    return STOPPED not in (workload["metadata"].get("annotations") or {})


def is_idling(workload: Object) -> bool:
    """True if its pods do nothing until `kubetune dev run` starts something in them."""
    # `dev` makes a StatefulSet. Kinds that hold several templates have none at this place.
    containers = workload["spec"].get("template", {}).get("spec", {}).get("containers")
    if not containers:
        return False
    command = containers[0].get("command") or [""]
    return bool(command[-1] == IDLE)


def state_of(workload: Object | None, pods: Sequence[Object]) -> tuple[State, str]:
    """Return the state of a run, and what its workload says about that."""
    if workload is None:
        return "absent", ""
    state, words = kinds_by_object()[workload["kind"]].state_of(workload)
    if state is not None:
        return state, words
    if is_suspended(workload) and not is_held_back(workload):
        return "stopped", ""
    where = _elsewhere(workload)
    if where or is_suspended(workload):
        return "waiting", where
    if any(is_running(pod) for pod in pods):
        return "running", ""
    return "waiting", ""


def _elsewhere(workload: Object) -> str:
    """Return advice about a workload whose pods another cluster has; empty where this one makes them."""
    if kinds_by_object()[workload["kind"]].manager(workload) != MULTIKUEUE:
        return ""
    return (
        "MultiKueue gives it to another cluster (kubectl get workloads -o yaml: status.clusterName) and takes nothing "
        "else along: its ConfigMap, Secrets, claims and Service have to be there (kubetune render), as are its pods, "
        "logs and results: name that cluster by KUBECONFIG, or take a queue of this one"
    )
