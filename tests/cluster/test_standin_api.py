"""What the stand-in's API accepts, refuses and answers: access, Pod Security, patches, watches, unknown fields."""

from __future__ import annotations

import copy
import json
import urllib.error
import urllib.request

import lightkube
import pytest
from lightkube import codecs
from lightkube.resources.core_v1 import ConfigMap, Pod

from standin.api import access
from standin.api.apply import apply
from standin.api.merge import merge_patch, strategic
from standin.api.rules import broken_rules
from standin.api.selectors import selector
from standin.state.errors import ApiError
from standin.state.objects import Object
from tests.cluster.harness import Cluster
from tests.cluster.manifests import config_map, container, job, jobset, pod, pod_spec


def test_a_lightkube_client_applies_watches_and_executes(cluster: Cluster) -> None:
    config = lightkube.KubeConfig.from_file(cluster.kubeconfig)
    with lightkube.Client(
        config=config, namespace=cluster.namespace, field_manager="test"
    ) as client:
        client.apply(
            codecs.from_dict(pod("box", "echo up; exec sleep 600", terminationGracePeriodSeconds=0))
        )
        client.wait(Pod, "box", for_conditions=["Ready"])
        done = client.exec(
            "box", command=["sh", "-c", "echo out; exit 3"], stdout=True, raise_on_error=False
        )
        assert (done.stdout, done.exit_code) == ("out\n", 3)
        assert list(client.log("box")) == ["up\n"]
        with pytest.raises(lightkube.ApiError, match='configmaps "none" not found') as refused:
            client.get(ConfigMap, "none")
    assert refused.value.status.code == 404


def refused(cluster: Cluster, token: str, method: str, path: str) -> str:
    """Return the message of a refused request made with another token; empty when it was granted."""
    request = urllib.request.Request(cluster.control_plane.url + path, method=method)
    request.add_header("Authorization", f"Bearer {token}")
    try:
        urllib.request.urlopen(request, timeout=60).close()
    except urllib.error.HTTPError as error:
        with error:
            return str(json.load(error)["message"])
    return ""


def test_a_service_account_may_do_what_its_role_says(cluster: Cluster) -> None:
    group = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    rules = [{"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}]
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    subjects = [{"kind": "ServiceAccount", "name": "user", "namespace": cluster.namespace}]
    cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "user"}},
        {**group, "kind": "Role", "metadata": {"name": "reader"}, "rules": rules},
        {
            **group,
            "kind": "RoleBinding",
            "metadata": {"name": "user"},
            "roleRef": reference,
            "subjects": subjects,
        },
    )
    token = f"sa:{cluster.namespace}:user"
    pods = f"/api/v1/namespaces/{cluster.namespace}/pods"
    assert refused(cluster, token, "GET", pods) == ""
    assert refused(cluster, token, "DELETE", f"{pods}/x").endswith(
        f'cannot delete resource "pods" in API group "" in the namespace "{cluster.namespace}"'
    )
    assert 'cannot list resource "jobs" in API group "batch"' in refused(
        cluster, token, "GET", f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs"
    )
    assert refused(cluster, access.ADMIN, "GET", pods) == ""


def test_a_service_account_is_bound_with_its_namespace(cluster: Cluster) -> None:
    """That of the binding does not count for it."""
    group = "rbac.authorization.k8s.io"
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "user"},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "user"}],
    }
    with pytest.raises(AssertionError, match=r"422 .*subjects\[0\]\.namespace: Required value"):
        cluster.apply(binding)


def test_pod_security_refuses_pods_but_not_the_job_that_makes_them(cluster: Cluster) -> None:
    label = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    path = f"/api/v1/namespaces/{cluster.namespace}"
    cluster.request("PATCH", path, label, "application/merge-patch+json")
    with pytest.raises(AssertionError, match=r'403 .*violates PodSecurity \\"restricted:latest\\"'):
        cluster.apply(pod("loose", "true"))
    cluster.apply(job("loose", pod_spec("true")))
    cluster.wait_event("violates PodSecurity")
    strict = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    context = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    cluster.apply(
        pod("tight", "true", container={"securityContext": strict}, securityContext=context)
    )
    cluster.wait_phase("tight", "Succeeded")


def test_custom_kinds_are_checked_against_their_schemas(cluster: Cluster) -> None:
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pod_spec("true")}}}}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "js"},
    }
    with pytest.raises(AssertionError, match=r'unknown field \\"spec.replicatedJob\\"'):
        cluster.apply({**jobset, "spec": {"replicatedJob": [replicated]}})
    with pytest.raises(AssertionError, match=r"422 .*spec\.failurePolicy\.maxRestarts"):
        cluster.apply(
            {
                **jobset,
                "spec": {"replicatedJobs": [replicated], "failurePolicy": {"maxRestarts": "x"}},
            }
        )


def test_a_watch_goes_on_where_the_last_one_ended(cluster: Cluster) -> None:
    cluster.apply(config_map("a", x="1"))
    path = f"/api/v1/namespaces/{cluster.namespace}/configmaps"
    revision = cluster.request("GET", path)["metadata"]["resourceVersion"]
    labelled = config_map("a", x="1")
    labelled["metadata"]["labels"] = {"l": "1"}
    cluster.apply(labelled, config_map("b", x="1"), config_map("a", x="2"))
    query = f"watch=true&resourceVersion={revision}&timeoutSeconds=0.1"
    assert watched(cluster, f"{path}?{query}") == [
        ("MODIFIED", "a"),
        ("ADDED", "b"),
        ("MODIFIED", "a"),
    ]
    # an object that gains or loses the label comes and goes
    assert watched(cluster, f"{path}?{query}&labelSelector=l") == [("ADDED", "a"), ("DELETED", "a")]


def watched(cluster: Cluster, path: str) -> list[tuple[str, str]]:
    with urllib.request.urlopen(cluster.control_plane.url + path, timeout=60) as answer:
        events = [json.loads(line) for line in answer]
    return [(event["type"], event["object"]["metadata"]["name"]) for event in events]


def test_a_stale_update_is_a_conflict(cluster: Cluster) -> None:
    cluster.apply(config_map("m", a="1"))
    stale = cluster.get("ConfigMap", "m")
    cluster.apply(config_map("m", a="2"))
    path = f"/api/v1/namespaces/{cluster.namespace}/configmaps/m"
    with pytest.raises(AssertionError, match=r"409 .*the object has been modified"):
        cluster.request("PUT", path, stale)
    assert cluster.get("ConfigMap", "m")["data"] == {"a": "2"}


def test_deleting_an_owner_deletes_what_it_owns(cluster: Cluster) -> None:
    """A pod's own claim as well, though the one waits for the other: it is free as soon as the pod is shut down."""
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    volumes = [{"name": "own", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}}]
    template = pod_spec("exec sleep 600", terminationGracePeriodSeconds=0, volumes=volumes)
    cluster.apply(job("fit", template, completions=2, parallelism=2))
    cluster.wait_ready("fit", pods=2)
    path = f"/apis/batch/v1/namespaces/{cluster.namespace}/jobs/fit"
    cluster.request("DELETE", path, {"propagationPolicy": "Foreground"})
    cluster.wait_gone("Job", "fit")
    assert cluster.find("Pod") == cluster.find("PersistentVolumeClaim") == []


# -- patches, without a server
def test_merge_patches() -> None:
    assert merge_patch({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": 4}}) == {
        "b": {"c": 4, "d": 3}
    }
    containers = [container("x", name="a"), container("y", name="b")]
    patched = strategic({"containers": containers}, {"containers": [{"name": "b", "image": "new"}]})
    assert [entry["image"] for entry in patched["containers"]] == ["busybox", "new"]
    removed = strategic(
        {"containers": containers}, {"containers": [{"name": "a", "$patch": "delete"}]}
    )
    assert removed == {"containers": containers[1:]}


def test_apply_removes_only_what_nobody_else_owns() -> None:
    def config(**data: str) -> Object:
        return config_map("m", **data)

    first = apply(None, config(a="1", b="1"), "one", force=False)
    both = apply(first, config(a="1"), "two", force=False)
    dropped = apply(both, config(), "one", force=False)
    assert dropped["data"] == {"a": "1"}
    with pytest.raises(ApiError, match=r'conflict with "two": \.data\.a'):
        apply(dropped, config(a="2"), "one", force=False)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("app=x", {1}),
        ("app!=x", {2, 3}),
        ("app in (x, y),tier", {2}),
        ("app notin (x)", {2, 3}),
        ("!app", {3}),
        ("app==y,tier=back", {2}),
    ],
)
def test_label_selectors(text: str, chosen: set[int]) -> None:
    labels = {1: {"app": "x"}, 2: {"app": "y", "tier": "back"}, 3: {}}
    matches = selector({"labelSelector": text})
    assert {
        number
        for number, labels_of_one in labels.items()
        if matches({"metadata": {"labels": labels_of_one}})
    } == chosen


def test_what_operators_keep_as_it_is() -> None:
    """Of a JobSet that is suspended a queue may place the pods."""
    old = jobset("fit", pod_spec("true"), {"maxRestarts": 0})
    new = copy.deepcopy(old)
    assert list(broken_rules(new, old)) == []
    placed = new["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    placed["nodeSelector"] = {"rack": "1"}
    assert [cause.field for cause in broken_rules(new, old)] == ["spec.replicatedJobs"]
    new["spec"]["suspend"] = True
    assert list(broken_rules(new, old)) == []
    placed["containers"][0]["image"] = "other"
    new["spec"]["failurePolicy"] = {"maxRestarts": 1}
    fields = {cause.field for cause in broken_rules(new, old)}
    assert fields == {"spec.replicatedJobs", "spec.failurePolicy"}


def test_an_object_of_nothing_but_a_name_may_be_applied_twice() -> None:
    flavor = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ResourceFlavor",
        "metadata": {"name": "any"},
    }
    once = apply(None, flavor, "one", force=False)
    assert apply(once, flavor, "one", force=False)["metadata"]["name"] == "any"


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", "PyTorchJob", "Service"])
def test_names_of_operators_begin_with_a_letter(kind: str) -> None:
    wrong = {"kind": kind, "metadata": {"name": "3b"}, "spec": {}}
    assert [cause.field for cause in broken_rules(wrong, None)] == ["metadata.name"]
    assert list(broken_rules({**wrong, "kind": "ConfigMap"}, None)) == []


def test_a_selector_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ApiError, match="unable to parse requirement"):
        selector({"labelSelector": "app in x"})
