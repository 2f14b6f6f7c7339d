"""Kueue for Jobs of which the namespace has the LocalQueue: suspended until admitted, at once as there is always room.

A Workload stands for each; the Job runs while that is active, whatever else suspends it or lets it go, and its queue
has no `stopPolicy`.
"""

from __future__ import annotations

from standin.controllers.context import Context
from standin.state.objects import (
    Object,
    condition,
    labels_of,
    name_of,
    namespace_of,
    set_condition,
    terminating,
)

_QUEUE = "kueue.x-k8s.io/queue-name"


def reconcile(context: Context) -> None:
    for job in context.store.list("Job"):
        queue = labels_of(job).get(_QUEUE)
        ended = condition(job, "Complete") or condition(job, "Failed")
        if not queue or ended or terminating(job):
            continue
        local_queue = context.store.get("LocalQueue", namespace_of(job), queue)
        if local_queue is not None:
            policy = local_queue["spec"].get("stopPolicy", "None")
            _reconcile_job(context, job, queue, is_held=policy != "None")


def _reconcile_job(context: Context, job: Object, queue: str, *, is_held: bool) -> None:
    workloads = context.owned(job, "Workload")
    if not workloads:
        context.create(
            job,
            "Workload",
            {"name": f"job-{name_of(job)}-1a2b3"},
            {"queueName": queue, "active": True},
        )
        return
    suspend = is_held or not workloads[0]["spec"].get("active", True)
    if is_held:
        text = f"LocalQueue {queue} is inactive"
        news = ("QuotaReserved", "False", "Inadmissible", text)
    else:
        news = ("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue all")
    if set_condition(workloads[0].setdefault("status", {}), *news):
        context.store.touch(workloads[0])
    if bool(job["spec"].get("suspend")) != suspend:
        job["spec"]["suspend"] = suspend
        context.store.touch(job)
