"""Send the progress of a Kubeflow TrainJob to its controller's status server, which variables of the pod name.

`kubectl get trainjob -o yaml` shows it under status.trainerStatus: per cent, seconds left, metrics.
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
    from kubetune.supervisor.observers.observer_process import Observed

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
SECONDS_BETWEEN = 15.0  # the server wants no report more often than every five seconds
_SECONDS_OF_REQUEST = 5.0
# The server refuses a status with more metrics, or with longer names of metrics.
_MOST_METRICS = 256
_LONGEST_NAME = 64


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """True in the pod of node 0 of a TrainJob whose controller has a status server."""
    return node == 0 and all(environ.get(name) for name in (URL, CA, TOKEN))


def observe(run: Observed) -> None:
    """Send the progress whenever it has changed, and at the end. Failures are reported once, and tried again."""
    sent = None
    failures = 0
    first_failure = ""
    while True:
        # Asked before the status is read, so that the last status is always sent.
        is_last = run.ended.is_set()
        status = body(progress(run.run_dir))
        # A status that was not taken is sent again, with whatever has changed meanwhile.
        if status != sent:
            try:
                _post(status)
                sent = status
            except (OSError, ValueError, http.client.HTTPException) as error:
                failures += 1
                if failures == 1:
                    first_failure = scrub(str(error) or type(error).__name__)
                    print(
                        f"kubetune: the TrainJob does not hear of progress; training goes on: {first_failure}",
                        file=sys.stderr,
                    )
        if is_last:
            break
        run.ended.wait(SECONDS_BETWEEN)
    if failures:
        print(
            f"kubetune: the TrainJob missed {failures} reports of progress; first: {first_failure}",
            file=sys.stderr,
        )


def body(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status in the server's form, without its time: whole numbers, and metrics as texts."""
    step = known["step"] or 0
    # Only the metrics of the last evaluation, not its step and epoch.
    numbers = {"step": step, "loss": known["loss"], "tokens_per_second": known["tokens_per_second"]}
    for name, value in (known["evaluation"] or {}).items():
        if name.startswith("eval_"):
            numbers[name] = value

    entries = []
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if is_number and 0 < len(name) <= _LONGEST_NAME:
            entries.append({"name": name, "value": f"{value:.6g}"})

    status: dict[str, Any] = {"metrics": entries[:_MOST_METRICS]}
    if known["steps"]:
        status["progressPercentage"] = min(100, int(100 * step / known["steps"]))
    if known["seconds_left"] is not None:
        status["estimatedRemainingSeconds"] = math.ceil(known["seconds_left"])
    return status


def _post(status: Mapping[str, Any]) -> None:
    url = os.environ[URL]
    if not url.startswith("https://"):
        raise ValueError(f"{URL} is {url}; expected an address with https, since a token is sent")
    content = json.dumps({"trainerStatus": {**status, "lastUpdatedTime": metrics.now()}}).encode()
    # Read for each request, because Kubernetes replaces the token from time to time.
    token = Path(os.environ[TOKEN]).read_text().strip()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, content, headers, method="POST")
    context = ssl.create_default_context(cafile=os.environ[CA])
    # Without a proxy: the one in the environment is for addresses outside of the cluster.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirect()
    )
    with opener.open(request, timeout=_SECONDS_OF_REQUEST) as answer:
        answer.read(1)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so that no other address gets the token."""

    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None
