"""Level-triggered controllers: after every change all of them look at all objects, of which a test has dozens."""

from __future__ import annotations

import asyncio
import contextlib
import traceback

from standin.controllers import (
    garbage,
    job,
    jobset,
    kueue,
    pytorchjob,
    replicas,
    scheduler,
    trainjob,
)
from standin.controllers.context import Context
from standin.node.kubelet import Kubelet

_IDLE_SECONDS = 0.5  # the resolution of deadlines, TTLs and back-offs
_SETTLE_SECONDS = 0.01  # changes that come together are handled together


async def reconcile_forever(context: Context, kubelet: Kubelet) -> None:
    steps = [
        module.reconcile
        for module in (garbage, kueue, trainjob, jobset, pytorchjob, job, replicas, scheduler)
    ]
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.store.changed.wait(), _IDLE_SECONDS)
        context.store.changed.clear()
        for step in steps:
            try:
                step(context)
            except (
                Exception
            ):  # one broken object must not stop the others; the server's log shows it
                traceback.print_exc()
        kubelet.sync()
        await asyncio.sleep(_SETTLE_SECONDS)
