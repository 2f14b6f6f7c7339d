"""Admission webhooks of operators, which look at other objects too: the Trainer's, JobSet's, Kueue's.

Copied in what they refuse and in their words, not in all that they check.
"""

from __future__ import annotations

import json
from collections import Counter

from standin.state.errors import ApiError, Cause, forbidden, invalid
from standin.state.objects import Object, labels_of, name_of, namespace_of, uid_of
from standin.state.resources import resource_of
from standin.state.store import Store

_QUEUE = "kueue.x-k8s.io/queue-name"
_DEFAULT_QUEUE = "default"
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
            case "Job" if old is None:
                self._into_queue(obj)
            case "TrainJob" if old is None:
                self._admit_train_job(obj)
            case "JobSet" if old is None:
                self._admit_jobset(obj)
            case "StatefulSet" if old is not None:
                _admit_stateful_set(obj, old)

    def _into_queue(self, obj: Object) -> None:
        """Hold back a Job for its queue: one that names none gets the namespace's, where that has one called so."""
        name = labels_of(obj).get(_QUEUE, _DEFAULT_QUEUE)
        if self._store.get("LocalQueue", namespace_of(obj), name):
            obj["metadata"]["labels"] = {**labels_of(obj), _QUEUE: name}
            obj["spec"]["suspend"] = True

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

    def _admit_jobset(self, obj: Object) -> None:
        """Raise ApiError 422 for a JobSet that would make a claim whose name is taken, be it by one that goes."""
        causes = []
        for i, policy in enumerate(obj["spec"].get("volumeClaimPolicies", [])):
            path = f"spec.volumeClaimPolicies[{i}]"
            retention = (policy.get("retentionPolicy") or {}).get("whenDeleted", "Delete")
            for j, template in enumerate(policy["templates"]):
                name = jobset_claim(obj, template)
                claim = self._store.get("PersistentVolumeClaim", namespace_of(obj), name)
                if claim is None:
                    continue
                if claim["spec"] != template["spec"]:
                    text = (
                        f"spec does not match existing PVC {name} in namespace {namespace_of(obj)}"
                    )
                    causes.append(Cause(f"{path}.template[{j}].spec", text))
                if retention != "Retain":
                    text = f'"{retention}": retentionPolicy must be retain when PVC exists'
                    causes.append(Cause(f"{path}.retentionPolicy.whenDeleted", text))
        if causes:
            refusal = invalid(resource_of(obj), name_of(obj), causes)
            text = f'admission webhook "vjobset.kb.io" denied the request: {refusal.message}'
            raise ApiError(refusal.code, refusal.reason, text, refusal.details)

    def _is_known_to_kueue(self, runtime: Object | None) -> bool:
        if runtime is None:
            return False
        self._asked[uid_of(runtime)] += 1
        return self._asked[uid_of(runtime)] > _REFUSALS_OF_NEW


def jobset_claim(jobset: Object, template: Object) -> str:
    """Return the name of a claim that a JobSet makes of a template."""
    return f"{name_of(template)}-{name_of(jobset)}"


def _admit_stateful_set(obj: Object, old: Object) -> None:
    """Raise ApiError 403 for a StatefulSet in a queue that comes back before its pods have gone."""
    is_back = not old["spec"].get("replicas", 1) and obj["spec"].get("replicas", 1)
    if _QUEUE in labels_of(obj) and is_back and old.get("status", {}).get("replicas"):
        _deny("vstatefulset.kb.io", "spec.replicas: Forbidden: scaling down is still in progress")


def _deny(webhook: str, text: str) -> None:
    raise forbidden(f'admission webhook "{webhook}" denied the request: {text}')
