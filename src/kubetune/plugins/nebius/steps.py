"""Parts of a cluster on Nebius, as steps for their command-line program and Helm.

Pure: a step says what there is to be, or what is to be done; provision.py does it. Commands that need the id of
something made before name it `@{key}`. Flags are those of `nebius … --help` and of Nebius's own guides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kubetune.plugins.nebius.cluster_file import (
    NebiusCluster,
    NodeGroupConfig,
    gibibytes,
)

Command = tuple[str, ...]
# What the nodes know the shared filesystem by (virtiofs).
MOUNT_TAG = "csi-storage"
# The driver that makes volumes of folders on the shared filesystem, and the storage class that its chart makes.
CHART = "oci://cr.eu-north1.nebius.cloud/mk8s/helm/csi-mounted-fs-path"
CHART_VERSION = "0.1.3"
STORAGE_CLASS = "csi-mounted-fs-path-sc"
# How long a part may take until it runs.
READY_MINUTES = 60
JSON = ("--format", "json")
TOKEN = re.compile(r"@\{([^}]+)\}")
# The code of gRPC, as the CLI prints it; a word such as "profile not found" is none.
ABSENT = r"code *[=:] *\"?(NotFound|NOT_FOUND)"


@dataclass(frozen=True)
class StepKind:
    """A kind of thing that Nebius keeps by its name and id."""

    title: str  # for people
    noun: Command  # the words of `nebius` before `create`, `get` and `delete`
    has_state: bool = True  # it takes a while until it runs

    def look(self, name: str, parent: str) -> Command:
        """Return the command that prints the thing of this name."""
        return ("nebius", *self.noun, "get-by-name", "--name", name, *_within(parent), *JSON)

    def get(self, identity: str) -> Command:
        """Return the command that prints the thing with this id."""
        return ("nebius", *self.noun, "get", "--id", identity, *JSON)

    def remove(self, identity: str) -> Command:
        """Return the command that deletes it."""
        return ("nebius", *self.noun, "delete", "--id", identity)


KINDS = {
    "service-account": StepKind("service account", ("iam", "service-account"), has_state=False),
    "filesystem": StepKind("shared filesystem", ("compute", "filesystem")),
    "cluster": StepKind("cluster", ("mk8s", "cluster")),
    "gpu-cluster": StepKind(
        "GPU cluster (InfiniBand)", ("compute", "gpu-cluster"), has_state=False
    ),
    "node-group": StepKind("nodes", ("mk8s", "node-group")),
}


@dataclass(frozen=True)
class Thing:
    """A step that makes something where there is none of its name."""

    key: str  # by which later steps name its id: `@{key}`
    kind: str  # key of KINDS
    name: str
    parent: str  # what it is made in; empty for the project of the CLI's profile
    options: Command = ()

    @property
    def title(self) -> str:
        """Return what it is called in lines for people."""
        return f"{KINDS[self.kind].title} {self.name}"

    @property
    def make(self) -> Command:
        """Return the command that makes it and prints it as JSON."""
        noun = ("nebius", *KINDS[self.kind].noun)
        return (*noun, "create", *_within(self.parent), "--name", self.name, *self.options, *JSON)


@dataclass(frozen=True)
class Action:
    """A step that may be repeated: its command changes nothing the second time."""

    title: str
    command: Command


Step = Thing | Action


def _within(parent: str) -> Command:
    """Return the option that names a parent, if there is one."""
    if not parent:
        return ()
    return ("--parent-id", parent)


def steps(config: NebiusCluster) -> list[Step]:
    """Return all steps, in the order in which they have to be done."""
    return [*_around(config), *_nodes(config), credentials(config), *_inside(config)]


def _around(config: NebiusCluster) -> Iterator[Step]:
    """Yield the cluster and what it needs."""
    project = config.project or ""
    # What the cluster's nodes refer to is made before them.
    if config.service_account:
        yield Thing("service-account", "service-account", config.service_account, project)
    disk = config.filesystem
    if disk is not None:
        storage = ["--size-gibibytes", str(gibibytes(disk.size)), "--type", disk.type]
        yield Thing("filesystem", "filesystem", disk.name, project, tuple(storage))

    options = ["--control-plane-version", config.kubernetes_version]
    options += ["--control-plane-subnet-id", config.subnet]
    if config.public_endpoint:
        options.append("--control-plane-endpoints-public-endpoint=true")
    yield Thing("cluster", "cluster", config.name, project, tuple(options))


def _nodes(config: NebiusCluster) -> Iterator[Step]:
    """Yield the groups of nodes, each after the GPU cluster that joins its nodes by InfiniBand."""
    for group in config.node_groups:
        name = group.name
        if group.infiniband_fabric:
            fabric = ("--infiniband-fabric", group.infiniband_fabric)
            yield Thing(f"gpu-cluster/{name}", "gpu-cluster", name, config.project or "", fabric)
        options = tuple(_node_options(config, group))
        yield Thing(f"node-group/{name}", "node-group", name, "@{cluster}", options)


def _node_options(config: NebiusCluster, group: NodeGroupConfig) -> Iterator[str]:
    """Yield the words that say how the nodes of a group are made."""
    options = {
        "template-resources-platform": group.platform,
        "template-resources-preset": group.preset,
        "template-boot-disk-type": group.boot_disk.type,
        "template-boot-disk-size-gibibytes": str(gibibytes(group.boot_disk.size)),
    }
    if group.nodes is not None:
        options["fixed-node-count"] = str(group.nodes)
    if group.drivers_preset:
        options["template-gpu-settings-drivers-preset"] = group.drivers_preset

    # These things have no id before they are made, so their place is filled in then.
    if config.service_account:
        options["template-service-account-id"] = "@{service-account}"
    if group.infiniband_fabric:
        options["template-gpu-cluster-id"] = f"@{{gpu-cluster/{group.name}}}"

    # The filesystem is a device of each node, by its tag; cloud-init mounts it.
    shared = config.filesystem
    if shared is not None:
        attached = {
            "attach_mode": "READ_WRITE",
            "mount_tag": MOUNT_TAG,
            "existing_filesystem": {"id": "@{filesystem}"},
        }
        options["template-filesystems"] = json.dumps([attached], separators=(",", ":"))
        options["template-cloud-init-user-data"] = cloud_init(shared.mount_point)

    for name, text in options.items():
        yield f"--{name}"
        yield text
    for name, text in group.options.items():
        # So that options without a value of their own can be given too: --template-preemptible=true
        yield f"--{name}={text}"


def cloud_init(mount_point: str) -> str:
    """Return user data that mounts the shared filesystem on a node, now and after each of its restarts."""
    return (
        "runcmd:\n"
        f"  - sudo mkdir -p {mount_point}\n"
        f"  - sudo mount -t virtiofs {MOUNT_TAG} {mount_point}\n"
        f'  - echo {MOUNT_TAG} {mount_point} "virtiofs" "defaults,nofail" "0" "2" | sudo tee -a /etc/fstab\n'
    )


def credentials(config: NebiusCluster) -> Action:
    """Return the step that puts the cluster into the kubeconfig, as a context of its own."""
    # The private address is for machines within the network.
    endpoint = "--internal"
    if config.public_endpoint:
        endpoint = "--external"
    lead = ("nebius", "mk8s", "cluster", "get-credentials", "--id", "@{cluster}")
    return Action("credentials", (*lead, endpoint, "--force", "--context-name", config.context))


def _inside(config: NebiusCluster) -> Iterator[Step]:
    """Yield the driver of the shared volumes."""
    if config.filesystem is None:
        return

    # The release is named after the chart.
    release = CHART.rpartition("/")[2]
    values = {"dataDir": f"{config.filesystem.mount_point.rstrip('/')}/{release}-data/"}
    command = ["helm", "upgrade", release, CHART, "--install", "--version", CHART_VERSION]
    command += ["--kube-context", config.context, "--namespace", "kube-system"]
    for name, text in (values | config.csi.values).items():
        command += ["--set", f"{name}={text}"]
    command += ["--wait", "--timeout", f"{READY_MINUTES}m"]
    yield Action("driver of the shared volumes", tuple(command))


def fill(command: Sequence[str], ids: Mapping[str, str]) -> Command:
    """Return the command with the ids of all `@{key}`."""
    return tuple(TOKEN.sub(lambda token: ids[token[1]], word) for word in command)


def is_absent(stderr: str, parent: str = "") -> bool:
    """True if `nebius` failed because there is no such thing, as opposed to no network, permission, or project.

    Anything else must not be taken for that: what is there already would be made again, and later be deleted as ours.
    """
    return re.search(ABSENT, stderr) is not None and not (parent and parent in stderr)
