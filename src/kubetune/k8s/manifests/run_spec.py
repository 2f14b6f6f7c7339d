"""Facts that every manifest of one run is made from: its name, its size, its labels, and where things lie in a pod.

The objects are built by the modules beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kubetune.base.humanize import shell_word
from kubetune.base.registry.address import SCHEME, Address, mounted_folder, parse
from kubetune.config.data_files import is_hub_id
from kubetune.config.schema import ComputeConfig, Config, ModelConfig, Sources
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
    """Return an object's name in messages: `Job/support-bot`."""
    return f"{obj['kind']}/{obj['metadata']['name']}"


def non_empty(**fields: object) -> Manifest:
    """Return the fields that hold something."""
    return {name: setting for name, setting in fields.items() if setting}


def source_paths(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield every path that the run reads data from, without `#N`, with its key in the config."""

    # In the order of `Sources`.
    keys = ("data.train", "data.eval", "evaluation.forget.data")
    for key, of_split in zip(keys, sources.values(), strict=True):
        for index, source in enumerate(of_split):
            yield f"{key}.{index}.path", source.path.partition("#")[0]


def plan_without_data(config: Config) -> Plan:
    """Return the plan of a run on a cluster, whose nodes have the GPUs that it asks for. Nothing is known of its data."""
    return make_plan(config, gpus=config.compute.gpus_per_node or 0)


@dataclass(frozen=True)
class RunSpec:
    """One run on a cluster."""

    config: Config  # for what is written or compared as a whole, and keys that one object reads
    kubernetes: KubernetesConfig
    compute: ComputeConfig
    model: ModelConfig
    sources: Sources
    name: str
    nodes: int  # pods
    processes: int  # ranks of one pod
    gpus: int  # of one pod
    files: Mapping[str, str] = field(default_factory=dict)  # carried files: text by local path
    folder: str = ""  # name of the run directory, where it is not the run's

    @classmethod
    def of(cls, config: Config, plan: Plan, files: Mapping[str, str] | None = None) -> RunSpec:
        """Return the facts about a run. Raise ConfigError when the config has no `kubernetes` section."""
        if config.kubernetes is None:
            raise ConfigError(
                "kubernetes: the section is missing; add at least `kubernetes: {image: …}`. Nothing was written."
            )
        return cls(
            config=config,
            kubernetes=config.kubernetes,
            compute=config.compute,
            model=config.model,
            sources=config.sources,
            name=run_name(config.name, config.model.path),
            nodes=plan.nodes,
            processes=plan.processes_per_node,
            gpus=config.compute.gpus_per_node or 0,
            files=files or {},
        )

    def in_namespace(self, namespace: str) -> RunSpec:
        """Return the same run in another namespace than its file names."""
        kubernetes = self.kubernetes.model_copy(update={"namespace": namespace})
        config = self.config.model_copy(update={"kubernetes": kubernetes})
        return replace(self, kubernetes=kubernetes, config=config)

    def renamed(self, name: str) -> RunSpec:
        """Return the same run under another name, such as a prefixed one. Its folder keeps the old name."""
        config = self.config.model_copy(update={"name": name})
        return replace(self, config=config, name=name, folder=self.folder or self.name)

    @property
    def run_dir(self) -> str:
        """Run directory as the pods see it."""
        return f"{OUTPUTS}/{self.folder or self.name}"

    @property
    def typed(self) -> str:
        """Arguments that name the run on a command line: `NAME -n NAMESPACE`."""
        return f"{shell_word(self.name)} -n {shell_word(self.kubernetes.namespace)}"

    @property
    def service_account(self) -> str:
        """The ServiceAccount of every pod."""
        return self.kubernetes.service_account or self.name

    @property
    def pods(self) -> int:
        """Pods that the run needs at the same time: those that train, and those that draw answers."""
        samplers = self.kubernetes.samplers
        if samplers is None:
            return self.nodes
        return self.nodes + samplers.replicas

    @property
    def prepares(self) -> bool:
        """True if the run fetches or prepares something on CPU nodes, before training holds a GPU."""
        return bool(self.kubernetes.initialisers or self.kubernetes.preprocess)

    @property
    def shared(self) -> str:
        """Folder that all pods of the run see, for what is fetched and prepared once.

        It is on the cache where that is one volume for all pods, else on the outputs volume.
        """
        cache = self.kubernetes.storage.cache
        # A claim or CSI volume that exists already is the same one for every pod; a new one for many must be RWX.
        exists = cache.claim is not None or cache.csi is not None
        if cache.access == "ReadWriteMany" or exists:
            return CACHE
        return f"{OUTPUTS}/.cache"

    @property
    def base_image(self) -> Address | None:
        """The image in a registry that holds the base model; None where it is a folder, or on the hub."""
        path = self.model.path
        if not path.startswith(SCHEME):
            return None
        return parse(path)

    @property
    def mounted_base(self) -> str | None:
        """Folder at which Kubernetes mounts the image of the base model; None where it mounts none."""
        image = self.base_image
        if image is None or not image.has_digest or not self.kubernetes.image_volumes:
            return None
        return mounted_folder(image, image.reference)

    @property
    def offline(self) -> bool:
        """True if training asks the hub for nothing: the files are local, or an initialiser fetches them."""
        model = self.model
        fetched = self.kubernetes.initialisers
        model_on_hub = is_hub_id(model.path) and not model.local_files_only
        if model_on_hub and "model" not in fetched:
            return False

        data_on_hub = any(is_hub_id(path) for _, path in source_paths(self.sources))
        return "data" in fetched or not data_on_hub

    @property
    def carries_all_data(self) -> bool:
        """True if all data travels with the manifests. In a config read back from the cluster it is in their folder."""
        paths = [path for _, path in source_paths(self.sources)]
        return all(path in self.files or path.startswith(f"{DATA_FOLDER}/") for path in paths)

    def carried(self) -> dict[str, str]:
        """Return the path at which pods see each carried file, by its path on this machine.

        Keys of a ConfigMap allow few characters, and files of two folders may have the same name:

            /home/me/my data.jsonl  →  /etc/kubetune-data/0-my_data.jsonl
        """
        carried = {}
        for index, path in enumerate(self.files):
            # The number keeps names apart that are equal once other characters are replaced. Keys have at most 253.
            name = path.rsplit("/", 1)[-1]
            name = re.sub(r"[^-._a-zA-Z0-9]", "_", name)[-200:]
            carried[path] = f"{DATA_FOLDER}/{index}-{name}"
        return carried

    def every_pod(self) -> dict[str, str]:
        """Return the labels that select all pods of this run, and only them."""
        return {"app.kubernetes.io/name": "kubetune", INSTANCE: self.name}

    def selector(self, component: str) -> dict[str, str]:
        """Return the labels that select the pods of one component of this run, and only them."""
        return {**self.every_pod(), COMPONENT: component}

    def labels(self, component: str) -> dict[str, str]:
        """Return all labels of an object. Ours win over the user's, since selectors rely on them."""
        return {
            **self.kubernetes.labels,
            **self.selector(component),
            MANAGED_BY: "kubetune",
        }

    def queue_labels(self) -> dict[str, str]:
        """Return Kueue's labels of the object that it holds back until there is room."""
        k = self.kubernetes
        return non_empty(**{QUEUE_NAME: k.queue, QUEUE_PRIORITY: k.queue_priority})

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
        """Return an object of this run with its namespace, labels and annotations."""
        metadata: Manifest = {
            "name": name,
            "namespace": self.kubernetes.namespace,
            "labels": {**self.labels(component), **(more_labels or {})},
        }

        if self.kubernetes.annotations:
            metadata["annotations"] = dict(self.kubernetes.annotations)
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def spec_of(config: Config, files: Mapping[str, str] | None = None) -> RunSpec:
    """Return the facts that the manifests of a config are made from. `files` travel along, by their local path."""
    return RunSpec.of(config, plan_without_data(config), files)
