"""Progress of a run when its pods ended: as its agent left it with Kubernetes, noted on a stopped run, or in a log.

Not for runs whose pods answer, which tell it of the run directory (in_pod.py).
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
from kubetune.k8s.manifests.spec import RunSpec

Progress = dict[str, Any]
"""Some keys of rundir.status.progress."""

_NOTE = "kubetune/progress"
_NOTED = ("step", "steps", "loss", "tokens_per_second", "saved_step", "evaluation")
_TAIL_LINES = 100
_STEP = re.compile(
    r"\[TRAIN\] step (?P<step>\d+)/(?P<steps>\d+) .*loss (?P<loss>\S+) .*tokens/s (?P<speed>[\d.]+)"
)


_Kinds = dict[str, Any]
_NUMBER, _END = (int, float), {"code": int, "reason": str}
_KINDS: _Kinds = {
    **dict.fromkeys(("step", "steps", "saved_step", "restarts"), int),
    **dict.fromkeys(("loss", "tokens_per_second", "seconds_left"), _NUMBER),
    "phase": str,
    "evaluation": {"step": int, "eval_loss": _NUMBER},
    "last_exit": {**_END, "time": str},
    "exit_status": _END,
}


def trusted(found: object) -> Progress | None:
    """Progress without what is not of its kind: anybody in a pod, or with a hand on an annotation, may have written it.

    Such a part is not known; None where nothing is.
    """
    if not isinstance(found, dict):
        return None
    return {
        name: told if name not in _KINDS or _is(told, _KINDS[name]) else None
        for name, told in found.items()
    }


def _is(value: object, kind: Any) -> bool:
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(
            _is(value.get(name), of) for name, of in kind.items()
        )
    return isinstance(value, kind)


def left_progress(found: Sequence[Object]) -> Progress | None:
    """Progress when node 0 ended last, as its agent left it with Kubernetes; None where it could not, or has not."""
    younger_last = sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    left = [
        message
        for pod in younger_last
        if pods.node_number(pod) == 0 and (message := pods.message_of(pod))
    ]
    return trusted(left[-1].get("progress")) if left else None


def note_progress(cluster: Cluster, spec: RunSpec, progress: Mapping[str, Any] | None) -> None:
    """Write it on the run's ConfigMap, for while a run is stopped: its pods are gone. None removes the note."""
    told = {name: (progress or {}).get(name) for name in _NOTED}
    note = None if all(value is None for value in told.values()) else json.dumps(told)
    with suppress(Refused):  # whoever may stop a run need not be allowed to write this
        cluster.merge("ConfigMap", spec.name, {"metadata": {"annotations": {_NOTE: note}}})


def noted_progress(cluster: Cluster, spec: RunSpec) -> Progress | None:
    """Progress that note_progress has written last."""
    marker = cluster.get("ConfigMap", spec.name) or {"metadata": {}}
    try:
        noted = json.loads((marker["metadata"].get("annotations") or {}).get(_NOTE, "null"))
    except (ValueError, RecursionError):
        return None  # written by hand
    known = trusted(noted)
    return None if known is None else {name: known.get(name) for name in _NOTED}


def logged_progress(cluster: Cluster, found: Sequence[Object]) -> Progress | None:
    """Progress by the last lines of the log of node 0: for pods that may not be asked, or died with their agent."""
    began = [pod for pod in found if pods.node_number(pod) == 0 and pods.has_begun(pod)]
    if not began:
        return None
    try:
        lines = cluster.log(
            pods.name_of(began[-1]), pods.trainer_container(began[-1]), tail=_TAIL_LINES
        )
        return last_step([*lines])
    except ApiError:
        return None


def last_step(lines: Sequence[str]) -> Progress | None:
    """The numbers of the last step that the lines of a log tell of."""
    found = next((found for line in reversed(lines) if (found := _STEP.search(line))), None)
    if found is None:
        return None
    return {
        "step": int(found["step"]),
        "steps": int(found["steps"]),
        "loss": float(found["loss"]),
        "tokens_per_second": float(found["speed"]),
    }
