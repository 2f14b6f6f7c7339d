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

# The resolution of deadlines, TTLs and back-offs.
_IDLE_SECONDS = 0.5
# Changes that come together are handled together.
_SETTLE_SECONDS = 0.01
# In this order; each sees what those before it have done.
_CONTROLLERS = (garbage, kueue, trainjob, jobset, pytorchjob, job, replicas, scheduler)


async def reconcile_forever(context: Context, kubelet: Kubelet) -> None:
    """Let all controllers look at the cluster after each change, and now and then without one."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(context.store.changed.wait(), _IDLE_SECONDS)
        context.store.changed.clear()
        for controller in _CONTROLLERS:
            try:
                controller.reconcile(context)
            # One broken object must not stop the others; the server's log shows it.
            except Exception:
                traceback.print_exc()
        kubelet.sync()
        await asyncio.sleep(_SETTLE_SECONDS)
