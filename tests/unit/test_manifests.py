"""Manifests: valid for strict servers, the same bytes everywhere, and right where people get them wrong by hand.

What the pods have is in test_manifests_pods.py, YAML in test_manifests_text.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune.config.load import load_config
from kubetune.config.resolved import load_resolved
from kubetune.config.schema import Config
from kubetune.k8s.manifests import KINDS, local_files, render, secret_templates
from kubetune.k8s.manifests.pod_templates import pod_templates
from kubetune.k8s.manifests.run_spec import RunSpec
from kubetune.k8s.run_names import run_name
from kubetune.plan.plan import make_plan
from standin.schemas import NEWEST, OLDEST, problems
from tests.golden.made import FULL, MINIMAL, leaves, made, planned, the, trainer_pods, variables
from tests.golden.manifests import CASES, FOLDER, golden, kept, rendered

OPERATED = {"pytorchjob", "trainjob"}


@pytest.mark.parametrize("case", CASES)
def test_output_is_golden(case: str) -> None:
    assert kept(case) == golden(case).read_text()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", CASES)
def test_strict_servers_accept_it(case: str, version: str) -> None:
    """All but what is younger: an old server refuses that, and does not place the pods without it instead."""
    objects = list(yaml.load_all(rendered(case), yaml.CSafeLoader))
    refused = {o["kind"] for o in objects if problems(o, version)}
    young = {"placed": {"Job"}} if version == OLDEST else {}
    assert refused == young.get(case, set())
    assert None not in leaves(objects)


def test_the_schemas_refuse_what_a_server_would() -> None:
    job = the(made("job"), "Job")
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    job["spec"]["completions"] = "four"
    assert len(problems(job)) == 2
    jobset = the(made("jobset"), "JobSet")
    jobset["spec"]["failurePolicy"]["restartStrategy"] = "Sometimes"
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["hostnam"] = "x"
    assert len(problems(jobset)) == 2


def test_the_same_config_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    """Other hash seed, other folder, other environment."""
    command = [sys.executable, "-m", "kubetune", "render", str(FULL)]
    sources = str(FOLDER.parents[1] / "src")
    environ = {
        "PYTHONPATH": sources,
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": "7",
        "MODEL_ID": "other/model",
    }
    result = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert result.stdout == golden("job").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_runs_the_agent_with_its_config(kind: str) -> None:
    objects = made(kind)
    pods = list(trainer_pods(objects))
    assert pods
    for pod in pods:
        (container,) = pod["containers"]
        assert container["command"] == [
            *("python", "-P", "-m", "kubetune.agent", "/outputs/support-bot"),
            *("--config", "/etc/kubetune/run.yaml"),
        ]
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert volumes[mounts["/etc/kubetune"]]["configMap"]["name"] == "support-bot"
    assert "run.yaml" in the(objects, "ConfigMap")["data"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more", [(), ("task=preference", "preference.loss=kto"), ("task=reward_model",)], ids=str
)
def test_the_pods_config_is_the_same_run(kind: str, more: tuple[str, ...], tmp_path: Path) -> None:
    config, plan = planned(f"kubernetes.kind={kind}", *more)
    file = tmp_path / "run.yaml"
    file.write_text(the(render(config, plan), "ConfigMap")["data"]["run.yaml"])
    inside = load_config(file)
    assert make_plan(inside) == plan
    assert (inside.training, inside.lora, inside.model, inside.kubernetes) == (
        *(config.training, config.lora, config.model),
        config.kubernetes,
    )
    assert (inside.task, inside.preference) == (config.task, config.preference)
    assert inside.output == "/outputs/support-bot"


def test_small_local_files_travel_along(tmp_path: Path) -> None:
    """Those that pods would not see: not what lies on a mount, is too big for a ConfigMap, or is no text."""
    small, big, binary, template = (
        tmp_path / name for name in ("a b.jsonl", "big.csv", "x.parquet", "chat.jinja")
    )
    small.write_text('{"text": "ü"}\n')
    big.write_text("x" * 300_000)
    binary.write_bytes(b"\xff\xfe")
    template.write_text("{{ messages }}\n")
    sources = [f"{small}#5", str(big), str(binary), str(small)]
    section = {"image": "x:1", "mounts": [{"path": str(tmp_path / "mounted"), "claim": "c"}]}
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "d.jsonl").write_text("{}\n")
    config = Config.model_validate(
        {
            "model": {"path": "a/b", "chat_template": str(template)},
            "data": {"train": [*sources, str(tmp_path / "mounted" / "d.jsonl")]},
            "kubernetes": section,
        }
    )
    files = local_files(config)
    assert files == {str(small): '{"text": "ü"}\n', str(template): "{{ messages }}\n"}
    objects = render(config, make_plan(config), files)
    assert the(objects, "ConfigMap", "b-data")["data"] == {
        "0-a_b.jsonl": '{"text": "ü"}\n',
        "1-chat.jinja": "{{ messages }}\n",
    }
    inside = yaml.load(the(objects, "ConfigMap", "b")["data"]["run.yaml"], yaml.CSafeLoader)
    assert [source["path"] for source in inside["data"]["train"][:2]] == [
        "/etc/kubetune-data/0-a_b.jsonl#5",
        str(big),
    ]
    assert inside["model"]["chat_template"] == "/etc/kubetune-data/1-chat.jinja"


@pytest.mark.parametrize("kind", KINDS)
def test_rendezvous_is_set_once(kind: str) -> None:
    """By us where the kind sets nothing, by the operator where it does: Trainer refuses runs that set it twice."""
    rendezvous = {
        "PET_NNODES",
        "PET_NPROC_PER_NODE",
        "PET_NODE_RANK",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
    }
    for pod in trainer_pods(made(kind)):
        environ = variables(pod["containers"][0])
        assert rendezvous & environ.keys() == (set() if kind in OPERATED else rendezvous)
        assert environ["PET_MAX_RESTARTS"] == "0"


@pytest.mark.parametrize(
    ("kind", "address", "field"),
    [
        (
            "job",
            "$(KUBETUNE_RUN)-0.$(KUBETUNE_RUN)",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        ),
        (
            "statefulset",
            "$(KUBETUNE_RUN)-0.$(KUBETUNE_RUN)",
            "metadata.labels['apps.kubernetes.io/pod-index']",
        ),
        (
            "jobset",
            "$(KUBETUNE_RUN)-node-0-0.$(KUBETUNE_RUN)",
            "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        ),
    ],
)
def test_rank_comes_from_the_index(kind: str, address: str, field: str) -> None:
    objects = made(kind)
    (pod,) = trainer_pods(objects)
    environ = variables(pod["containers"][0])
    assert environ["PET_MASTER_ADDR"] == address
    assert environ["KUBETUNE_RUN"] == {
        "fieldRef": {"fieldPath": "metadata.labels['app.kubernetes.io/instance']"}
    }
    names = [entry["name"] for entry in pod["containers"][0]["env"]]
    assert names.index("KUBETUNE_RUN") < names.index("PET_MASTER_ADDR"), (
        "only what comes before is filled in"
    )
    assert environ["PET_NODE_RANK"] == {"fieldRef": {"fieldPath": field}}
    assert (environ["PET_NNODES"], environ["PET_NPROC_PER_NODE"]) == ("4", "8")


@pytest.mark.parametrize("kind", ["job", "statefulset"])
def test_names_are_published_before_pods_are_ready(kind: str) -> None:
    objects = made(kind)
    service = the(objects, "Service")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    (pod,) = trainer_pods(objects)
    owner = the(objects, "Job" if kind == "job" else "StatefulSet")["spec"]
    assert service["selector"].items() <= owner["template"]["metadata"]["labels"].items()
    assert (pod.get("subdomain") or owner["serviceName"]) == "support-bot"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grace", [10, 180, 3600])
def test_pods_outlive_the_time_to_save(kind: str, grace: int) -> None:
    for pod in trainer_pods(made(kind, f"kubernetes.grace_seconds={grace}")):
        assert variables(pod["containers"][0])["PET_SHUTDOWN_TIMEOUT"] == str(grace)
        assert pod["terminationGracePeriodSeconds"] >= grace + 30


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_is_restricted(kind: str) -> None:
    """The fields of the restricted pod security standard, on every container of every pod, init containers included."""
    templates = [template["spec"] for obj in made(kind) for _, template in pod_templates(obj)]
    assert len(templates) >= 4  # trainer, preprocessing, TensorBoard, Jupyter
    for pod in templates:
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert not any("hostPath" in volume for volume in pod["volumes"])
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_exit_codes_decide_what_happens_next() -> None:
    def verdict(policy: dict[str, Any], code: int) -> str:
        rules = (r for r in policy["rules"] if code in r.get("onExitCodes", {}).get("values", ()))
        return next((r["action"] for r in rules), "Count")

    job = the(made("job"), "Job")["spec"]
    assert {code: verdict(job["podFailurePolicy"], code) for code in (1, 2, 3, 4, 143, 145)} == {
        2: "FailJob",
        4: "FailJob",
        143: "Ignore",
        1: "Count",
        3: "Count",
        145: "Count",
    }
    assert (job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (3, 0)
    # By itself it would be 6 pods of all indexes together; Kubernetes leaves it unlimited beside a limit by index.
    assert "backoffLimit" not in job
    jobset = the(made("jobset"), "JobSet")["spec"]
    inner = jobset["replicatedJobs"][-1]["template"]["spec"]
    assert inner["backoffLimit"] == 0
    assert verdict(inner["podFailurePolicy"], 143) == "FailJob"
    actions = [rule["action"] for rule in jobset["failurePolicy"]["rules"]]
    assert actions == ["FailJobSet", "RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"]
    replicas = the(made("pytorchjob"), "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
    assert {role: (r["replicas"], r["restartPolicy"]) for role, r in replicas.items()} == {
        "Master": (1, "ExitCode"),
        "Worker": (3, "ExitCode"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_each_pod_has_a_cache_of_its_own(kind: str) -> None:
    objects = made(kind)
    assert [o["metadata"]["name"] for o in objects if o["kind"] == "PersistentVolumeClaim"] == [
        "support-bot-outputs"
    ]
    for pod in trainer_pods(objects):
        (cache,) = [v for v in pod["volumes"] if v["name"] == "cache"] or [None]
        if kind == "statefulset":
            assert cache is None
            (template,) = the(objects, "StatefulSet")["spec"]["volumeClaimTemplates"]
            claim = template["spec"]
        else:
            claim = cache["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["accessModes"] == ["ReadWriteOnce"]
        assert claim["resources"]["requests"]["storage"] == "200Gi"


def test_one_node_has_no_affinity_and_a_pytorchjob_of_it_no_workers() -> None:
    objects = made("pytorchjob", "compute.nodes=1")
    assert list(the(objects, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    (pod,) = trainer_pods(objects)
    assert not {"affinity", "topologySpreadConstraints"} & pod.keys()


def test_secrets_are_references_only() -> None:
    config, plan = planned()
    templates = secret_templates(RunSpec.of(config, plan))
    assert {t["metadata"]["name"]: t["stringData"] for t in templates} == {
        "hf-token": {"HF_TOKEN": ""},
        "support-bot-jupyter": {"token": ""},
    }
    assert not [o for o in render(config, plan) if o["kind"] == "Secret"]


def test_the_page_is_served_over_the_outputs_read_only_and_for_a_token() -> None:
    config, plan = planned("kubernetes.ui=true", "kubernetes.tensorboard=false")
    objects = render(config, plan)
    pod = the(objects, "Deployment", "support-bot-ui")["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    assert server["command"][2:5] == ["kubetune", "ui", "/outputs"]
    assert [
        mount["readOnly"] for mount in server["volumeMounts"] if mount["name"] == "outputs"
    ] == [True]
    (token,) = [variable for variable in server["env"] if variable["name"] == "KUBETUNE_UI_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "support-bot-ui", "key": "token"}
    names = [
        template["metadata"]["name"] for template in secret_templates(RunSpec.of(config, plan))
    ]
    assert "support-bot-ui" in names
    assert the(objects, "Service", "support-bot-ui")["spec"]["ports"][0]["targetPort"] == "http"
    assert "deployments" in set(leaves(the(objects, "Role", "support-bot-operator")["rules"]))


def test_operators_get_no_more_than_the_verbs_need() -> None:
    roles = {kind: the(made(kind), "Role", "support-bot-operator")["rules"] for kind in KINDS}
    for kind, rules in roles.items():
        assert "*" not in leaves(rules), kind
        (secrets,) = [rule for rule in rules if "secrets" in rule["resources"]]
        assert not {"get", "list", "watch"} & set(secrets["verbs"])
    assert "jobsets" in set(leaves(roles["jobset"]))
    assert "jobsets" not in set(leaves(roles["job"]))
    assert not [o for o in made("job", "kubernetes.operators=[]") if o["kind"].startswith("Role")]


def test_initialisers_leave_nothing_to_download() -> None:
    def offline(*initialisers: str) -> bool:
        wanted = f"kubernetes.initialisers=[{', '.join(initialisers)}]"
        (pod,) = trainer_pods(made("job", wanted, "data.train=stanfordnlp/imdb", file=MINIMAL))
        assert len(pod.get("initContainers", ())) == len(initialisers)
        return variables(pod["containers"][0]).get("HF_HUB_OFFLINE") == "1"

    assert offline("model", "data")
    assert not offline("model")
    assert not offline()


def test_little_data_is_prepared_by_a_little_pod(tmp_path: Path) -> None:
    """Its file travels with the manifests; a size that is asked for is given, and for data elsewhere much is."""
    file = tmp_path / "train.jsonl"
    file.write_text('{"text": "a"}\n')

    def requests(path: str, **preprocess: Any) -> list[dict[str, str]]:
        kubernetes = {"image": "i", "initialisers": ["data"], "preprocess": preprocess}
        values = {"name": "fit", "model": "m/m", "data": {"train": path}, "kubernetes": kubernetes}
        config = load_resolved(values)
        objects = render(config, make_plan(config), local_files(config))
        pods = [template for obj in objects for _, template in pod_templates(obj)]
        return [
            container["resources"]["requests"]
            for pod in pods
            if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "preprocess"
            for container in pod["spec"]["containers"]
        ]

    assert requests(str(file)) == [{"cpu": "2", "memory": "4Gi"}]
    assert requests(str(file), memory="1Gi") == [{"cpu": "2", "memory": "1Gi"}]
    assert requests("/etc/kubetune-data/0-train.jsonl") == [{"cpu": "2", "memory": "4Gi"}]
    assert requests("d/d") == [{"cpu": "8", "memory": "32Gi"}]


@pytest.mark.parametrize("kind", KINDS)
def test_what_prepares_comes_before_the_trainer_and_holds_no_gpu(kind: str) -> None:
    """In the order of JobSet and TrainJob, else as a Job; and pods that were not waited for do it themselves."""
    objects = made(kind)
    pods = [template for obj in objects for _, template in pod_templates(obj)]
    preparing = [
        t for t in pods if t["metadata"]["labels"]["app.kubernetes.io/component"] == "preprocess"
    ]
    containers = [
        c
        for t in preparing
        for c in (*t["spec"].get("initContainers", ()), *t["spec"]["containers"])
    ]
    assert [c["command"][3:] for c in containers] == [
        ["kubetune.data.prepared.fetch_worker", "/etc/kubetune/run.yaml"],
        ["kubetune", "data", "prepare", "/etc/kubetune/run.yaml"],
    ]
    for container in containers:
        assert "nvidia.com/gpu" not in container["resources"]["limits"]
        assert variables(container)["HF_HOME"] == "/outputs/.cache/hf"
        assert "HF_HUB_OFFLINE" not in variables(container)
    for pod in trainer_pods(objects):
        assert variables(pod["containers"][0])["HF_HOME"] == "/outputs/.cache/hf"
        inits = [c["name"] for c in pod.get("initContainers", ())]
        assert inits == ([] if kind in ("jobset", "trainjob") else ["fetch-model", "prepare-data"])
    inside = yaml.load(the(objects, "ConfigMap")["data"]["run.yaml"], yaml.CSafeLoader)
    assert inside["data"]["cache"] == "/outputs/.cache/prepared"


def test_a_jobset_starts_the_trainer_last() -> None:
    jobs = the(made("jobset"), "JobSet")["spec"]["replicatedJobs"]
    assert [(job["name"], job.get("dependsOn")) for job in jobs] == [
        ("preprocess", None),
        ("node", [{"name": "preprocess", "status": "Complete"}]),
    ]


def test_a_trainjob_has_the_initializers_that_its_operator_asks_for() -> None:
    """Names, labels and the mount are those that the webhook and the builder of Kubeflow Trainer 2.3 look for."""
    objects = made("trainjob", "data.train=stanfordnlp/imdb")
    jobs = the(objects, "TrainingRuntime")["spec"]["template"]["spec"]["replicatedJobs"]
    names = ["model-initializer", "dataset-initializer", "node"]
    assert [job["name"] for job in jobs] == names
    assert [job.get("dependsOn", [{}])[0].get("name") for job in jobs] == [None, *names[:-1]]
    for job in jobs[:-1]:
        assert job["template"]["metadata"]["labels"] == {
            "trainer.kubeflow.org/trainjob-ancestor-step": job["name"]
        }
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert container["name"] == job["name"]
        assert "initializer" in [mount["name"] for mount in container["volumeMounts"]]
    wanted = {
        "model": {"storageUri": "hf://Qwen/Qwen3-8B"},
        "dataset": {"storageUri": "hf://stanfordnlp/imdb"},
    }
    assert the(objects, "TrainJob")["spec"]["initializer"] == wanted


def test_a_cache_that_all_pods_share_is_filled_once() -> None:
    (pod,) = trainer_pods(
        made("job", "kubernetes.storage.cache={size: 1Ti, access: ReadWriteMany}")
    )
    assert variables(pod["containers"][0])["HF_HOME"] == "/cache/hf"


@pytest.mark.parametrize("kind", ["job", "jobset", "pytorchjob", "trainjob"])
def test_what_has_ended_is_removed_after_a_time(kind: str) -> None:
    """A TrainJob has no field for that, but its JobSet has one, and the operator expects it to go."""
    objects = made(kind, "kubernetes.ttl_seconds=77")
    ttl = {
        "job": "Job",
        "jobset": "JobSet",
        "pytorchjob": "PyTorchJob",
        "trainjob": "TrainingRuntime",
    }[kind]
    spec = the(objects, ttl)["spec"]
    if kind in ("pytorchjob", "trainjob"):
        spec = spec["runPolicy"] if kind == "pytorchjob" else spec["template"]["spec"]
    assert spec["ttlSecondsAfterFinished"] == 77


def test_without_a_section_it_says_what_to_add(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from kubetune.cli import main

    file = tmp_path / "run.yaml"
    file.write_text("model: a/b\ndata: {train: c/d}\n")
    assert main(["render", str(file)]) == 2
    assert "kubernetes: the section is missing; add" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("/models/My Model_v2/", "my-model-v2"),
        ("org/7b", "run-7b"),
        ("x/" + "long-" * 20, ("long-" * 20)[:40].strip("-")),
    ],
)
def test_a_run_without_a_name_gets_one_that_kubernetes_takes(path: str, name: str) -> None:
    assert run_name(None, path) == name
