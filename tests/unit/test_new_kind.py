"""A new kind of workload is one file and one name in a line: here one is added to a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kubetune

KIND = '''
"""MPIJob of Kubeflow's MPI operator, as far as this test needs one."""

from typing import Any, ClassVar

from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.spec import TRAINER, Manifest, RunSpec, kind_and_name
from kubetune.k8s.manifests.trainer import pod_template


class MPIJob(WorkloadKind):
    """An MPIJob of workers."""

    resource = Resource("MPIJob", "kubeflow.org/v2beta1", "mpijobs")
    install = "install the MPI operator"
    container = "worker"
    ended_well = ("Succeeded",)
    template_paths: ClassVar = {"MPIJob": ("spec/mpiReplicaSpecs/Worker/template",)}

    def render(self, spec: RunSpec) -> list[Manifest]:
        template = pod_template(spec, name=self.container)
        body = {"mpiReplicaSpecs": {"Worker": {"replicas": spec.nodes, "template": template}}}
        version = self.resource.api_version
        return [spec.manifest(version, self.name, spec.name, TRAINER, spec=body)]

    def templates(self, obj: Manifest) -> list[PodTemplate]:
        worker = obj["spec"]["mpiReplicaSpecs"]["Worker"]
        return [PodTemplate(kind_and_name(obj), worker["template"], worker["replicas"])]

    def longest_name(self, spec: RunSpec) -> int:
        return 20


KIND = MPIJob()
'''

SCRIPT = """
import json, sys
from pathlib import Path
from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.k8s.api.kinds import KINDS, WORKLOADS
from kubetune.k8s.cluster import pods
from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests import render
from kubetune.k8s.manifests.pod_templates import pod_templates, pods_of
from kubetune.k8s.manifests.spec import plan_without_data
from kubetune.k8s.manifests.kustomize import configuration

config = load_config(Path("run.yaml"), environ={})
plan = plan_without_data(config)
objects = render(config, plan)
job = objects[-1]
role = next(obj for obj in objects if obj["kind"] == "Role")
(name, template), = pod_templates(job)
ended = {**job, "status": {"conditions": [{"type": "Succeeded", "status": "True", "message": "well"}]}}
print(json.dumps({
    "kind": job["kind"],
    "groups": [group for rule in role["rules"] for group in rule["apiGroups"]],
    "template": [name, template["spec"]["containers"][0]["name"], pods_of(job)],
    "state": pods.state_of(ended, []),
    "path": WORKLOADS["mpijob"].path("ml", "fit"),
    "trainer": pods.trainer_container({"spec": {"containers": [{"name": "x"}, {"name": "worker"}]}}),
    "findings": [finding.text for finding in lint(config, plan, objects) if finding.key == "name"],
    "kustomized": "spec/mpiReplicaSpecs/Worker/template" in json.dumps(configuration(objects)),
}))
"""

RUN_FILE = """
name: twenty-one-characters
model: m/m
data: {train: d/d}
compute: {nodes: 2, gpus_per_node: 1, memory: 1Gi}
kubernetes: {kind: mpijob, image: "i:1", operators: [{kind: Group, name: ops}]}
"""


def test_a_new_kind_is_one_file_and_one_line(tmp_path: Path) -> None:
    package = tmp_path / "kubetune"
    shutil.copytree(
        Path(kubetune.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    (package / "k8s/manifests/kinds/mpijob.py").write_text(KIND)
    schema = package / "config/schema/cluster.py"
    line = 'KindName = Literal["job", '
    text = schema.read_text()
    assert text.count(line) == 1
    schema.write_text(text.replace(line, f'{line}"mpijob", '))
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["kind"] == "MPIJob"
    assert facts["groups"][0] == "kubeflow.org"
    assert facts["template"] == ["MPIJob/twenty-one-characters", "worker", [2]]
    assert facts["state"] == ["done", "well"]
    assert facts["path"] == "/apis/kubeflow.org/v2beta1/namespaces/ml/mpijobs/fit"
    assert facts["trainer"] == "worker"
    assert "twenty-one-characters: 21 characters; a MPIJob may have 20" in facts["findings"]
    assert facts["kustomized"]
