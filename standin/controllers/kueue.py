"""Kueue for Jobs of which the namespace has the LocalQueue: suspended until admitted, at once as there is always room.

A Workload stands for each; the Job runs while that is active, whatever else suspends it or lets it go.
"""

from __future__ import annotations

from standin.controllers.context import Context
from standin.state.objects import Object, condition, labels_of, name_of, namespace_of, terminating

_QUEUE = "kueue.x-k8s.io/queue-name"


def reconcile(context: Context) -> None:
    for job in context.store.list("Job"):
        queue = labels_of(job).get(_QUEUE)
        ended = condition(job, "Complete") or condition(job, "Failed")
        if queue and not ended and not terminating(job) and context.store.get("LocalQueue", namespace_of(job), queue):
            _reconcile_job(context, job, queue)


def _reconcile_job(context: Context, job: Object, queue: str) -> None:
    workloads = context.owned(job, "Workload")
    if not workloads:
        context.create(job, "Workload", {"name": f"job-{name_of(job)}-1a2b3"}, {"queueName": queue, "active": True})
        return
    suspend = not workloads[0]["spec"].get("active", True)
    if bool(job["spec"].get("suspend")) != suspend:
        job["spec"]["suspend"] = suspend
        context.store.touch(job)
