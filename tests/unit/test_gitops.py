"""The rendered folder under the hands of GitOps: overlays that rename, and the order in which Argo CD applies."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune.cli import main
from kubetune.k8s.lint.objects import check_objects, pod_templates
from kubetune.k8s.manifests import KINDS
from kubetune.k8s.manifests.kustomize import template_paths
from standin.schemas import problems
from tests.golden.made import FULL, MINIMAL, made

WAVE = "argocd.argoproj.io/sync-wave"
KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
NO_DEADLINE = "kubernetes.max_runtime_seconds=null"
CASES = {
    **{
        kind: [str(FULL), f"--kind={kind}", *([NO_DEADLINE] if kind == "statefulset" else [])]
        for kind in KINDS
    },
    "shared": [
        str(FULL),
        "--kind=jobset",
        "kubernetes.storage.cache={size: 1Ti, access: ReadWriteMany}",
    ],
    **{
        f"{gang}-{kind}": [
            str(MINIMAL),
            f"--kind={kind}",
            "compute.nodes=2",
            f"kubernetes.scheduling.gang={gang}",
        ]
        for gang, kind in (
            ("volcano", "job"),
            ("volcano", "jobset"),
            ("volcano", "statefulset"),
        )
    },
}


def built(folder: Path, **overlay: Any) -> list[dict[str, Any]]:
    """Return what kustomize makes of an overlay of a rendered folder."""
    (folder / "overlay").mkdir()
    (folder / "overlay" / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": ["../base"], **overlay})
    )
    done = subprocess.run(
        ["kubectl", "kustomize", folder / "overlay"], capture_output=True, text=True, check=True
    )
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in an object with the path to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from texts(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner, path)
    else:
        yield path, str(value)


@KUBECTL
@pytest.mark.parametrize("case", CASES)
def test_a_renamed_run_refers_to_nothing_under_its_old_name(case: str, tmp_path: Path) -> None:
    """All that stays is the run directory, and the Secret with Jupyter's token, which is not part of the folder."""
    assert main(["render", *CASES[case], "-o", str(tmp_path / "base")]) == 0
    name = "support-bot" if str(FULL) in CASES[case] else "tiny-gpt2"
    objects = built(tmp_path, namePrefix="alice-")
    left = {
        (path.rpartition(".")[2], text)
        for obj in objects
        for path, text in texts(obj)
        if name in text.replace(f"alice-{name}", "") and not path.startswith(".data.")
    }
    assert left <= {("command", f"/outputs/{name}"), ("name", f"{name}-jupyter")}
    assert [finding.text for finding in check_objects(objects)] == []
    assert [problem for obj in objects for problem in problems(obj)] == []
    accounts = {
        template["spec"]["serviceAccountName"]
        for obj in objects
        for _, template in pod_templates(obj)
    }
    assert accounts <= {f"alice-{name}", "default"}
    known = {(obj["kind"], obj["metadata"]["name"]) for obj in objects} | {
        ("PersistentVolumeClaim", "datasets")
    }
    volumes = [
        v
        for obj in objects
        for _, template in pod_templates(obj)
        for v in template["spec"]["volumes"]
    ]
    assert {("ConfigMap", v["configMap"]["name"]) for v in volumes if "configMap" in v} <= known
    claims = [
        v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v
    ]
    assert {("PersistentVolumeClaim", claim) for claim in claims} <= known


@KUBECTL
@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_secret_is_found_by_pods_of_all_kinds(kind: str, tmp_path: Path) -> None:
    """Its name ends in a hash of its contents."""
    assert main(["render", *CASES[kind], "-o", str(tmp_path / "base")]) == 0
    generator = {"name": "hf-token", "namespace": "finetune", "literals": ["HF_TOKEN=x"]}
    objects = built(tmp_path, secretGenerator=[generator])
    (secret,) = (obj["metadata"]["name"] for obj in objects if obj["kind"] == "Secret")
    assert secret != "hf-token"
    trainers = [
        template["spec"]["containers"][0]["env"]
        for obj in objects
        for _, template in pod_templates(obj)
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
    ]
    assert trainers
    for env in trainers:
        assert {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": secret, "key": "HF_TOKEN"}},
        } in env


def test_the_places_of_pod_templates_are_those_of_every_kind() -> None:
    for kind in KINDS:
        for obj in made(kind):
            for path in template_paths(obj["kind"]):
                assert list(_at(obj, path)), (obj["kind"], path)
            assert template_paths(obj["kind"]) or not list(pod_templates(obj))


def _at(value: Any, path: str) -> Iterator[Any]:
    """Yield what lies at a path of kustomize, which enters lists by itself."""
    if isinstance(value, list):
        for inner in value:
            yield from _at(inner, path)
    elif not path:
        yield value
    elif isinstance(value, dict):
        first, _, rest = path.partition("/")
        if first in value:
            yield from _at(value[first], rest)


@pytest.mark.parametrize("kind", KINDS)
def test_argo_applies_what_pods_need_then_what_prepares_then_the_run(kind: str) -> None:
    assert not any(WAVE in (obj["metadata"].get("annotations") or {}) for obj in made(kind))
    objects = made(kind, "kubernetes.argocd=true")
    wave = {
        (o["kind"], o["metadata"]["name"]): int(o["metadata"]["annotations"][WAVE]) for o in objects
    }
    workload = {
        "job": "Job",
        "statefulset": "StatefulSet",
        "jobset": "JobSet",
        "pytorchjob": "PyTorchJob",
    }
    trainer = wave[workload.get(kind, "TrainJob"), "support-bot"]
    claim = wave["PersistentVolumeClaim", "support-bot-outputs"]
    assert wave["ConfigMap", "support-bot"] < claim
    preparing = wave.get(("Job", "support-bot-preprocess"))
    # A claim that waits for its first pod is healthy with that pod only: in a wave before it Argo would wait for ever.
    assert claim == (trainer if preparing is None else preparing)
    assert (preparing is None) == (kind in ("jobset", "trainjob"))
    assert preparing is None or preparing < trainer
    # A Job is healthy when it has ended: what is to be looked at while it runs comes with it.
    assert (
        wave["Deployment", "support-bot-tensorboard"]
        == wave["Pod", "support-bot-jupyter"]
        == trainer
    )
    assert [problem for obj in objects for problem in problems(obj)] == []


def test_argo_is_kept_from_starting_a_finished_run_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["render", str(FULL), "kubernetes.argocd=true"]) == 0
    assert "kubernetes.ttl_seconds: advice: 604800" in capsys.readouterr().err
    assert main(["render", str(FULL), "kubernetes.argocd=true", "kubernetes.ttl_seconds=null"]) == 0
    assert "ttl_seconds" not in capsys.readouterr().err
