"""A new kind of workload is one file and one name in a line: here one is added to a copy of the package."""

from __future__ import annotations

import json
from pathlib import Path

from tests.package_copy import copy_package, put_before, run_script

KIND = '''
"""MPIJob of Kubeflow's MPI operator, as far as this test needs one."""

from typing import Any, ClassVar

from kubetune.k8s.manifests.kinds.kind import PodTemplate, Resource, WorkloadKind
from kubetune.k8s.manifests.run_spec import TRAINER, Manifest, RunSpec, kind_and_name
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
from kubetune.k8s.manifests.run_spec import RunSpec, plan_without_data
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
    "findings": [finding.text for finding in lint(RunSpec.of(config, plan), objects) if finding.key == "name"],
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
    package = copy_package(tmp_path)
    (package / "k8s/manifests/kinds/mpijob.py").write_text(KIND)
    schema = package / "config/schema/cluster.py"
    put_before(schema, '"job", "statefulset"', '"mpijob", ')
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    printed = run_script(tmp_path, SCRIPT)
    facts = json.loads(printed)
    assert facts["kind"] == "MPIJob"
    assert facts["groups"][0] == "kubeflow.org"
    assert facts["template"] == ["MPIJob/twenty-one-characters", "worker", [2]]
    assert facts["state"] == ["done", "well"]
    assert facts["path"] == "/apis/kubeflow.org/v2beta1/namespaces/ml/mpijobs/fit"
    assert facts["trainer"] == "worker"
    assert "twenty-one-characters: 21 characters; a MPIJob may have 20" in facts["findings"]
    assert facts["kustomized"]
