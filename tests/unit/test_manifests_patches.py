"""Patches of rendered objects: what they change, what they must not, and that kubectl's own merge agrees."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune.config.load import load_config
from kubetune.errors import ConfigError
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import render
from kubetune.k8s.manifests.run_spec import Manifest
from kubetune.plan.plan import make_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "full.yaml"


def rendered(*patches: dict[str, Any], kind: str = "job") -> list[Manifest]:
    """Return all objects, without the run file that travels along: that holds the patches too."""
    config = load_config(
        GOLDEN, overrides=[f"kubernetes.kind={kind}", f"kubernetes.patches={json.dumps(patches)}"]
    )
    objects = render(config, make_plan(config, gpus=8))
    return [{**obj, "data": {}} if obj["kind"] == "ConfigMap" else obj for obj in objects]


def find_object(objects: list[Manifest], kind: str, name: str = "support-bot") -> Manifest:
    (match,) = [obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, name)]
    return match


def pod_patch(**spec: Any) -> dict[str, Any]:
    return {
        "target": {"kind": "Job", "name": "support-bot"},
        "patch": {"spec": {"template": {"spec": spec}}},
    }


TRAINER = "trainer"


def test_lists_of_a_pod_merge_by_their_keys() -> None:
    plain = find_object(rendered(), "Job")["spec"]["template"]["spec"]
    patch = pod_patch(
        dnsPolicy="None",
        containers=[
            {"name": TRAINER, "stdin": True, "env": [{"name": "MORE", "value": "1"}]},
            {"name": "sidecar", "image": "proxy:1"},
        ],
        volumes=[{"name": "extra", "emptyDir": {}}],
        tolerations=[],
    )  # fmt: skip
    pod = find_object(rendered(patch), "Job")["spec"]["template"]["spec"]
    assert pod["dnsPolicy"] == "None"
    assert [container["name"] for container in pod["containers"]] == [TRAINER, "sidecar"]
    env = {entry["name"] for entry in pod["containers"][0]["env"]}
    assert env == {entry["name"] for entry in plain["containers"][0]["env"]} | {"MORE"}
    assert [volume["name"] for volume in pod["volumes"]][-1] == "extra"
    assert pod["tolerations"] == []  # has no key, so it is replaced
    assert not list(check_objects(rendered(patch)))


def test_things_are_removed_and_replaced() -> None:
    patch = pod_patch(
        priorityClassName=None,
        volumes=[
            {"name": "tmp", "$patch": "delete"},
            {"name": "tmp", "emptyDir": {"medium": "Memory"}},
        ],
        nodeSelector={"$patch": "replace", "only": "this"},
    )
    pod = find_object(rendered(patch), "Job")["spec"]["template"]["spec"]
    assert "priorityClassName" not in pod
    assert pod["nodeSelector"] == {"only": "this"}
    assert {"name": "tmp", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


@pytest.mark.parametrize("kind", ["job", "statefulset", "jobset", "pytorchjob", "trainjob"])
def test_operations_reach_every_kind(kind: str) -> None:
    plain = rendered(kind=kind)
    for obj in plain:
        path = "/metadata/annotations/example.com~1note"
        patch = {
            "target": {"kind": obj["kind"], "name": obj["metadata"]["name"]},
            "patch": [{"op": "add", "path": path, "value": "x"}],
        }
        changed = find_object(rendered(patch, kind=kind), obj["kind"], obj["metadata"]["name"])
        assert changed["metadata"]["annotations"].pop("example.com/note") == "x"
        assert changed == obj


def test_without_a_name_all_of_a_kind_are_meant() -> None:
    patch = {"target": {"kind": "Job"}, "patch": {"metadata": {"annotations": {"a": "b"}}}}
    jobs = [obj for obj in rendered(patch) if obj["kind"] == "Job"]
    assert len(jobs) == 2
    assert all(job["metadata"]["annotations"]["a"] == "b" for job in jobs)


@pytest.mark.parametrize(
    ("target", "patch", "message"),
    [
        ({"kind": "Jobb"}, {}, "no Jobb is made here; there are"),
        ({"kind": "Job", "name": "other"}, {}, "no Job called other is made here"),
        ({"kind": "Job"}, {"kind": "CronJob"}, "kind may not be changed"),
        ({"kind": "Job"}, {"metadata": {"name": "x"}}, "metadata.name may not be changed"),
        (
            {"kind": "Job"},
            {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}},
            "label app.kubernetes.io/name may",
        ),
        ({"kind": "Job"}, {"metadata": None}, "nothing of the object is left"),
        ({"kind": "Job"}, {"spec": None}, "it is no Job any more"),
        ({"kind": "Job"}, {"spec": {"template": {"spec": {"containers": []}}}}, None),
        (
            {"kind": "Job"},
            {"spec": {"template": {"spec": {"containers": {"a": 1}}}}},
            "it is no Job any more",
        ),
        (
            {"kind": "Job"},
            {"spec": {"template": {"spec": {"volumes": [{"emptyDir": {}}]}}}},
            "has no name to match it by",
        ),
        ({"kind": "Job"}, {"spec": {"$retainKeys": ["x"]}}, "`$patch: delete` or `replace`"),
        (
            {"kind": "Job"},
            [{"op": "replace", "path": "/nowhere/at/all", "value": 1}],
            "not a JSON Patch that fits",
        ),
        (
            {"kind": "Job"},
            [{"op": "remove", "path": "/spec/template/spec/containers/0"}],
            "may not be removed",
        ),
        ({"kind": "Job"}, [{"op": "change", "path": "/spec"}], "not a JSON Patch that fits"),
        (
            {"kind": "Job"},
            [{"op": "test", "path": "/kind", "value": "x"}],
            "its test does not hold",
        ),
        (
            {"kind": "Job"},
            [{"op": "test", "path": "/kind", "value": "Job", "valeu": 1}],
            "valeu is none of op, path",
        ),
        ({"kind": "Job"}, [{}], "not a JSON Patch that fits"),
        (
            {"kind": "Job", "name": "support-bot"},
            {"spec": {"parallelism": 1}},
            "how many pods there are",
        ),
        (
            {"kind": "Job", "name": "support-bot"},
            {"spec": {"completions": 7}},
            "how many pods there are",
        ),
        ({"kind": "NetworkPolicy"}, {"$patch": "delete"}, "cannot remove a whole object"),
        (
            {"kind": "ConfigMap", "name": "support-bot"},
            {"data": {"run.yaml": None}},
            "data: run.yaml may not",
        ),
        (
            {"kind": "ConfigMap", "name": "support-bot"},
            {"data": {"run.yaml": "name: x"}},
            "data: run.yaml may not",
        ),
        ({"kind": "ConfigMap", "name": "support-bot"}, {"data": None}, "data: run.yaml may not"),
    ],
)
def test_what_does_not_fit_is_refused(
    target: dict[str, Any], patch: Any, message: str | None
) -> None:
    if message is None:
        assert rendered({"target": target, "patch": patch}) == rendered()
        return
    with pytest.raises(ConfigError) as caught:
        rendered({"target": target, "patch": patch})
    assert "kubernetes.patches[0]" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "target", "patch"),
    [
        ("statefulset", "StatefulSet", {"spec": {"replicas": 1}}),
        (
            "pytorchjob",
            "PyTorchJob",
            {"spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 9}}}},
        ),
        ("trainjob", "TrainJob", {"spec": {"trainer": {"numNodes": 1}}}),
        ("jobset", "JobSet", {"spec": {"replicatedJobs": [{"name": "node", "replicas": 2}]}}),
    ],
)
def test_no_kind_may_have_fewer_or_more_pods(kind: str, target: str, patch: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="how many pods there are may not be changed"):
        rendered({"target": {"kind": target}, "patch": patch}, kind=kind)


def test_files_may_be_added_to_those_of_the_run() -> None:
    rendered(
        {"target": {"kind": "ConfigMap", "name": "support-bot"}, "patch": {"data": {"notes": "x"}}}
    )


def test_a_path_that_leads_nowhere_is_told_without_the_object() -> None:
    patch = [{"op": "add", "path": "/spec/nowhere/x", "value": 1}]
    with pytest.raises(ConfigError, match="member 'nowhere' not found") as caught:
        rendered({"target": {"kind": "Job", "name": "support-bot"}, "patch": patch})
    assert len(str(caught.value)) < 200


def test_a_secret_in_a_patch_is_refused() -> None:
    patch = pod_patch(
        containers=[{"name": TRAINER, "env": [{"name": "HF_TOKEN", "value": "hf_" + "a" * 34}]}]
    )
    with pytest.raises(ConfigError, match="secret"):
        rendered(patch)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
def test_kustomize_merges_alike(tmp_path: Path) -> None:
    patch = pod_patch(
        dnsPolicy="None",
        priorityClassName=None,
        containers=[{"name": TRAINER, "env": [{"name": "MORE", "value": "1"}], "resources": {"limits": {"a/b": "1"}}}],
        volumes=[{"name": "extra", "emptyDir": {}}, {"name": "tmp", "$patch": "delete"}],
        tolerations=[{"operator": "Exists"}],
    )  # fmt: skip
    job = find_object(rendered(), "Job")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    wanted = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "support-bot", "namespace": "finetune"},
    }
    theirs = {
        "resources": ["job.yaml"],
        "patches": [{"patch": yaml.safe_dump({**wanted, **patch["patch"]})}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(theirs))
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True
    )

    def in_order(value: Any) -> Any:
        """Return the object with lists that merge by a key in the order of the key: kustomize puts new items first."""
        if isinstance(value, dict):
            return {key: in_order(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return sorted(map(in_order, value), key=lambda item: json.dumps(item, sort_keys=True))
        return value

    assert in_order(yaml.load(done.stdout, yaml.CSafeLoader)) == in_order(
        find_object(rendered(patch), "Job")
    )
