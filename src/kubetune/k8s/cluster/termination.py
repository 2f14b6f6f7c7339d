"""Progress of a run whose pods have ended: from the agent's last message, a note on a stopped run, or a log.

Pods that run answer from the run directory instead (in_pod).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kubetune.k8s.api.api_errors import ApiError, Refused
from kubetune.k8s.api.client import Cluster, Object
from kubetune.k8s.cluster import pods
from kubetune.k8s.manifests.run_spec import RunSpec

# Some keys of rundir.status.progress.
Progress = dict[str, Any]

# Annotation of a stopped run's ConfigMap, and the keys of progress that it holds.
_NOTE = "kubetune/progress"
_NOTED = ("step", "steps", "loss", "tokens_per_second", "saved_step", "evaluation")
_TAIL_LINES = 100
# A line of node 0's log: [TRAIN] step 7/20 … loss 2.31 … tokens/s 1234
_STEP = re.compile(
    r"\[TRAIN\] step (?P<step>\d+)/(?P<steps>\d+) .*loss (?P<loss>\S+) .*tokens/s (?P<speed>[\d.]+)"
)
# A whole number in JSON is an int here.
_NUMBER = (int, float)
_END = {"code": int, "reason": str}
# The type of each value: a type, a choice of types, or a mapping with types of its keys.
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("step", "steps", "saved_step", "restarts"), int),
    **dict.fromkeys(("loss", "tokens_per_second", "seconds_left"), _NUMBER),
    "phase": str,
    "evaluation": {"step": int},
    "last_exit": {**_END, "time": str},
    "exit_status": _END,
}


def trusted(answer: object) -> Progress | None:
    """Return progress in which values of a wrong type are None; None if it is not a mapping.

    Anybody in a pod, or with the right to write annotations, may have written it:

        {"step": 7, "loss": "low"}  →  {"step": 7, "loss": None}
    """
    if not isinstance(answer, dict):
        return None
    progress: Progress = {}
    for name, value in answer.items():
        fits = name not in _TYPES or _fits(value, _TYPES[name])
        progress[name] = None
        if fits:
            progress[name] = value
    return progress


def _fits(value: object, expected: Any) -> bool:
    """True if a value has the expected type; see _TYPES."""
    if not isinstance(expected, dict):
        return isinstance(value, expected)
    if not isinstance(value, dict):
        return False
    return all(_fits(value.get(name), part) for name, part in expected.items())


def left_progress(trainers: Sequence[Object]) -> Progress | None:
    """Return the progress in the last message of an agent; None where none has left any.

    Each node's is that of the run, and node 0 may be on a host that is lost.
    """

    def order(pod: Object) -> tuple[str, int]:
        end = pods.last_end(pod) or {}
        # Within one second, the message of node 0 counts, which writes the numbers.
        return str(end.get("finishedAt") or ""), -pods.node_number(pod)

    newest_first = sorted(trainers, key=order, reverse=True)
    for pod in newest_first:
        message = pods.message_of(pod) or {}
        progress = trusted(message.get("progress"))
        if progress is not None:
            return progress
    return None


def note_progress(cluster: Cluster, spec: RunSpec, progress: Mapping[str, Any] | None) -> None:
    """Write progress on the run's ConfigMap while a run is stopped and has no pods. None removes the note."""
    note = None
    values = {name: (progress or {}).get(name) for name in _NOTED}
    if any(value is not None for value in values.values()):
        note = json.dumps(values)

    # Users who may stop a run need not have the right to write this.
    change = {"metadata": {"annotations": {_NOTE: note}}}
    with suppress(Refused):
        cluster.merge("ConfigMap", spec.name, change)


def noted_progress(cluster: Cluster, spec: RunSpec) -> Progress | None:
    """Return the progress that note_progress wrote last."""
    marker = cluster.get("ConfigMap", spec.name) or {"metadata": {}}
    annotations = marker["metadata"].get("annotations") or {}
    try:
        progress = trusted(json.loads(annotations.get(_NOTE, "null")))
    except (ValueError, RecursionError):
        # Somebody wrote the annotation by hand.
        return None
    if progress is None:
        return None
    return {name: progress.get(name) for name in _NOTED}


def logged_progress(cluster: Cluster, trainers: Sequence[Object]) -> Progress | None:
    """Return progress by the log of node 0: for pods that may not be asked, or died with their agent."""
    # Only node 0 prints steps.
    begun = [pod for pod in trainers if pods.node_number(pod) == 0 and pods.has_begun(pod)]
    if not begun:
        return None
    pod = begun[-1]
    try:
        lines = cluster.log(pods.name_of(pod), pods.trainer_container(pod), tail=_TAIL_LINES)
        return last_step(list(lines))
    except ApiError:
        return None


def last_step(lines: Sequence[str]) -> Progress | None:
    """Return the numbers of the last step in the lines of a log."""
    for line in reversed(lines):
        if match := _STEP.search(line):
            return {
                "step": int(match["step"]),
                "steps": int(match["steps"]),
                "loss": float(match["loss"]),
                "tokens_per_second": float(match["speed"]),
            }
    return None
