"""Admission webhooks of operators, which look at other objects too: the Trainer's, Kueue's.

Copied in what they refuse and in their words, not in all that they check.
"""

from __future__ import annotations

import json
from collections import Counter

from standin.state.errors import forbidden
from standin.state.objects import Object, labels_of, namespace_of, uid_of
from standin.state.store import Store

_QUEUE = "kueue.x-k8s.io/queue-name"
# A real webhook learns of a new object some moments later; counted, it is the same on a slow machine.
_REFUSALS_OF_NEW = 1


class Webhooks:
    """What the webhooks know."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: Counter[str] = Counter()  # how often Kueue was asked about a runtime, by uid

    def admit(self, obj: Object, old: Object | None) -> None:
        """Raise ApiError for an object that is refused; `old` is what it would replace."""
        match obj["kind"]:
            case "TrainJob" if old is None:
                self._admit_train_job(obj)
            case "StatefulSet" if old is not None:
                _admit_stateful_set(obj, old)

    def _admit_train_job(self, obj: Object) -> None:
        """Raise ApiError 403 for a TrainJob whose runtime is not there, or not known yet."""
        reference = obj["spec"]["runtimeRef"]
        kind = reference.get("kind", "ClusterTrainingRuntime")
        name = reference["name"]
        namespace = namespace_of(obj) if kind == "TrainingRuntime" else ""
        runtime = self._store.get(kind, namespace, name)
        if _QUEUE in labels_of(obj) and not self._is_known_to_kueue(runtime):
            _deny("vtrainjob.kb.io", f"runtime '{name}' not found")
        if runtime is None:
            called = kind[0].lower() + kind[1:]
            text = (
                f'spec.runtimeRef: Invalid value: {json.dumps(reference)}: {kind}.trainer.kubeflow.org "{name}" not '
                f"found: specified {called} must be created before the TrainJob is created"
            )
            _deny("validator.trainjob.trainer.kubeflow.org", text)

    def _is_known_to_kueue(self, runtime: Object | None) -> bool:
        if runtime is None:
            return False
        self._asked[uid_of(runtime)] += 1
        return self._asked[uid_of(runtime)] > _REFUSALS_OF_NEW


def _admit_stateful_set(obj: Object, old: Object) -> None:
    """Raise ApiError 403 for a StatefulSet in a queue that comes back before its pods have gone."""
    is_back = not old["spec"].get("replicas", 1) and obj["spec"].get("replicas", 1)
    if _QUEUE in labels_of(obj) and is_back and old.get("status", {}).get("replicas"):
        _deny("vstatefulset.kb.io", "spec.replicas: Forbidden: scaling down is still in progress")


def _deny(webhook: str, text: str) -> None:
    raise forbidden(f'admission webhook "{webhook}" denied the request: {text}')
