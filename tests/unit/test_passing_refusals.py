"""Which refusals are asked again, and for how long: one table, which all requests go through."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx2")

from kubetune.k8s.api.api_errors import ApiCall, may_pass, refusal
from kubetune.k8s.api.kinds import KINDS
from kubetune.k8s.api.passing import PASSING, passing_refusal

POD = KINDS["Pod"]
NO_KIND = "the server could not find the requested resource"
FRESH_KUBELET = f"{NO_KIND} ( pods/log fit-0)"
TOO_LARGE = "Timeout: Too large resource version: 11303, current: 11302; try again later"
AWAY = "dial tcp 10.0.0.7:10250: connect: connection refused"
SCALING = (
    'admission webhook "vstatefulset.kb.io" denied the request: spec.replicas: Forbidden: scaling down is still in '
    "progress"
)
NO_RIGHT = 'pods is forbidden: User "ann" cannot list resource "pods" in API group ""'


@pytest.mark.parametrize(
    ("code", "message", "subresource", "kind", "seconds"),
    [
        (404, FRESH_KUBELET, "log", "Pod", 30),
        (404, f"{NO_KIND} ( pods/exec fit-0)", "exec", "Pod", 30),
        (500, "unable to upgrade connection: pod does not exist", "exec", "Pod", 30),
        # It is gone.
        (404, 'pods "fit-0" not found', "log", "Pod", None),
        (404, 'pods "fit-0" not found', "", "Pod", None),
        (404, 'jobsets.jobset.x-k8s.io "fit" not found', "", "JobSet", None),
        (404, NO_KIND, "", "Job", 30),
        (404, "404 page not found", "", "Job", 30),
        (404, NO_KIND, "", "JobSet", 30),
        (404, NO_KIND, "", "Workload.v1beta2", 30),
        (504, TOO_LARGE, "", "Pod", 60),
        (429, "too many requests", "", "Pod", 60),
        (503, "", "exec", "Pod", 60),
        (500, "etcdserver: leader changed", "", "Pod", 10),
        (500, AWAY, "exec", "Pod", 10),
        (403, NO_RIGHT, "", "Pod", 30),
        (403, "exceeded quota: gpus", "", "Pod", None),
        (403, SCALING, "", "StatefulSet", 60),
        (409, "conflict", "", "Pod", None),
        (410, "too old resource version", "", "Pod", None),
        (422, "invalid", "", "Pod", None),
    ],
)
def test_a_refusal_is_asked_again_for_as_long_as_the_table_says(
    code: int, message: str, subresource: str, kind: str, seconds: int | None
) -> None:
    row = passing_refusal(code, message, KINDS[kind], subresource)
    assert (None if row is None else row.seconds) == seconds


@pytest.mark.parametrize(
    ("kind", "code", "message"), [("Pod", 403, NO_RIGHT), ("JobSet", 404, NO_KIND)]
)
def test_what_a_server_says_as_it_starts_is_not_repeated_by_the_clock_alone(
    kind: str, code: int, message: str
) -> None:
    """The connection asks such a server whether it is ready, and believes it then."""
    error = refusal(ApiCall("list", KINDS[kind], "team"), code, {"message": message})
    assert error.again_seconds == 0
    assert not may_pass(error)


def test_a_node_that_is_away_may_stay_so() -> None:
    """Where another pod may answer, no time is lost with this one."""
    error = refusal(ApiCall("exec", POD, "team", "fit-0", "exec"), 500, {"message": AWAY})
    assert error.again_seconds == 0


@pytest.mark.parametrize(
    ("code", "message", "meaning", "advice"),
    [
        (500, AWAY, "its node cannot be asked", "see kubectl get nodes"),
        (502, "Bad Gateway", "the API server is not ready", "try again later"),
        (503, "apiserver is shutting down", "the API server is not ready", "try again later"),
    ],
)
def test_a_sentence_blames_whom_the_table_names(
    code: int, message: str, meaning: str, advice: str
) -> None:
    """Of a command in a pod, too, which the API server passes on to the node: 502 comes from before it."""
    error = refusal(ApiCall("exec", POD, "team", "fit-0", "exec"), code, {"message": message})
    assert str(error) == f"exec in Pod fit-0: {meaning} ({code}): {message}; {advice}"


def test_a_pause_that_the_status_asks_for_is_made() -> None:
    status = {"message": TOO_LARGE, "details": {"retryAfterSeconds": 3}}
    error = refusal(ApiCall("watch", POD, "team"), 504, status)
    assert (error.again_seconds, error.pause_seconds) == (60, 3)
    assert "has not read yet what another one has written" in str(error)


def test_each_row_is_met() -> None:
    """A row behind another that covers it would say nothing."""
    words = {
        401: ("Unauthorized",),
        403: (NO_RIGHT, SCALING),
        404: (FRESH_KUBELET,),
        504: (TOO_LARGE, ""),
    }
    for row in PASSING:
        code = row.codes[0]
        subresource = (row.subresources or ("",))[0]
        kind = KINDS["JobSet"] if row.is_built_in is False else POD
        met = [passing_refusal(code, text, kind, subresource) for text in words.get(code, ("",))]
        assert row in met
