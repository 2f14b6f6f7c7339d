"""Serving manifests: valid for strict servers, the same bytes everywhere, and refused where they could not work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune import cli
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.k8s.lint.objects import check_objects
from kubetune.k8s.lint.pod_security import beyond_restricted
from kubetune.plugins.serving.manifests import ServedAdapter, Serving, command
from kubetune.result.forms.programs import commands, served_by
from standin.schemas import NEWEST, OLDEST, problems
from tests.golden.serving import CASES, golden, kept, rendered, write_run


def objects(case: str) -> dict[str, dict[str, Any]]:
    return {obj["kind"]: obj for obj in yaml.safe_load_all(rendered(case))}


def pod(case: str) -> dict[str, Any]:
    spec: dict[str, Any] = objects(case)["Deployment"]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("case", CASES)
def test_output_is_golden(case: str) -> None:
    assert kept(case) == golden(case).read_text()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("case", CASES)
def test_strict_servers_accept_it_and_lint_finds_nothing(case: str, version: str) -> None:
    made = objects(case)
    assert {kind: wrong for kind, obj in made.items() if (wrong := problems(obj, version))} == {}
    assert list(check_objects(list(made.values()))) == []


def test_the_schema_of_autoscalers_is_strict() -> None:
    scaler = objects("adapters")["HorizontalPodAutoscaler"]
    scaler["spec"]["maxReplica"] = 3
    assert problems(scaler)


@pytest.mark.parametrize("case", CASES)
def test_every_pod_passes_the_restricted_standard_and_can_write_its_caches(case: str) -> None:
    spec = pod(case)
    (server,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    assert server["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert server["securityContext"]["readOnlyRootFilesystem"]
    writable = [mount["mountPath"] for mount in server["volumeMounts"] if not mount.get("readOnly")]
    folders = [entry["value"] for entry in server["env"] if entry.get("value", "").startswith("/")]
    assert folders
    assert all(
        any(folder == w or folder.startswith(f"{w}/") for w in writable) for folder in folders
    )
    assert {"hostPath"} & {key for volume in spec["volumes"] for key in volume} == set()


def test_a_run_is_served_from_its_volume_with_its_secrets_and_namespace() -> None:
    server = pod("run")["containers"][0]
    line = server["command"]
    assert line[line.index("--lora-modules") + 1 :] == [
        "support-bot=/outputs/support-bot/exports/step-000120-adapter",
        "tuned=acme/other",
    ]
    claims = [
        v["persistentVolumeClaim"]["claimName"]
        for v in pod("run")["volumes"]
        if "persistentVolumeClaim" in v
    ]
    assert claims == ["support-bot-serve-models", "support-bot-outputs"]
    assert objects("run")["Deployment"]["metadata"]["name"] == "support-bot-serve"
    assert "HF_TOKEN" in [entry["name"] for entry in server["env"]]
    merged = pod("merged")["containers"][0]["command"]
    assert merged[2] == "/outputs/support-bot/exports/step-000120-merged"
    assert "--enable-lora" not in merged


@pytest.mark.parametrize(("rank", "flag"), [(1, 8), (8, 8), (24, 32), (512, 512)])
def test_the_rank_is_one_that_vllm_takes(rank: int, flag: int) -> None:
    line = command(
        Serving(model="base", names=("base",), adapters=(ServedAdapter("a", "org/a", rank),))
    )
    assert f"--max-lora-rank={flag}" in line
    config = load_config({"model": "org/base", "data": {"train": "org/rows"}, "lora": {"r": rank}})
    card = "".join(commands(config.task_name, config.lora, "adapter", "org/base", {}))
    assert f"--max-lora-rank {flag} --lora-modules" in card


def test_a_folder_that_no_volume_holds_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    base = "/models/base"
    assert (
        cli.main(["serve", "--render", "--base", base, "a=/outputs/a/exports/one", "b=/adapters/b"])
        == 0
    )
    assert (
        "no volume of the pods holds /models/base, /adapters/b: --image must"
        in capsys.readouterr().err
    )


def test_the_curl_asks_for_the_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["a=acme/a", "--base=Qwen/Qwen3-8B", "--api-key-secret=key"]
    assert cli.main(["serve", "--render", *words]) == 0
    stderr = capsys.readouterr().err
    assert '"model": "a"' in stderr
    assert "Bearer $VLLM_API_KEY" in stderr
    assert "port-forward service/a 8000:80" in stderr


def test_a_folder_that_is_no_run_is_not_taken_for_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "half").mkdir(parents=True)
    for target, message in (
        ("outputs/gone", "no such folder"),
        ("outputs/half", "a folder, but no run directory"),
    ):
        assert cli.main(["serve", "--render", target]) == 2
        printed = capsys.readouterr()
        assert f"{target}: {message}" in printed.err
        assert "`kubetune runs` lists them" in printed.err
        assert printed.out == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["acme/a", "acme/b"], "whole weights are served alone"),
        (["x=acme/a", "x=acme/b", "--base=acme/base"], "same name"),
        (["base=acme/a", "--base=acme/base"], "base is the name of the base"),
        (["./nowhere/at/all"], "expected a run directory"),
        (["a b=acme/a"], "expected a name"),
        (["acme/a", "--merged"], "no run directory"),
        (["acme/a", "--replicas=3", "--max-replicas=2"], "at least --replicas"),
        (["acme/a", "--base=acme/base", "--rank=4096"], "at most 512"),
        (["acme/a", "--name=Not_A_Name"], "expected at most 63"),
        (["acme/a", "--memory=lots"], "expected a quantity"),
    ],
)
def test_what_could_not_work_is_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--render", *words]) == 2
    printed = capsys.readouterr()
    assert reason in printed.err
    assert printed.out == ""


def test_a_reward_model_is_served_to_score_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", "task=reward_model")
    assert cli.main(["serve", "--render", str(run_dir)]) == 2
    assert "no adapters with its own head; serve its merged weights" in capsys.readouterr().err
    assert cli.main(["serve", "--render", str(run_dir), "--merged"]) == 0
    printed = capsys.readouterr()
    (made,) = (obj for obj in yaml.safe_load_all(printed.out) if obj["kind"] == "Deployment")
    assert problems(made) == []
    words = made["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words[2].endswith("/exports/step-000120-merged")
    assert {"--runner=pooling", '--pooler-config={"use_activation": false}'} <= {*words}
    asked = json.loads(printed.err.partition("-d '")[2].partition("'\n")[0])
    assert "localhost:8000/pooling " in printed.err
    assert (asked["task"], asked["messages"][-1]["role"]) == ("classify", "assistant")
    classifier = write_run(tmp_path / "classifier", "task=sequence_classification")
    assert cli.main(["serve", "--render", str(classifier)]) == 2
    assert "is a classifier, which vLLM does not serve" in capsys.readouterr().err


def test_runs_that_cannot_be_served_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    for export in (run_dir / "exports").iterdir():
        (export / "provenance.json").unlink()
    assert cli.main(["serve", "--render", str(run_dir)]) == 2
    assert f"kubetune export {run_dir}" in capsys.readouterr().err
    local = write_run(tmp_path / "local", f"model.path={tmp_path}")
    assert cli.main(["serve", "--render", str(local)]) == 0
    dora = write_run(tmp_path / "dora", "lora.use_dora=true", "lora.modules_to_save=[lm_head]")
    assert cli.main(["serve", "--render", str(dora)]) == 2
    assert (
        "no adapters with lora.use_dora and lora.modules_to_save; serve its merged"
        in capsys.readouterr().err
    )
    assert cli.main(["serve", "--render", str(dora), "--merged"]) == 0
    quantised = write_run(tmp_path / "quantised", "quantization=4bit")
    capsys.readouterr()
    assert cli.main(["serve", "--render", str(quantised)]) == 0
    assert "trained on a 4bit base" in capsys.readouterr().err
    whole = write_run(tmp_path / "whole", "lora=null")
    assert cli.main(["serve", "--render", str(whole), "--merged"]) == 2
    assert "leave --merged out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"base": {"experts_of": "qwen3_moe"}}, ""),
        ({"base": {"experts_of": "mixtral"}}, "not known to load adapters on mixtral"),
        (
            {"base": {"experts_of": None, "text_of": "nobodys"}},
            "not known to load adapters on nobodys",
        ),
    ],
)
def test_stacked_experts_are_told_to_vllm_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict[str, Any], message: str
) -> None:
    run_dir = write_run(tmp_path / "run")
    export = run_dir / "exports" / "step-000120-adapter"
    (export / "provenance.json").write_text(json.dumps(facts))
    lora = read_config(run_dir).lora
    assert lora is not None
    settings = {
        "r": lora.r,
        "lora_alpha": lora.lora_alpha,
        "target_parameters": ["experts.down_proj"],
    }
    (export / "adapter_config.json").write_text(json.dumps(settings))
    assert cli.main(["serve", "--render", str(run_dir)]) == (2 if message else 0)
    printed = capsys.readouterr()
    assert message in printed.err
    if not message:
        (made,) = (obj for obj in yaml.safe_load_all(printed.out) if obj["kind"] == "Deployment")
        words = made["spec"]["template"]["spec"]["containers"][0]["command"]
        assert words[-3:-1] == ["--enable-mixed-moe-lora-format", "--lora-modules"]
        path = "/outputs/support-bot/exports/step-000120-adapter"
        assert json.loads(words[-1]) == {
            "name": "support-bot",
            "path": path,
            "is_3d_lora_weight": True,
        }


@pytest.mark.parametrize(
    ("lora", "able"),
    [
        ({"use_dora": True}, ()),
        ({"modules_to_save": ["lm_head"]}, ()),
        ({"use_rslora": True}, ("$ vllm",)),
        ({"r": 600}, ("$ python llama.cpp", "$ ollama")),
        ({}, ("$ vllm", "$ python llama.cpp", "$ ollama")),
    ],
)
def test_a_card_has_no_command_that_loads_what_nobody_loads(
    lora: dict[str, Any], able: tuple[str, ...]
) -> None:
    config = load_config({"model": "org/base", "data": {"train": "org/rows"}, "lora": lora})
    text = "".join(commands(config.task_name, config.lora, "adapter", "org/base", {}))
    assert [
        program for program in ("$ vllm", "$ python llama.cpp", "$ ollama") if program in text
    ] == list(able)
    assert len(served_by(config.task_name, config.lora, "adapter", {})) == len(able)
    assert ("`kubetune export --merge` makes" in text) is (len(able) < 3)
    assert "$ vllm serve .\n" in "".join(
        commands(config.task_name, config.lora, "merged", "org/base", {})
    )
    seeing = load_config(
        {
            "model": "org/base",
            "data": {"train": "org/rows"},
            "lora": lora,
            "task": "vision_language",
        }
    )
    assert commands(seeing.task_name, seeing.lora, "adapter", "org/base", {}) == []


@pytest.mark.parametrize(("experts_of", "able"), [("qwen3_moe", ["$ vllm"]), ("mixtral", [])])
def test_a_card_knows_whose_experts_vllm_loads(experts_of: str, able: list[str]) -> None:
    config = load_config({"model": "org/base", "data": {"train": "org/rows"}, "lora": {}})
    text = "".join(
        commands(config.task_name, config.lora, "adapter", "org/base", {"experts_of": experts_of})
    )
    assert [
        program for program in ("$ vllm", "$ python llama.cpp", "$ ollama") if program in text
    ] == able
    assert ("--enable-mixed-moe-lora-format --lora-modules '{" in text) is bool(able)
    assert "`kubetune export --merge` makes what all of them run" in text


@pytest.mark.parametrize(
    ("text_of", "command"), [("qwen3_5", "--lora-modules tuned=./vllm\n"), ("nobodys", "")]
)
def test_an_adapter_on_the_text_model_of_one_that_sees_has_vllms_names_or_no_command(
    text_of: str, command: str
) -> None:
    config = load_config({"model": "org/base", "data": {"train": "org/rows"}, "lora": {}})
    text = "".join(
        commands(config.task_name, config.lora, "adapter", "org/base", {"text_of": text_of})
    )
    assert command in text
    assert ("$ vllm" in text) is bool(command)
    assert ("on nobodys, and leaves some out without a word" in text) is not bool(command)
    assert "$ python llama.cpp" in text


DIGEST = f"sha256:{'1a' * 32}"
IMAGES_OF = [
    "terse=oci://registry.example:5000/team/terse:2",
    f"--base=oci://registry.example:5000/team/base@{DIGEST}",
]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """Return the pod that is rendered, and what is said to people."""
    assert cli.main(["serve", "--render", *words]) == 0
    output = capsys.readouterr()
    made = list(yaml.safe_load_all(output.out))
    assert list(check_objects(made)) == []
    for obj in made:
        assert not problems(obj, NEWEST)
    (deployment,) = (obj for obj in made if obj["kind"] == "Deployment")
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec, output.err


def test_images_of_a_registry_are_mounted(capsys: pytest.CaptureFixture[str]) -> None:
    spec, notes = printed(capsys, *IMAGES_OF)
    assert list(beyond_restricted(spec)) == []
    images = [v["image"]["reference"] for v in spec["volumes"] if "image" in v]
    assert images == [
        "registry.example:5000/team/terse:2",
        f"registry.example:5000/team/base@{DIGEST}",
    ]
    (server,) = spec["containers"]
    mounts = {m["name"]: m["mountPath"] for m in server["volumeMounts"] if m.get("readOnly")}
    assert mounts == {"image-0": "/models/terse", "image-1": "/models/base"}
    assert server["command"][2] == "/models/base"
    assert "terse=/models/terse" in server["command"]
    assert "Kubernetes 1.36" in notes
    assert "no volume of the pods holds" not in notes


def test_older_clusters_fetch_images_first(capsys: pytest.CaptureFixture[str]) -> None:
    spec, notes = printed(capsys, *IMAGES_OF, "--fetch-image=registry.example/kubetune:1")
    assert not [v for v in spec["volumes"] if "image" in v]
    (fetch,) = spec["initContainers"]
    assert fetch["image"] == "registry.example/kubetune:1"
    assert fetch["command"][-3:] == [
        "/models",
        "terse=oci://registry.example:5000/team/terse:2",
        f"base=oci://registry.example:5000/team/base@{DIGEST}",
    ]
    (server,) = spec["containers"]
    assert "terse=/models/terse" in server["command"]
    # Links below /models lead to the claim, which both containers have at one path.
    for container in (fetch, server):
        paths = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        assert (paths["models"], paths["images"]) == ("/cache", "/models")
    assert "Kubernetes 1.36" not in notes


def test_a_run_on_an_image_is_served_on_the_image_that_it_began_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "oci://registry.example:5000/team/base:1"
    run_dir = write_run(tmp_path / "run", f"model={path}")
    place = f"/cache/kubetune/oci/registry.example+5000/team/base/{DIGEST.replace(':', '-')}"
    part = {"path": place, "commit": None, "files": {}}
    (run_dir / "identity.json").write_text(json.dumps({"parts": {"model": part}}))
    spec, _ = printed(capsys, str(run_dir))
    images = [v["image"]["reference"] for v in spec["volumes"] if "image" in v]
    assert images == [f"registry.example:5000/team/base@{DIGEST}"]


def test_no_address_of_an_image_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--render", "oci://registry.example/bot"]) == 2
    assert "expected oci://registry/name:tag" in capsys.readouterr().err


def with_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the Job that asks what is rendered for a run beside it."""
    run_dir = write_run(tmp_path / "run")
    image = "--check-image=registry.example/kubetune:1"
    assert cli.main(["serve", "--render", f"tuned={run_dir}", image, *words]) == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    assert list(check_objects(made)) == []
    (job,) = [obj for obj in made if obj["kind"] == "Job"]
    for version in (OLDEST, NEWEST):
        assert not problems(job, version)
    return dict(job)


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (("--api-key-secret=vllm",), "http://support-bot-serve.finetune.svc"),
        (
            ("--merged", "--kserve=InferenceService"),
            "http://support-bot-serve-predictor.finetune.svc/openai",
        ),
        (
            ("--merged", "--kserve=LLMInferenceService"),
            "https://support-bot-serve-kserve-workload-svc.finetune.svc:8000",
        ),
    ],
)
def test_a_job_beside_it_asks_whether_it_is_the_model(
    words: tuple[str, ...], address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = with_a_check(tmp_path, capsys, *words)
    spec = job["spec"]["template"]["spec"]
    assert (job["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert list(beyond_restricted(spec)) == []
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "check", (
        "the Service does not send requests here"
    )
    (container,) = spec["containers"]
    command = container["command"]
    assert container["image"] == "registry.example/kubetune:1"
    assert f"--check={address}" in command
    (target,) = [word for word in command if word.startswith("tuned=")]
    assert target.startswith("tuned=/outputs/support-bot/exports/step-000120-")
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]
    }
    of_kserve = {"/certificates": True} if address.startswith("https") else {}
    assert mounts == {"/outputs": True, "/tmp": False, **of_kserve}
    # The certificate that KServe signs for its Service is trusted; the key beside it is not mounted.
    secrets = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
    items = [{"key": "tls.crt", "path": "tls.crt"}]
    expected = {"secretName": "support-bot-serve-kserve-self-signed-certs", "items": items}
    assert secrets == ([expected] if of_kserve else [])
    keys = [entry["name"] for entry in container["env"] if "valueFrom" in entry]
    assert keys == (["VLLM_API_KEY"] if len(words) == 1 else [])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("acme/bot",), "is no run directory"),
        (
            ("RUN", "--merged", "--kserve=LLMInferenceService", f"--name={'a' * 39}"),
            "at most 38 characters",
        ),
    ],
)
def test_what_no_job_could_ask_is_refused(
    words: tuple[str, ...], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = str(write_run(tmp_path / "run"))
    words = tuple(run_dir if word == "RUN" else word for word in words)
    assert cli.main(["serve", "--render", *words, "--check-image=x/kubetune:1"]) == 2
    printed = capsys.readouterr()
    assert problem in printed.err
    assert printed.out == ""
