"""Who reaches a run's pods, and who may move them: nobody but themselves, unless the run file says so."""

from __future__ import annotations

import copy

import pytest

from kubetune.k8s.lint.objects import check_objects, pod_templates
from kubetune.k8s.manifests import KINDS
from tests.golden.made import made, the


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_runs_own_pods_reach_them(kind: str) -> None:
    """Trainer, preprocessing, TensorBoard and Jupyter alike, on any port; what they reach is left alone."""
    objects = made(kind)
    policy = the(objects, "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    templates = [template for obj in objects for _, template in pod_templates(obj)]
    assert len(templates) >= 4
    for template in templates:
        labels = template["metadata"]["labels"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    # Not another run's, nor pods of other programs.
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "support-bot"
    assert not [
        o for o in made(kind, "kubernetes.network_policy=false") if o["kind"] == "NetworkPolicy"
    ]


def test_a_policy_for_no_pod_is_found() -> None:
    objects = copy.deepcopy(made("job"))
    the(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"][
        "app.kubernetes.io/instance"
    ] = "support"
    (finding,) = check_objects(objects)
    assert "NetworkPolicy/support-bot: its selector" in finding.text


@pytest.mark.parametrize("kind", KINDS)
def test_autoscalers_leave_trainers_alone(kind: str) -> None:
    """And only them; the run file has the last word."""
    safe, karpenter = (
        "cluster-autoscaler.kubernetes.io/safe-to-evict",
        "karpenter.sh/do-not-disrupt",
    )
    for override in ("kubernetes.grace_seconds=180", f"kubernetes.annotations={{{safe}: 'true'}}"):
        for obj in made(kind, override):
            for _, template in pod_templates(obj):
                pod_annotations = template["metadata"].get("annotations", {})
                is_trainer = (
                    template["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
                )
                assert pod_annotations.get(karpenter) == ("true" if is_trainer else None)
                if "annotations" in override:
                    assert pod_annotations[safe] == "true"
                else:
                    assert pod_annotations.get(safe) == ("false" if is_trainer else None)


def test_operators_may_manage_the_policy() -> None:
    rules = the(made("job"), "Role", "support-bot-operator")["rules"]
    (rule,) = [rule for rule in rules if rule["apiGroups"] == ["networking.k8s.io"]]
    assert {"get", "create", "patch", "delete"} <= set(rule["verbs"])
