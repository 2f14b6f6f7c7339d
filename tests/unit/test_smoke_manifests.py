"""The smoke test of a run on a cluster, and what else is made beside a run: valid, and in pods like the run's."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.k8s.cluster.volume_reader import reader_pod
from kubetune.k8s.lint.objects import check_objects, pod_templates
from kubetune.k8s.manifests import KINDS, render, secret_templates
from kubetune.k8s.manifests.run_spec import spec_of
from kubetune.plan.plan import make_plan
from kubetune.plugins.dev_pods import dev_config, idling
from standin.schemas import NEWEST, OLDEST, problems
from tests.golden.manifests import FOLDER

FULL = FOLDER / "full.yaml"


def trainers(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    templates = [template for obj in objects for _, template in pod_templates(obj)]
    return [
        t for t in templates if t["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_smoke_test_runs_in_pods_like_the_runs(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["kubernetes.max_runtime_seconds=null"] if kind == "statefulset" else []
    assert main(["render", str(FULL), f"--kind={kind}", *more, "--smoke"]) == 0
    objects = list(yaml.load_all(capsys.readouterr().out, yaml.CSafeLoader))
    assert (
        main(["render", str(FULL), f"--kind={'job' if kind == 'statefulset' else kind}", *more])
        == 0
    )
    run = list(yaml.load_all(capsys.readouterr().out, yaml.CSafeLoader))
    for ours, theirs in zip(trainers(objects), trainers(run), strict=True):
        (mine,), (its,) = ours["spec"]["containers"], theirs["spec"]["containers"]
        assert mine["command"][4:] == [
            *(
                "smoke",
                "--nodes=4",
                "--processes=8",
                "--volume=/cache",
                "--volume=/outputs",
                "--timeout=900",
            )
        ]
        for field in ("resources", "volumeMounts", "securityContext", "image", "name"):
            assert mine[field] == its[field]
    assert {
        o["kind"]: wrong for o in objects for v in (OLDEST, NEWEST) if (wrong := problems(o, v))
    } == {}
    assert list(check_objects(objects)) == []
    assert not [
        o for o in objects if "preprocess" in o["metadata"]["name"] or o["kind"] == "Deployment"
    ]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    "preparing", [[], ["kubernetes.initialisers=[model]"], ["kubernetes.preprocess={}"]]
)
def test_whatever_is_made_beside_a_run_is_valid(version: str, preparing: list[str]) -> None:
    """The pods of `dev`, the pod that reads the outputs volume, Secrets, and every way to prepare, for every kind."""
    overrides = [
        "kubernetes.max_runtime_seconds=null",
        "kubernetes.initialisers=[]",
        "kubernetes.preprocess=null",
    ]
    config = load_config(FULL, overrides=[*overrides, *preparing])
    made = [reader_pod(spec_of(config)), *secret_templates(spec_of(config))]
    made += idling(render(dev_config(config), make_plan(config)))
    for kind in KINDS:
        assert config.kubernetes is not None
        of_kind = config.model_copy(
            update={"kubernetes": config.kubernetes.model_copy(update={"kind": kind})}
        )
        made += render(of_kind, make_plan(of_kind))
    assert {
        f"{o['kind']} {o['metadata']['name']}": wrong
        for o in made
        if (wrong := problems(o, version))
    } == {}
