"""Failure policies: for each of our exit codes, what Kubernetes does about a pod that ended with it.

    pod ended by              Job                  Job of a JobSet       what the JobSet then does
    2, 4, 5, 6  (FINAL)       the run fails        fails: "exit code 4"  the run fails
    143         (PREEMPTED)   again, not counted   fails: "exit code 143"  all again, not counted
    eviction, drained node    again, not counted   fails: "DisruptionTarget"  all again, not counted
    1, 145, all others        again, counted       fails                 all again, counted

What would only fail again (bad config or data, diverged, not good enough, out of memory) fails the run at once. A pod
that saved a good checkpoint before it ended with 143 lost nothing, so such an end does not count.
"""

from __future__ import annotations

from kubetune.errors import FINAL, OK, PREEMPTED
from kubetune.k8s.manifests.run_spec import Manifest


def on_exit_codes(action: str, codes: list[int], operator: str = "In") -> Manifest:
    """Return a rule of a Job's policy. It names no container, so init containers that meet bad data count too."""
    return {"action": action, "onExitCodes": {"operator": operator, "values": codes}}


def pod_failure_policy(*, gang: bool) -> Manifest:
    """Return the policy of a Job. With `gang` every end fails the Job: its owner restarts all pods together."""
    again = "FailJob" if gang else "Ignore"
    # Schemas before Kubernetes 1.34 require the status.
    disruption = {"type": "DisruptionTarget", "status": "True"}
    rules = [
        on_exit_codes("FailJob", list(FINAL)),
        {"action": again, "onPodConditions": [disruption]},
        on_exit_codes(again, [PREEMPTED]),
    ]
    if gang:
        # Without this rule other codes fail the Job as "the specified backoff limit". A rule has the event name pod and
        # code, which is all that is left of a pod whose Job is deleted with it.
        rules.append(on_exit_codes("FailJob", [OK], "NotIn"))
    return {"rules": rules}


def jobset_failure_policy(max_restarts: int, *, deadline: bool, alone: bool = False) -> Manifest:
    """Return the policy of a JobSet, which knows why its Job failed only by the Job controller's message.

    With `alone` the Job that failed starts again by itself, and what came before it is not done twice.
    """
    again = "RestartJob" if alone else "RestartJobSet"
    final_codes = "|".join(str(code) for code in FINAL)
    rules: list[Manifest] = [
        {
            "name": "final",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f".*exit code ({final_codes}) .*"],
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
    return {
        "maxRestarts": max_restarts,
        # All pods of the old attempt are gone before the new one starts, so none of them holds a GPU or a volume.
        "restartStrategy": "BlockingRecreate",
        "rules": rules,
    }
