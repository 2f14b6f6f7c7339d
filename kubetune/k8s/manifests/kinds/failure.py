"""Failure policies: for each of our exit codes, what Kubernetes does about a pod that ended with it.

2 (config or data), 4 (diverged) and 5 (not good enough) would only fail again, so the run fails at once. A preemption
or a drain (143 with a good checkpoint, or the disruption condition) starts again and does not count. All else, 145
(lost a peer) among it, starts again and counts.
"""

from __future__ import annotations

from kubetune.errors import FINAL, OK, PREEMPTED
from kubetune.k8s.manifests.spec import Manifest


def _on_codes(action: str, codes: list[int], operator: str = "In") -> Manifest:
    # No container is named: an init container that meets bad data ends the run just the same.
    return {"action": action, "onExitCodes": {"operator": operator, "values": codes}}


def _on_disruption(action: str) -> Manifest:
    # Schemas before Kubernetes 1.34 require the status.
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def pod_failure_policy(*, gang: bool) -> Manifest:
    """The policy of a Job. With `gang` every end fails the Job, since whoever owns it restarts all pods together."""
    again = "FailJob" if gang else "Ignore"
    rules = [
        _on_codes("FailJob", list(FINAL)),
        _on_disruption(again),
        _on_codes(again, [PREEMPTED]),
    ]
    # All other codes would fail a gang's Job too, as "the specified backoff limit": a rule names pod and code in the
    # Job's event, which is all that is left of a pod whose Job is deleted with it.
    return {"rules": [*rules, _on_codes("FailJob", [OK], "NotIn")] if gang else rules}


def jobset_failure_policy(max_restarts: int, *, deadline: bool, alone: bool = False) -> Manifest:
    """The policy of a JobSet: it sees why its Job failed only in the Job controller's message.

    With `alone` the Job that failed starts again by itself, and what came before it is not done twice.
    """
    again = "RestartJob" if alone else "RestartJobSet"
    final = "|".join(map(str, FINAL))
    rules: list[Manifest] = [
        {
            "name": "final",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f".*exit code ({final}) .*"],
        },
        {
            "name": "preempted",
            "action": f"{again}AndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [
                ".*condition DisruptionTarget.*",
                f".*exit code {PREEMPTED} .*",
            ],
        },
    ]
    if deadline:
        rules.append(
            {
                "name": "deadline",
                "action": "FailJobSet",
                "onJobFailureReasons": ["DeadlineExceeded"],
            }
        )
    if alone:
        rules.append({"name": "failed", "action": again})
    # All pods of the old attempt are gone before the new one starts, so that none of them holds a GPU or a volume.
    return {"maxRestarts": max_restarts, "restartStrategy": "BlockingRecreate", "rules": rules}
