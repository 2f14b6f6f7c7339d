"""Progress of a Kubeflow TrainJob, told to the status server of its controller, by the variables that it sets in pods.

`kubectl get trainjob -o yaml` shows it under status.trainerStatus: per cent, seconds left, metrics. The token changes
now and then, so it is read anew for each request.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.logs import scrub
from kubetune.rundir import metrics
from kubetune.rundir.status import progress

if TYPE_CHECKING:
    from kubetune.supervisor.observers.beside import Observed

URL, CA, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
SECONDS_BETWEEN = 15.0
"""More often than every five seconds it asks not to be told."""
_SECONDS_OF_REQUEST = 5.0
_MOST_METRICS, _LONGEST = 256, 64


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """The pod of node 0 of a TrainJob whose controller wants to know."""
    return node == 0 and all(environ.get(name) for name in (URL, CA, TOKEN))


def observe(run: Observed) -> None:
    """Tell of progress where there is any, and of the end. A server that fails is told of once, and tried again."""
    told, failures, first = None, 0, ""
    while True:
        is_last = run.ended.is_set()
        status = body(progress(run.run_dir))
        if status != told:
            try:
                _post(status)
                told = status
            except (OSError, ValueError, http.client.HTTPException) as error:
                failures += 1
                if failures == 1:
                    first = scrub(str(error) or type(error).__name__)
                    print(
                        f"kubetune: the TrainJob does not hear of progress; training goes on: {first}",
                        file=sys.stderr,
                    )
        if is_last:
            break
        run.ended.wait(SECONDS_BETWEEN)
    if failures:
        print(
            f"kubetune: the TrainJob missed {failures} reports of progress; first: {first}",
            file=sys.stderr,
        )


def body(known: Mapping[str, Any]) -> dict[str, Any]:
    """Status as the server takes it, but for the time: whole numbers, and metrics as texts."""
    step, steps = known["step"] or 0, known["steps"]
    left, evaluation = known["seconds_left"], known["evaluation"] or {}
    numbers = {"step": step, "loss": known["loss"], "tokens_per_second": known["tokens_per_second"]}
    numbers |= {name: value for name, value in evaluation.items() if name.startswith("eval_")}
    found = [
        {"name": name, "value": f"{value:.6g}"}
        for name, value in numbers.items()
        if isinstance(value, int | float) and math.isfinite(value) and 0 < len(name) <= _LONGEST
    ]
    status: dict[str, Any] = {"metrics": found[:_MOST_METRICS]}
    if steps:
        status["progressPercentage"] = min(100, int(100 * step / steps))
    if left is not None:
        status["estimatedRemainingSeconds"] = math.ceil(left)
    return status


def _post(status: Mapping[str, Any]) -> None:
    url = os.environ[URL]
    if not url.startswith("https://"):
        raise ValueError(f"{URL} is {url}; expected an address with https, since a token is sent")
    content = json.dumps({"trainerStatus": {**status, "lastUpdatedTime": metrics.now()}}).encode()
    token = Path(os.environ[TOKEN]).read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, content, headers, method="POST")
    context = ssl.create_default_context(cafile=os.environ[CA])
    # Nothing but the server itself: a proxy of the environment is for the way out of the cluster.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect()
    )
    with opener.open(request, timeout=_SECONDS_OF_REQUEST) as answer:
        answer.read(1)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """No other address gets the token."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None
