"""Find which pod ended a start, from the pods that still exist and from events: some kinds delete failed pods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.errors import PREEMPTED, only_followed
from kubetune.k8s.cluster import pods
from kubetune.k8s.cluster.pods import Object
from kubetune.k8s.manifests.kinds.registry import kinds_by_object

_FROM_OUTSIDE = "evicted or deleted, by a drain, another controller or a person"


def find_cause(trainers: Sequence[Object], events: Sequence[Object]) -> dict[str, Any] | None:
    """Return the pod that ended the latest start: one that still exists, or one that an event names.

    The answer has `pod`, `code`, `reason` and `time`. It is None if only pods that followed another are known:

        event   9:01 node 1 ended with code 145 (lost another node)      followed
        event   9:00 node 0 ended with code 137                         the cause
        event   8:00 node 1 ended with code 1                           of an earlier start

    Where no pod failed, one that was evicted or deleted is the cause, unless its own controller did that.
    """
    pod = culprit_left(trainers, events)
    # Events before `since` are of earlier starts.
    since = ""
    if pod is not None:
        end = pods.last_end(pod) or {}
        if not pods.only_followed(pod):
            return {
                "pod": pods.name_of(pod),
                "code": pods.exit_code(pod),
                "reason": pods.why(pod),
                "time": end.get("finishedAt"),
            }
        since = str(end.get("startedAt") or "")

    for event in reversed(events):
        time = pods.event_time(event)
        match = _failed_pod(str(event.get("message") or ""))
        if match is None:
            continue
        # Events before the latest start belong to an earlier one.
        if pods.to_seconds(time) < pods.to_seconds(since):
            break

        evicted = match.groupdict().get("evicted")
        if evicted:
            return _ended_from_outside(evicted, time)
        code = int(match["code"])
        # A pod that only followed says when its start began, and that another pod is to blame.
        if not only_followed(code, None):
            return {
                "pod": match["pod"],
                "code": code,
                "reason": pods.ended_with(code),
                "time": time,
            }
        since = max(since, _started(match["pod"], events, time))
    return _last_evicted(events, since)


def _last_evicted(events: Sequence[Mapping[str, Any]], since: str) -> dict[str, Any] | None:
    """Return the pod that was ended last since this time; None where none was, or its controller did it, as at a stop."""
    first = pods.to_seconds(since)
    later = [event for event in events if pods.to_seconds(pods.event_time(event)) >= first]
    deleted_by_controllers = set()
    for event in later:
        # "Deleted pod: fit-0-abc", of a StatefulSet "delete Pod fit-0 in StatefulSet fit successful"
        if str(event.get("reason")).startswith("SuccessfulDelete"):
            deleted_by_controllers.update(pods.words_of(event).split())
    for event in reversed(later):
        if _is_killing(event):
            name = str(pods.about(event).get("name"))
            if name in deleted_by_controllers:
                return None
            return _ended_from_outside(name, pods.event_time(event))
    return None


def _ended_from_outside(pod: str, time: str) -> dict[str, Any]:
    return {"pod": pod, "code": PREEMPTED, "reason": _FROM_OUTSIDE, "time": time}


def _is_killing(event: Mapping[str, Any]) -> bool:
    """True if kubelet ends the trainer of a pod that is deleted. The message ends in the container's name."""
    containers = tuple({kind.container for kind in kinds_by_object().values()})
    return event.get("reason") == "Killing" and pods.words_of(event).endswith(containers)


def culprit_left(trainers: Sequence[Object], events: Sequence[Object]) -> Mapping[str, Any] | None:
    """Return the pod that ended the latest start; None if it is gone, or if a later start was stopped."""
    pod = pods.culprit(trainers)
    end: Mapping[str, Any] = {}
    if pod is not None:
        end = pods.last_end(pod) or {}

    # A pod that is deleted after that end belonged to a later start, which somebody stopped.
    finished = pods.to_seconds(str(end.get("finishedAt") or ""))
    for event in events:
        if not _is_killing(event):
            continue
        name = str(pods.about(event).get("name"))
        began = _started(name, events, pods.event_time(event))
        if pods.to_seconds(began) > finished:
            return None
    return pod


def _started(pod: str, events: Sequence[Object], before: str) -> str:
    """Return the time of the latest start of a pod up to `before`; empty if no such event is left."""
    latest = ""
    for event in events:
        if event.get("reason") == "Started" and pods.about(event).get("name") == pod:
            # Times are UTC in ISO form, so that texts compare as times do.
            time = pods.event_time(event)
            if time <= before:
                latest = max(latest, time)
    return latest


def _failed_pod(message: str) -> re.Match[str] | None:
    """Match a controller's message on a failed pod. Each kind has its own wording."""
    for kind in kinds_by_object().values():
        if match := kind.failed_pod.search(message):
            return match
    return None
