"""The container image: what is in it, and that pods run in it as rendered.

The image is not built here, which takes minutes and a package index: `scripts/image cpu` does. Tests that need it skip
where it, or podman, is missing. KUBETUNE_IMAGE names another one.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from kubetune.config.load import load_config
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.k8s.manifests import local_files, render
from kubetune.k8s.run_names import OUTPUTS
from kubetune.plan.plan import make_plan

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "src" / "kubetune" / "cli" / "local" / "embedded"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
IMAGE = os.environ.get("KUBETUNE_IMAGE", f"localhost/kubetune:{VERSION}-cpu")
USER = KubernetesConfig.model_fields["run_as_user"].default

# What podman itself and the runtime below it return when a container could not be started.
COULD_NOT_START = (125, 126, 127)

# For one test; a machine that does much else takes minutes to import what training needs.
SECONDS = 600

# Podman's own limits are more than some machines allow.
LIMITS = (f"--ulimit=nofile={resource.getrlimit(resource.RLIMIT_NOFILE)[1]}", "--ulimit=nproc=4096")


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *words], capture_output=True, text=True, timeout=120)


def shell(image: str, script: str) -> subprocess.CompletedProcess[str]:
    return podman("run", "--rm", *LIMITS, "--network=none", "--entrypoint=sh", image, "-c", script)


@pytest.fixture(scope="session")
def image() -> str:
    """Return the image's name; skip where it cannot be run."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    if podman("image", "exists", IMAGE).returncode:
        pytest.skip(f"there is no image {IMAGE}; scripts/image cpu builds it")
    tried = shell(IMAGE, "exit 0")
    if tried.returncode in COULD_NOT_START:
        pytest.skip(f"podman cannot start containers here: {tried.stderr.strip()}")
    return IMAGE


@pytest.fixture(scope="session")
def root(image: str) -> str:
    """Return the image's name; skip where this process could not remove the files that user 10001 writes."""
    if os.geteuid():
        pytest.skip("needs root")
    return image


def test_the_dockerfile_ends_in_a_stage_that_runs_nothing_and_is_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    last = text[text.rindex("\nFROM ") :]
    instructions = re.findall(r"^([A-Z]+) ", last, re.M)
    assert "COPY" in instructions
    assert not {"RUN", "ADD", "HEALTHCHECK"} & set(instructions)
    assert re.findall(r"^USER (.*)", last, re.M) == [f"{USER}:{USER}"]
    assert re.findall(r"^WORKDIR (.*)", last, re.M) == [OUTPUTS]


def test_the_build_sees_all_that_it_copies_and_nothing_else() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.M)
    ignored, *kept = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert ignored == "*"
    assert {f"!{name}" for names in copied for name in names.split()} == {
        rule for rule in kept if rule[0] == "!"
    }


def test_an_unknown_variant_is_refused() -> None:
    ended = subprocess.run([ROOT / "scripts/image", "rocm"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "unknown variant rocm; expected cpu, cuda, cuda-slim or tools" in ended.stderr


def test_the_image_says_what_it_is(image: str) -> None:
    (image_facts,) = json.loads(podman("image", "inspect", image).stdout)
    config = image_facts["Config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == ["kubetune"]
    assert "Healthcheck" not in config
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    assert re.fullmatch(
        "[0-9a-f]{40}(-dirty)?", config["Labels"]["org.opencontainers.image.revision"]
    )


def test_the_image_holds_no_build_tools_and_nothing_of_the_build(image: str) -> None:
    tools = "for tool in gcc cc g++ c++ clang ld make git curl; do command -v $tool; done"
    assert shell(image, tools).stdout == ""
    assert shell(image, "python -m pip").stderr.endswith("No module named pip\n")
    assert shell(image, "ls -d /source /pip /package /etc/pip.conf 2>/dev/null").stdout == ""


def test_the_image_holds_the_versions_that_are_tested(image: str) -> None:
    script = "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))"
    versions = dict(
        pin.split("==") for pin in shell(image, f'python -c "{script}"').stdout.lower().split()
    )
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert {"torch", "transformers", "peft", "datasets"} <= versions.keys()
    same = {
        name.replace("_", "-").replace(".", "-"): version.split("+")[0]
        for name, version in versions.items()
    }
    assert {
        name: version for name, version in same.items() if pins.get(name, version) != version
    } == {}


def test_modules_are_compiled_since_a_read_only_root_could_not_keep_what_python_compiles(
    image: str,
) -> None:
    ended = shell(image, "python -v -c 'import kubetune.plan.plan, numpy, jinja2' 2>&1")
    assert "matches" in ended.stdout
    assert not re.findall(r"^# (?:wrote|bytecode is stale).*", ended.stdout, re.M)
    assert not re.findall(r"^# code object from '/opt/kubetune[^']*\.py'", ended.stdout, re.M)


@pytest.mark.slow
def test_the_demo_learns_in_a_locked_container(root: str, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    ended = subprocess.run(
        [ROOT / "scripts/image-run", root, "demo", "--output", "demo"],
        env=os.environ | {"OUTPUTS": str(outputs)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    before, after = (
        int(share) for share in re.findall(r"^  (?:before|after) +(\d+)%$", ended.stdout, re.M)
    )
    assert before < 10
    assert after > 80
    assert {file.stat().st_uid for file in outputs.rglob("*")} == {USER}


class Gang:
    """The pods of a rendered Job as containers, with the rights, variables and volumes that its manifest gives them.

    They share the loopback network of a container that only sleeps, so that no other network is needed, and start in
    any order; a hosts file stands for the DNS.
    """

    def __init__(self, image: str, folder: Path, run_file: Path) -> None:
        config = load_config(run_file)
        objects = render(config, make_plan(config), local_files(config))
        (job,) = (o for o in objects if o["kind"] == "Job")
        self.image, self.folder, self.name = image, folder, job["metadata"]["name"]
        self.nodes: int = job["spec"]["completions"]
        self.network = f"{self.name}-network"
        self.pod: dict[str, Any] = job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]
        for volume in self.pod["volumes"]:
            place = folder / volume["name"]
            place.mkdir(exist_ok=True)
            if source := volume.get("configMap"):
                (data,) = (
                    o["data"]
                    for o in objects
                    if o["metadata"]["name"] == source["name"] and "data" in o
                )
                for file, text in data.items():
                    (place / file).write_text(text)
        hosts = [
            f"127.0.0.1 localhost {self.name}-{node} {self.name}-{node}.{self.name}"
            for node in range(self.nodes)
        ]
        (folder / "hosts").write_text("\n".join([*hosts, ""]))

    def __enter__(self) -> Gang:
        words = [
            f"--name={self.network}",
            "--network=none",
            "--entrypoint=sleep",
            self.image,
            "infinity",
        ]
        begun = podman("run", "--detach", "--rm", *LIMITS, *words)
        assert begun.returncode == 0, begun.stderr
        # A pod that does not come would leave the others waiting, and the test with them.
        self.limit = threading.Timer(SECONDS, self.remove)
        self.limit.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.limit.cancel()
        self.remove()

    def remove(self) -> None:
        """End all containers, the one with the network last."""
        for name in (*(f"{self.name}-{node}" for node in range(self.nodes)), self.network):
            podman("rm", "--force", "--ignore", "--time=0", name)

    def _mount(self, mount: dict[str, Any], node: int) -> str:
        name = mount["name"]
        path = mount["mountPath"]
        if name in ("tmp", "dshm"):
            return f"--tmpfs={path}:rw,mode=1777"
        if mount.get("readOnly"):
            return f"--volume={self.folder / name}:{path}:ro"
        place = self.folder / name
        if name == "cache":  # each pod has its own
            place = self.folder / f"{name}-{node}"
            place.mkdir(exist_ok=True)
        os.chown(
            place, self.pod["securityContext"]["fsGroup"], self.pod["securityContext"]["fsGroup"]
        )
        return f"--volume={place}:{path}"

    def _variables(self, node: int) -> Iterator[str]:
        """Yield options that set the container's variables, with `$(NAME)` replaced by those before, as kubelet does."""
        pod = f"{self.name}-{node}"
        fields = {
            "nodeName": "here",
            "completion-index": str(node),
            "metadata.name": pod,
            "instance": self.name,
        }
        known: dict[str, str] = {}
        for entry in self.container["env"]:
            value = entry.get("value")
            if value is None:
                path = entry["valueFrom"]["fieldRef"]["fieldPath"]
                (value,) = (text for part, text in fields.items() if part in path)
            known[entry["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match: known.get(match[1], match[0]), value
            )
            yield f"--env={entry['name']}={known[entry['name']]}"

    def start(self, node: int) -> subprocess.Popen[str]:
        """Start one pod's container; its output, stderr too, is in the process's `stdout`."""
        security = self.container["securityContext"]
        pod = self.pod["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        entry, *arguments = self.container["command"]
        command = ["podman", "run", "--rm", f"--name={self.name}-{node}", *LIMITS]
        command += ["--read-only", "--read-only-tmpfs=false"]
        command += [
            "--security-opt=no-new-privileges",
            *(f"--cap-drop={c}" for c in security["capabilities"]["drop"]),
        ]
        command += [
            f"--user={pod['runAsUser']}:{pod['runAsGroup']}",
            f"--workdir={self.container['workingDir']}",
        ]
        command += [f"--network=container:{self.network}"]
        command += [f"--volume={self.folder / 'hosts'}:/etc/hosts:ro"]
        command += [self._mount(mount, node) for mount in self.container["volumeMounts"]]
        command += self._variables(node)
        command += [f"--entrypoint={entry}", self.image, *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def gang(root: str, tmp_path: Path) -> Iterator[Gang]:
    """Yield a run of the demo's model in two pods."""
    shutil.copytree(DEMO / "model", tmp_path / "outputs" / "model")
    run = {
        "name": "gang",
        "model": {"path": f"{OUTPUTS}/model", "local_files_only": True},
        "data": {"train": f"{DEMO / 'data' / 'train.jsonl'}#128", "max_length": 128},
        "lora": {"r": 4},
        "training": {"num_train_epochs": 4, "global_batch_size": 8, "logging_steps": 1},
        "compute": {"nodes": 2, "gpus_per_node": 0, "cpu": 1, "memory": "2Gi"},
        "kubernetes": {
            "image": root,
            "network_interface": "lo",
            "storage": {"cache": {"size": "1Gi"}, "outputs": {"size": "1Gi"}},
        },
    }
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump(run))
    with Gang(root, tmp_path, run_file) as gang:
        yield gang


def read_to_line(process: subprocess.Popen[str], mark: str) -> str:
    """Return all that the process prints up to the line with the mark, or to its end."""
    assert process.stdout
    output = ""
    for line in process.stdout:
        output += line
        if mark in line:
            break
    return output


def wait(pods: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return the exit code of each, and the rest of what it printed."""
    rest = [pod.communicate()[0] for pod in pods]
    return [(pod.returncode, text) for pod, text in zip(pods, rest, strict=True)]


@pytest.mark.slow
def test_rendered_pods_train_stop_and_go_on(gang: Gang, tmp_path: Path) -> None:
    run_dir = tmp_path / "outputs" / gang.name
    with ExitStack() as ends:
        pods = [ends.enter_context(gang.start(node)) for node in range(gang.nodes)]
        begun = read_to_line(pods[0], "[TRAIN] step 2/")
        assert "[TRAIN] step 2/" in begun, begun
        podman("kill", "--signal=TERM", f"{gang.name}-0", f"{gang.name}-1")
        stopped = wait(pods)
    assert [code for code, _ in stopped] == [143, 143], stopped
    last_step = json.loads((run_dir / "exit.json").read_text())["step"]
    assert 2 <= last_step < 64

    with ExitStack() as ends:
        ended = wait([ends.enter_context(gang.start(node)) for node in range(gang.nodes)])
    assert [code for code, _ in ended] == [0, 0], ended
    steps = [
        line["step"]
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    ]
    assert sorted(set(steps)) == list(range(1, 65))
    assert (run_dir / "checkpoints" / "last" / "adapter_model.safetensors").is_file()
    assert {file.stat().st_uid for file in run_dir.rglob("*")} == {USER}
