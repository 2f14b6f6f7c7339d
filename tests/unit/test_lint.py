"""Lint: each mistake that schemas cannot see is found, and told with the line of the run file that made it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.k8s.lint.config import lint
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.manifests import KINDS, local_files, render
from kubetune.k8s.manifests.mistakes import Mistake
from kubetune.k8s.manifests.run_spec import RunSpec
from kubetune.plan.plan import make_plan
from tests.golden.manifests import FOLDER

FULL = FOLDER / "full.yaml"


def findings(*overrides: str) -> list[Mistake]:
    config = load_config(FULL, overrides=overrides)
    plan = make_plan(config)
    files = local_files(config)
    return lint(RunSpec.of(config, plan, files), render(config, plan, files))


def test_the_chat_template_that_is_built_in_is_in_the_pods() -> None:
    assert [f for f in findings("model.chat_template=chatml") if f.fatal] == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_render_has_no_errors(kind: str) -> None:
    assert [
        f
        for f in findings(f"kubernetes.kind={kind}", "kubernetes.max_runtime_seconds=null")
        if f.fatal
    ] == []


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("compute.gpus_per_node=null", "compute.gpus_per_node", "0 for CPU"),
        ("compute.memory=null", "compute.memory", "as 64Gi"),
        ("kubernetes.shm_size=800Gi", "kubernetes.shm_size", "counts as memory"),
        ("kubernetes.image=http://registry.example/x:1", "kubernetes.image", "HTTPS"),
        ("kubernetes.image=localhost:5000/x:1", "kubernetes.image", "plain HTTP"),
        ("kubernetes.image=10.0.0.1:5000/x:1", "kubernetes.image", "plain HTTP"),
        ("kubernetes.image=a b", "kubernetes.image", "expected registry/name:tag"),
        ("kubernetes.env.RANK=1", "kubernetes.env.RANK", "rendezvous"),
        ("kubernetes.env.PET_RDZV_CONF=x", "kubernetes.env.PET_RDZV_CONF", "rendezvous"),
        (
            "kubernetes.secrets.MASTER_ADDR={secret: x}",
            "kubernetes.secrets.MASTER_ADDR",
            "rendezvous",
        ),
        ("kubernetes.secrets.ANSWER={secret: x}", "kubernetes.env.ANSWER", "keep one"),
        (
            "kubernetes.storage.outputs.access=ReadWriteOnce",
            "kubernetes.storage.outputs.access",
            "ReadWriteMany",
        ),
        (
            "kubernetes.storage.outputs.access=ReadWriteOncePod",
            "kubernetes.storage.outputs.access",
            "7 pods",
        ),
        ("kubernetes.mounts=[{path: /outputs/, claim: x}]", "kubernetes.mounts.0.path", "is taken"),
        (
            "kubernetes.mounts=[{path: /a, claim: x}, {path: /a, claim: y}]",
            "kubernetes.mounts.1.path",
            "mounts[0]",
        ),
        (
            "kubernetes.mounts=[{path: //outputs, claim: x}]",
            "kubernetes.mounts.0.path",
            "/outputs is taken",
        ),
        (
            "kubernetes.mounts=[{path: /a/../cache, claim: x}]",
            "kubernetes.mounts.0.path",
            "/cache is taken",
        ),
        (
            "kubernetes.mounts=[{path: /etc, claim: x}]",
            "kubernetes.mounts.0.path",
            "the image itself",
        ),
        ("data.train=/somewhere/train.jsonl", "data.train.0.path", "not in the pods"),
        ("data.eval=[{path: a/b/c}]", "data.eval.0.path", "not in the pods"),
        ("model.path=/somewhere/model", "model.path", "not in the pods"),
        ("model.tokenizer=../tokenizer", "model.tokenizer", "not in the pods"),
        ("model.chat_template=my/chat.jinja", "model.chat_template", "not in the pods"),
        ("logging.report_json=/root/report.json", "logging.report_json", "cannot be written"),
        ("kubernetes.run_as_user=0", "kubernetes.run_as_user", "root"),
        ("kubernetes.profile=rdma", "kubernetes.profile", "kubernetes.rdma.resource"),
        ("name=7b", "name", "begins with a digit"),
        (
            "kubernetes.labels={app.kubernetes.io/name: x}",
            "kubernetes.labels.app.kubernetes.io/name",
            "own labels",
        ),
        (
            "kubernetes.annotations={kubetune/stopped: x}",
            "kubernetes.annotations.kubetune/stopped",
            "own annotations",
        ),
        ("kubernetes.queue=null", "kubernetes.queue_priority", "give kubernetes.queue"),
    ],
)
def test_errors(override: str, key: str, words: str) -> None:
    fatal = [f for f in findings(override) if f.fatal]
    assert [f.key for f in fatal] == [key]
    assert words in fatal[0].text


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("compute.cpu=null", "compute.cpu"),
        ("kubernetes.image=registry.example/kubetune", "kubernetes.image"),
        ("kubernetes.image=registry.example:8443/kubetune:latest", "kubernetes.image"),
        ("kubernetes.mounts=[{path: /d, host_path: /mnt}]", "kubernetes.mounts.0.host_path"),
        ("kubernetes.storage.cache={host_path: /mnt}", "kubernetes.storage.cache.host_path"),
        ("kubernetes.kind=pytorchjob", "kubernetes.kind"),
        ("tracking.tensorboard=true", "tracking.tensorboard"),
        ("tracking.mlflow={uri: ./mlruns}", "tracking.mlflow"),
        ("evaluation.benchmarks=[gsm8k]", "evaluation.benchmarks"),
    ],
)
def test_advice(override: str, key: str) -> None:
    advice = findings(override)
    assert key in [f.key for f in advice]
    assert not any(f.fatal for f in advice)


@pytest.mark.parametrize(
    "image", ["localhost/kubetune:0.1.0-cpu", "localhost:5001/kubetune:1.0", "10.0.0.1:5000/x:1"]
)
@pytest.mark.parametrize(
    ("policy", "fatal"), [("IfNotPresent", False), ("Never", False), ("Always", True)]
)
def test_an_image_that_nodes_hold_need_not_be_pulled(image: str, policy: str, fatal: bool) -> None:
    """What podman built and `kind load` loaded is called localhost/…; only what must be pulled is refused."""
    advice = findings(f"kubernetes.image={image}", f"kubernetes.image_pull_policy={policy}")
    if image.startswith("localhost/") and not fatal:
        # The name and the policy say together that the image was loaded.
        assert advice == []
        return
    (finding,) = advice
    assert (finding.key, finding.fatal) == ("kubernetes.image", fatal)
    assert ("IfNotPresent" if fatal else f"image_pull_policy {policy}") in finding.text


@pytest.mark.parametrize(
    "override",
    [
        "kubernetes.image=registry.example:8443/kubetune:1.0",
        "kubernetes.image=kubetune@sha256:" + "0" * 64,
        "data.train=/data/train.jsonl",
        "model.path=/models/qwen",
        "data.train=s3://bucket/train.jsonl",
        "logging.report_json=/outputs/report.json",
        "kubernetes.env.TOKENIZERS_PARALLELISM=false",
    ],
)
def test_no_false_alarms(override: str) -> None:
    assert findings(override) == []


def test_tools_need_an_image_that_has_them() -> None:
    """The training image has neither TensorBoard nor JupyterLab unless it was built with them."""
    (finding,) = findings("kubernetes.tools_image=null")
    assert (finding.key, finding.fatal) == ("kubernetes.tools_image", False)
    assert "so TensorBoard and JupyterLab would start from the run's image" in finding.text
    assert (
        findings(
            "kubernetes.tools_image=null",
            "kubernetes.tensorboard=false",
            "kubernetes.jupyter.image=x:1",
        )
        == []
    )
    (finding,) = findings("kubernetes.tools_image=http://registry.example/x:1")
    assert (finding.key, finding.fatal) == ("kubernetes.tools_image", True)


@pytest.mark.parametrize("adapters", ["{resource: rdma/hca}", "{privileged: true}"])
def test_rdma_with_adapters_is_fine(adapters: str) -> None:
    assert findings("kubernetes.profile=rdma", f"kubernetes.rdma={adapters}") == []


def test_the_pods_of_initializers_need_room_in_the_name() -> None:
    long = "name=a-name-of-thirty-six-characters-long"
    assert [f.key for f in findings(long, "kubernetes.kind=trainjob") if f.fatal] == ["name"]
    assert not [
        f
        for f in findings(
            long,
            "kubernetes.kind=trainjob",
            "kubernetes.initialisers=[]",
            "kubernetes.preprocess=null",
        )
        if f.fatal
    ]
    assert not [f for f in findings(long, "kubernetes.kind=jobset") if f.fatal]


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_restarts_that_nobody_counts_is_told(kind: str) -> None:
    told = [
        f
        for f in findings(f"kubernetes.kind={kind}", "kubernetes.max_restarts=7")
        if f.key == "kubernetes.max_restarts"
    ]
    assert bool(told) == (kind in ("statefulset", "pytorchjob"))
    assert not any(finding.fatal for finding in told)


def test_a_statefulset_cannot_end() -> None:
    advice = findings("kubernetes.kind=statefulset")
    assert [f.key for f in advice if f.fatal] == ["kubernetes.max_runtime_seconds"]
    assert [f.key for f in advice if not f.fatal] == ["kubernetes.kind"]


def _pod(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (job,) = (o for o in objects if o["kind"] == "Job" and o["metadata"]["name"] == "support-bot")
    return job["spec"]["template"]


def _container(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return _pod(objects)["spec"]["containers"][0]


def _service(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return next(o for o in objects if o["kind"] == "Service")


CHANGES: list[tuple[Callable[[list[dict[str, Any]]], object], str]] = [
    (lambda objects: _service(objects)["spec"]["selector"].update(app="x"), "matches no pod"),
    (
        lambda objects: _pod(objects)["spec"].update(terminationGracePeriodSeconds=200),
        "at least 210 s",
    ),
    (
        lambda objects: _pod(objects)["spec"].update(restartPolicy="OnFailure"),
        "restartPolicy Never only",
    ),
    (
        lambda objects: _container(objects)["resources"]["limits"].update(memory="4GB"),
        "expected a quantity",
    ),
    (
        lambda objects: _container(objects)["resources"]["requests"].update(cpu="many"),
        "expected a quantity",
    ),
    (
        lambda objects: _container(objects)["env"].append({"name": "API_KEY", "value": "x"}),
        "secret's value",
    ),
    (
        lambda objects: _container(objects)["env"].append({"name": "A", "value": "hf_" + "a" * 30}),
        "secret's value",
    ),
    (
        lambda objects: _container(objects)["env"].append({"name": "HOME", "value": "/"}),
        "set 2 times",
    ),
    (
        lambda objects: _container(objects)["volumeMounts"].append(
            {"name": "x", "mountPath": "/x"}
        ),
        "no such volume",
    ),
    (
        lambda objects: _container(objects)["volumeMounts"].append(
            {"name": "tmp", "mountPath": "/cache"}
        ),
        "2 volumes",
    ),
    (lambda objects: objects[0]["metadata"].update(name="Support_Bot"), "not at either end"),
    (lambda objects: _service(objects)["metadata"].update(name="s" * 64), "at most 63"),
    (
        lambda objects: _service(objects)["metadata"]["labels"].update(owner="me@here"),
        "is no label",
    ),
    (
        lambda objects: objects.append(copy.deepcopy(objects[0])),
        "2 objects are called ServiceAccount/support-bot",
    ),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[words for _, words in CHANGES])
def test_manifests_changed_by_hand(
    change: Callable[[list[dict[str, Any]]], object], words: str
) -> None:
    config = load_config(FULL)
    objects = copy.deepcopy(render(config, make_plan(config)))
    assert list(check_objects(objects)) == []
    change(objects)
    problems = list(check_objects(objects))
    assert [words in f.text for f in problems] == [True], problems


def test_errors_name_the_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: a/b\n"
        "data: {train: /nowhere/train.jsonl}\n"
        "compute: {nodes: 2, gpus_per_node: 1, cpu: 4, memory: 8Gi}\n"
        "kubernetes:\n"
        "  image: localhost:5000/x:1\n"
        "  storage:\n"
        "    outputs:\n"
        "      size: 1Gi\n"
        "      access: ReadWriteOnce\n"
        "  env:\n"
        "    GOOD: 1\n"
        "    WORLD_SIZE: 2\n"
        "  scheduling: {gang: none}\n"
    )
    folder = tmp_path / "manifests"
    assert main(["render", str(file), "-o", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.removeprefix("kubetune: ").splitlines()
    assert [line.removeprefix(f"{file}:").split(": ")[:2] for line in lines[:-1]] == [
        ["5", "kubernetes.image"],
        ["12", "kubernetes.env.WORLD_SIZE"],
        ["2", "data.train[0].path"],
        ["9", "kubernetes.storage.outputs.access"],
    ]
    assert lines[-1] == "Nothing was written."
    assert not folder.exists()


GOOD = """\
name: fit
model: a/b
data: {train: c/d}
compute: {nodes: 2, gpus_per_node: 1, cpu: 4,
  memory: 8Gi}
kubernetes:
  image: registry.example/x:1
  namespace: ml
  grace_seconds: 120
  storage:
    outputs: {size: 1Gi,
      access: ReadWriteMany}
  labels:
    team: nlp
  env:
    MODE: fast
  scheduling: {gang: none}
"""


@pytest.mark.parametrize(
    ("good", "bad", "line", "words"),
    [
        (
            "ReadWriteMany",
            "ReadWriteOnce",
            12,
            "2 pods mount it, but ReadWriteOnce is attached to one node at a time",
        ),
        ("team: nlp", "app.kubernetes.io/instance: nlp", 14, "one of kubetune's own labels"),
        ("memory: 8Gi", "memory: 8GB", 5, "compute.memory"),
        ("size: 1Gi", "size: much", 11, "kubernetes.storage.outputs.size"),
        ("namespace: ml", "namespace: My_Team", 8, "kubernetes.namespace"),
        ("name: fit", "name: Fit_1", 1, "name: "),
        ("name: fit", f"name: {'f' * 41}", 1, "name: "),
        ("team: nlp", "team: nlp@work", 14, "kubernetes.labels.team"),
        ("MODE: fast", "PET_NODE_RANK: 1", 16, "would break the rendezvous"),
        ("grace_seconds: 120", "grace_seconds: 5", 9, "expected a whole number from 10"),
        (",\n  memory: 8Gi", "", 4, "so pods would have no limit"),
        ("MODE: fast", "HF_TOKEN: hf_" + "a" * 34, 16, "kubernetes.secrets"),
        ("MODE: fast", "NOTE: hf_" + "a" * 34, 16, "kubernetes.secrets"),
        ("registry.example/x:1", "http://registry.example/x:1", 7, "nodes pull over HTTPS"),
        ("registry.example/x:1", "10.0.0.1:5000/x:1", 7, "a registry over plain HTTP"),
    ],
)
def test_the_line_of_each_kind_of_mistake_is_named(
    good: str, bad: str, line: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no schema of Kubernetes sees, and what a pod's schema would tell without the line that caused it."""
    file = tmp_path / "run.yaml"
    assert GOOD.count(good) == 1
    file.write_text(GOOD.replace(good, bad))
    assert main(["render", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = [text for text in err.splitlines() if f"{file}:{line}" in text]
    assert lines, err
    assert any(words in text for text in lines), err
    assert "a" * 34 not in err


def test_the_file_without_mistakes_is_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    assert main(["render", str(file), "--strict"]) == 0
    assert capsys.readouterr().err == ""


def test_strict_makes_errors_of_advice(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["render", str(FULL), "compute.cpu=null", "-o", "/nowhere/at/all", "--strict"]
    assert main(command) == 2
    assert "compute.cpu: advice: left out" in capsys.readouterr().err


def test_a_patch_that_changes_nothing_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(
        "kubetune.cli.remote.render.render",
        lambda *arguments: made.append(arguments) or render(*arguments),
    )
    patch = "{target: {kind: Job}, patch: {metadata: {labels: {a: b}}}}"
    assert (
        main(["render", str(FULL), "kubernetes.kind=job", f"kubernetes.patches=[{patch}, {patch}]"])
        == 0
    )
    stderr = capsys.readouterr().err
    assert "kubernetes.patches[0] changes Job/support-bot" in stderr
    assert "kubernetes.patches[1]: advice: changes nothing" in stderr
    assert len(made) == 2, "with and without the patches"


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        ("hostIPC: true", "hostIPC is true"),
        ("volumes: [{name: h, hostPath: {path: /x}}]", "volume h is a hostPath"),
        ("containers: [{name: side, image: 'a/b:1'}]", "allowPrivilegeEscalation is not false"),
        ("containers: [{name: side, image: 'a/b:1'}]", "container side: capabilities.drop has no ALL"),
        ("containers: [{name: trainer, securityContext: {privileged: true}}]", "container trainer: privileged is true"),
        ("containers: [{name: trainer, securityContext: {capabilities: {add: [SYS_ADMIN]}}}]", "add has SYS_ADMIN"),
        ("containers: [{name: trainer, securityContext: {runAsUser: 0}}]", "runAsUser is 0"),
        ("containers: [{name: trainer, securityContext: {runAsNonRoot: false}}]", "runAsNonRoot is not true"),
        ("containers: [{name: trainer, securityContext: {procMount: Unmasked}}]", "procMount is Unmasked"),
        ("containers: [{name: trainer, ports: [{containerPort: 1, hostPort: 1}]}]", "a port has a hostPort"),
        ("securityContext: {seccompProfile: {type: Unconfined}}", "seccompProfile.type is neither"),
        ("dnsPolicy: None", None),
    ],
)  # fmt: skip
def test_a_patch_that_restricted_namespaces_refuse_is_told(pod: str, message: str | None) -> None:
    target = "{kind: Job, name: support-bot}"
    patch = f"kubernetes.patches=[{{target: {target}, patch: {{spec: {{template: {{spec: {{{pod}}}}}}}}}}}]"
    advice = [f for f in findings("kubernetes.kind=job", patch) if f.key == "kubernetes.patches"]
    assert [message in f.text and not f.fatal for f in advice if message] == (
        [True] if message else []
    )
    assert all("namespace that enforces the restricted standard" in f.text for f in advice)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_rendered_keeps_to_the_restricted_standard(kind: str) -> None:
    patch = (
        "kubernetes.patches=[{target: {kind: ConfigMap}, patch: {metadata: {annotations: {a: b}}}}]"
    )
    assert not [
        f for f in findings(f"kubernetes.kind={kind}", patch) if f.key == "kubernetes.patches"
    ]
