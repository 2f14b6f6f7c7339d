"""Facts that every manifest of one run is made from: its name, its size, its labels, and where things lie in a pod.

The objects are built by the modules beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kubetune.base.humanize import shell_word
from kubetune.config.data_files import is_hub_id
from kubetune.config.schema import Config
from kubetune.config.schema.cluster import KubernetesConfig
from kubetune.errors import ConfigError
from kubetune.k8s.run_names import CACHE, DATA_FOLDER, OUTPUTS, run_name
from kubetune.plan.plan import Plan, make_plan

Manifest = dict[str, Any]

TRAINER = "trainer"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
MANAGED_BY = "app.kubernetes.io/managed-by"
QUEUE_NAME = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
PORT = 29500
# Kubernetes allows a pod this long beyond the time torchrun gives its workers, for the agent to write its exit status.
MARGIN_SECONDS = 30


def kind_and_name(obj: Manifest) -> str:
    """An object as messages name it: `Job/support-bot`."""
    return f"{obj['kind']}/{obj['metadata']['name']}"


def given(**fields: object) -> Manifest:
    """The fields that hold something."""
    return {name: setting for name, setting in fields.items() if setting}


def source_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Every path the run reads data from, with its key in the config; without `#N`."""
    keys = ("data.train", "data.eval", "evaluation.forget.data")
    for key, sources in zip(keys, config.sources.values(), strict=True):
        for index, source in enumerate(sources):
            yield f"{key}.{index}.path", source.path.partition("#")[0]


def plan_there(config: Config) -> Plan:
    """The plan of a run on a cluster, whose nodes have the GPUs that it asks for; nothing is known of its data."""
    return make_plan(config, gpus=config.compute.gpus_per_node or 0)


@dataclass(frozen=True)
class RunSpec:
    """One run on a cluster: `nodes` pods with `processes` ranks and `gpus` GPUs each.

    `files` are the small local files that travel with the manifests: their text by their path on this machine.
    `folder` is the run directory's name where that is not the run's own.
    """

    config: Config
    kubernetes: KubernetesConfig
    name: str
    nodes: int
    processes: int
    gpus: int
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""

    @classmethod
    def of(cls, config: Config, plan: Plan, files: Mapping[str, str] | None = None) -> RunSpec:
        """Raises ConfigError when the config has no `kubernetes` section."""
        if config.kubernetes is None:
            raise ConfigError(
                "kubernetes: the section is missing; add at least `kubernetes: {image: …}`. Nothing was written."
            )
        return cls(
            config=config,
            kubernetes=config.kubernetes,
            name=run_name(config),
            nodes=plan.nodes,
            processes=plan.processes_per_node,
            gpus=config.compute.gpus_per_node or 0,
            files=files or {},
        )

    def in_namespace(self, namespace: str) -> RunSpec:
        """The same run in another namespace than its file says."""
        kubernetes = self.kubernetes.model_copy(update={"namespace": namespace})
        config = self.config.model_copy(update={"kubernetes": kubernetes})
        return replace(self, kubernetes=kubernetes, config=config)

    def renamed(self, name: str) -> RunSpec:
        """The same run under another name than its file says, such as a prefixed one; its folder keeps the old one."""
        config = self.config.model_copy(update={"name": name})
        return replace(self, config=config, name=name, folder=self.folder or self.name)

    @property
    def run_dir(self) -> str:
        """Run directory as the pods see it."""
        return f"{OUTPUTS}/{self.folder or self.name}"

    @property
    def typed(self) -> str:
        """The words that name the run on a command line: `NAME -n NAMESPACE`."""
        return f"{shell_word(self.name)} -n {shell_word(self.kubernetes.namespace)}"

    @property
    def service_account(self) -> str:
        """The ServiceAccount of every pod."""
        return self.kubernetes.service_account or self.name

    @property
    def prepares(self) -> bool:
        """A run that fetches or prepares something, on CPU nodes, before training holds a GPU."""
        return bool(self.kubernetes.initialisers or self.kubernetes.preprocess)

    @property
    def shared(self) -> str:
        """Folder that all pods of the run see, for what is fetched and prepared once.

        It is on the cache where that is one volume for all pods, else on the outputs volume.
        """
        cache = self.kubernetes.storage.cache
        is_one = cache.access == "ReadWriteMany" or cache.claim is not None or cache.csi is not None
        return CACHE if is_one else f"{OUTPUTS}/.cache"

    @property
    def offline(self) -> bool:
        """Training that asks the hub for nothing: all of it is there, or an initialiser fetches it."""
        config, fetched = self.config, self.kubernetes.initialisers
        model_here = (
            config.model.local_files_only or "model" in fetched or not is_hub_id(config.model.path)
        )
        data_here = "data" in fetched or not any(
            is_hub_id(path) for _, path in source_paths(config)
        )
        return model_here and data_here

    def carried(self) -> dict[str, str]:
        """Path at which pods see each of `files`, by its path on this machine. Names are those a ConfigMap allows."""
        names = (
            re.sub(r"[^-._a-zA-Z0-9]", "_", path.rsplit("/", 1)[-1])[-200:] for path in self.files
        )
        return {
            path: f"{DATA_FOLDER}/{i}-{name}"
            for i, (path, name) in enumerate(zip(self.files, names, strict=True))
        }

    def every_pod(self) -> dict[str, str]:
        """Labels that find all pods of this run, and only them."""
        return {"app.kubernetes.io/name": "kubetune", INSTANCE: self.name}

    def selector(self, component: str) -> dict[str, str]:
        """Labels that find the pods of one component of this run, and only them."""
        return {**self.every_pod(), COMPONENT: component}

    def labels(self, component: str) -> dict[str, str]:
        """All labels of an object; ours win, since selectors rely on them."""
        return {
            **self.kubernetes.labels,
            **self.selector(component),
            MANAGED_BY: "kubetune",
        }

    def queue_labels(self) -> dict[str, str]:
        """Kueue's labels of the object that it holds back until there is room."""
        named = {
            QUEUE_NAME: self.kubernetes.queue,
            QUEUE_PRIORITY: self.kubernetes.queue_priority,
        }
        return {key: value for key, value in named.items() if value is not None}

    def manifest(
        self,
        api_version: str,
        kind: str,
        name: str,
        component: str,
        *,
        more_labels: dict[str, str] | None = None,
        **body: Any,
    ) -> Manifest:
        """An object of this run with its namespace, labels and annotations."""
        metadata: Manifest = {
            "name": name,
            "namespace": self.kubernetes.namespace,
            "labels": {**self.labels(component), **(more_labels or {})},
        }
        if self.kubernetes.annotations:
            metadata["annotations"] = dict(self.kubernetes.annotations)
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
