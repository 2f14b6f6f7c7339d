"""Parts of a cluster on Nebius, as steps for their command-line program, Helm and kubectl.

Pure: a step says how a thing is looked for, made, waited for and removed; provision.py does it. Commands that need the
id of something made before name it `@{key}`. Flags are those of `nebius … --help` and of Nebius's own guides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.yaml_text import dump
from kubetune.plugins.nebius.cluster_file import (
    CsiChartConfig,
    JobSetChartConfig,
    NebiusCluster,
    NodeGroupConfig,
    gibibytes,
)

Command = tuple[str, ...]
JSON = ("--format", "json")
# What Nebius calls the effects of taints.
EFFECTS = {
    "NoSchedule": "NO_SCHEDULE",
    "PreferNoSchedule": "PREFER_NO_SCHEDULE",
    "NoExecute": "NO_EXECUTE",
}
TOKEN = re.compile(r"@\{([^}]+)\}")


@dataclass(frozen=True)
class Kind:
    """A kind of thing. `noun` leads its commands, `@{id}`, `@{name}`, `@{parent}` and `@{context}` are filled in.

    `found` reads the id from what `look` prints, None where there is none; `jq` is the same for a script. `within`: the
    key of the step with which it goes, so that its own removal is not needed. `has_state`: it runs only after a while.
    """

    title: str
    look: Command
    found: Callable[[str, str], str | None]
    jq: str = ""
    remove: Command = ()
    get: Command = ()
    within: str = ""
    has_state: bool = False


def _made_id(text: str, _: str) -> str | None:
    return str(json.loads(text)["metadata"]["id"])


def _subnet_id(text: str, name: str) -> str | None:
    """The only subnet, or that of this name."""
    answer = json.loads(text or "{}")
    known = {
        str(item["metadata"]["id"]): str(item["metadata"].get("name", ""))
        for item in answer.get("items") or []
    }
    found = [key for key, called in known.items() if name in ("", called)]
    there = (
        ", ".join(f"{key} ({called})" if called else key for key, called in known.items()) or "none"
    )
    if len(found) > 1:
        raise ValueError(
            f"there are {len(found)} subnets, {there}: give one as subnet: in the cluster file"
        )
    if not found and (known or name):
        more = ", and more than were listed: give its id" if answer.get("next_page_token") else ""
        raise ValueError(f"subnet {name}: there is none of this name; there are {there}{more}")
    return found[0] if found else None


def _membership_id(text: str, name: str) -> str | None:
    members = json.loads(text or "{}").get("memberships") or []
    return next((str(m["metadata"]["id"]) for m in members if m["spec"]["member_id"] == name), None)


def _whole(text: str, name: str) -> str | None:
    return name if text.strip() else None


def _resource(title: str, *noun: str, within: str = "", has_state: bool = True) -> Kind:
    """A thing with a name and an id, which `nebius NOUN` can create, get and delete."""
    lead = ("nebius", *noun)
    return Kind(
        title=title,
        look=(*lead, "get-by-name", "--name", "@{name}", "@{parent}", *JSON),
        found=_made_id,
        jq=".metadata.id",
        get=(*lead, "get", "--id", "@{id}", *JSON),
        remove=(*lead, "delete", "--id", "@{id}"),
        within=within,
        has_state=has_state,
    )


def _release(title: str) -> Kind:
    """A Helm release."""
    return Kind(
        title=title,
        look=("helm", "list", *_HELM_IN, "--filter", "^@{name}$", "--short"),
        found=_whole,
        remove=("helm", "uninstall", "@{id}", *_HELM_IN),
        within="cluster",
    )


_KUBECTL = ("kubectl", "--context", "@{context}")
_HELM_IN = ("--kube-context", "@{context}", "--namespace", "@{parent}")

KINDS: dict[str, Kind] = {
    "subnet": Kind(
        title="subnet",
        look=("nebius", "vpc", "subnet", "list", "@{parent}", *JSON),
        found=_subnet_id,
        jq='[.items[]? | select($name == "" or .metadata.name == $name).metadata.id] | '
        'if length == 1 then .[0] else error("found \\(length) subnets, expected one") end',
        get=("nebius", "vpc", "subnet", "get", "--id", "@{id}", *JSON),
    ),
    "service-account": _resource("service account", "iam", "service-account", has_state=False),
    "group-membership": Kind(
        title="membership in a group",
        look=("nebius", "iam", "group-membership", "list-members", "@{parent}", *JSON),
        found=_membership_id,
        jq=".memberships[]? | select(.spec.member_id == $name) | .metadata.id",
        remove=("nebius", "iam", "group-membership", "delete", "--id", "@{id}"),
        within="service-account",
    ),
    "filesystem": _resource("shared filesystem", "compute", "filesystem"),
    "cluster": _resource("cluster", "mk8s", "cluster"),
    "gpu-cluster": _resource("GPU cluster (InfiniBand)", "compute", "gpu-cluster", has_state=False),
    "node-group": _resource("nodes", "mk8s", "node-group"),
    "csi": _release("driver of the shared volumes"),
    "jobset": _release("JobSet"),
    "kueue": _release("Kueue"),
    # Never removed: others may have put their own things into it.
    "namespace": Kind(
        title="namespace",
        look=(*_KUBECTL, "get", "namespace", "@{name}", "--ignore-not-found", "-o", "name"),
        found=_whole,
        within="cluster",
    ),
    "claim": Kind(
        title="claim",
        look=(
            *_KUBECTL,
            "--namespace",
            "@{parent}",
            "get",
            "pvc",
            "@{name}",
            "--ignore-not-found",
            "-o",
            "name",
        ),
        found=_whole,
        remove=(
            *_KUBECTL,
            "--namespace",
            "@{parent}",
            "delete",
            "pvc",
            "@{id}",
            "--ignore-not-found",
        ),
        within="cluster",
    ),
}


@dataclass(frozen=True)
class Step:
    """One thing to be there. `make` brings it about; with `repeats` that may be done any number of times.

    A step without a name has nothing of its own (credentials): it is only done.
    """

    key: str
    kind: str
    name: str
    parent: str = ""
    make: Command = ()
    stdin: str = ""
    repeats: bool = False


def steps(config: NebiusCluster) -> list[Step]:
    """All steps, in the order in which they have to be done."""
    return [*_around(config), *_cluster(config), *_inside(config)]


def credentials(config: NebiusCluster) -> Step:
    """Puts the cluster into the kubeconfig, as a context of its own."""
    endpoint = "--external" if config.public_endpoint else "--internal"
    lead = ("nebius", "mk8s", "cluster", "get-credentials", "--id", "@{cluster}")
    return Step(
        "credentials",
        "",
        "",
        make=(*lead, endpoint, "--force", "--context-name", config.context),
        repeats=True,
    )


def _create(
    config: NebiusCluster, key: str, kind: str, name: str, options: Command, parent: str = ""
) -> Step:
    parent = parent or config.project or ""
    noun = KINDS[kind].remove[:3]
    place = ("--parent-id", parent) if parent else ()
    return Step(key, kind, name, parent, (*noun, "create", *place, "--name", name, *options, *JSON))


def _subnet(wanted: str | None) -> str:
    """A subnet's id as the cluster file gives it, or what stands for that of the only one, or of the one so named."""
    if wanted is None:
        return "@{subnet}"
    return wanted if wanted.startswith("vpcsubnet-") else f"@{{subnet/{wanted}}}"


def _around(config: NebiusCluster) -> Iterator[Step]:
    for wanted in dict.fromkeys(
        (config.subnet, *(g.subnet for g in config.node_groups if g.subnet))
    ):
        if token := TOKEN.fullmatch(_subnet(wanted)):
            yield Step(token[1], "subnet", wanted or "", config.project or "")
    if account := config.service_account:
        yield _create(config, "service-account", "service-account", account.name, ())
        if account.group:
            key, member = "group-membership", "@{service-account}"
            make = (
                "nebius",
                "iam",
                key,
                "create",
                "--parent-id",
                account.group,
                "--member-id",
                member,
                *JSON,
            )
            yield Step(key, key, member, account.group, make)
    if disk := config.filesystem:
        size = ("--size-gibibytes", str(gibibytes(disk.size)))
        block = ("--block-size-bytes", str(disk.block_size_bytes))
        yield _create(
            config, "filesystem", "filesystem", disk.name, (*size, "--type", disk.type, *block)
        )


def _cluster(config: NebiusCluster) -> Iterator[Step]:
    options = ["--control-plane-version", config.kubernetes_version]
    options += ["--control-plane-subnet-id", _subnet(config.subnet)]
    if config.public_endpoint:
        options.append("--control-plane-endpoints-public-endpoint=true")
    yield _create(config, "cluster", "cluster", config.name, tuple(options))
    for group in config.node_groups:
        if group.infiniband_fabric:
            fabric = ("--infiniband-fabric", group.infiniband_fabric)
            yield _create(config, f"gpu-cluster/{group.name}", "gpu-cluster", group.name, fabric)
        options_of_group = tuple(_node_options(config, group))
        yield _create(
            config,
            f"node-group/{group.name}",
            "node-group",
            group.name,
            options_of_group,
            "@{cluster}",
        )


def _node_options(config: NebiusCluster, group: NodeGroupConfig) -> Iterator[str]:
    disk = group.boot_disk
    if scaled := group.autoscaling:
        yield from (
            "--autoscaling-min-node-count",
            str(scaled.min),
            "--autoscaling-max-node-count",
            str(scaled.max),
        )
    else:
        yield from ("--fixed-node-count", str(group.nodes))
    if group.preemptible:
        yield "--template-preemptible=true"
    if group.taints:
        taints = [
            {"key": t.key, "value": t.value, "effect": EFFECTS[t.effect]} for t in group.taints
        ]
        yield from ("--template-taints", json.dumps(taints, separators=(",", ":")))
    if group.subnet:
        interfaces = [{"subnet_id": _subnet(group.subnet)}]
        yield from ("--template-network-interfaces", json.dumps(interfaces, separators=(",", ":")))
    yield from (
        "--template-resources-platform",
        group.platform,
        "--template-resources-preset",
        group.preset,
    )
    yield from ("--template-boot-disk-type", disk.type)
    yield from ("--template-boot-disk-size-gibibytes", str(gibibytes(disk.size)))
    if group.drivers_preset:
        yield from ("--template-gpu-settings-drivers-preset", group.drivers_preset)
    if config.service_account:
        yield from ("--template-service-account-id", "@{service-account}")
    if group.infiniband_fabric:
        yield from ("--template-gpu-cluster-id", f"@{{gpu-cluster/{group.name}}}")
    if group.labels:
        yield from (
            "--template-metadata-labels",
            ",".join(f"{key}={value}" for key, value in group.labels.items()),
        )
    if shared := config.filesystem:
        disk_of_all = {"existing_filesystem": {"id": "@{filesystem}"}}
        attached = {"attach_mode": "READ_WRITE", "mount_tag": shared.mount_tag, **disk_of_all}
        yield from ("--template-filesystems", json.dumps([attached], separators=(",", ":")))
        yield from (
            "--template-cloud-init-user-data",
            cloud_init(shared.mount_tag, shared.mount_point),
        )


def cloud_init(mount_tag: str, mount_point: str) -> str:
    """User data that mounts the shared filesystem on a node, now and after each of its restarts."""
    return (
        "runcmd:\n"
        f"  - sudo mkdir -p {mount_point}\n"
        f"  - sudo mount -t virtiofs {mount_tag} {mount_point}\n"
        f'  - echo {mount_tag} {mount_point} "virtiofs" "defaults,nofail" "0" "2" | sudo tee -a /etc/fstab\n'
    )


def _inside(config: NebiusCluster) -> Iterator[Step]:
    yield credentials(config)
    # Kueue looks at start which kinds there are to queue.
    for key, chart in (("jobset", config.jobset), ("kueue", config.kueue)):
        if chart is not None:
            yield _install(config, key, chart, dict(chart.values))
    if config.filesystem is None:
        return
    driver = config.csi
    data = f"{config.filesystem.mount_point.rstrip('/')}/{driver.chart.rpartition('/')[2]}-data/"
    yield _install(config, "csi", driver, {"dataDir": data, **driver.values})
    yield from _claims(config)


def _install(
    config: NebiusCluster,
    key: str,
    chart: CsiChartConfig | JobSetChartConfig,
    values: Mapping[str, str],
) -> Step:
    """A Helm chart in the cluster, waited for until it runs."""
    release = chart.chart.rpartition("/")[2]
    own = [] if chart.namespace == "kube-system" else ["--create-namespace"]
    make = (
        *("helm", "upgrade", release, chart.chart, "--install", "--version", chart.version),
        *("--kube-context", config.context, "--namespace", chart.namespace, *own),
        *(word for name, text in values.items() for word in ("--set", f"{name}={text}")),
        *("--wait", "--timeout", f"{config.ready_minutes}m"),
    )
    return Step(key, key, release, chart.namespace, make, repeats=True)


def _claims(config: NebiusCluster) -> Iterator[Step]:
    apply = (
        "kubectl",
        "--context",
        config.context,
        "apply",
        "--server-side",
        "--field-manager=kubetune",
        "-f",
        "-",
    )
    for namespace in sorted({claim.namespace for claim in config.claims} - {"default"}):
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        yield Step(
            f"namespace/{namespace}", "namespace", namespace, "", apply, dump([body]), repeats=True
        )
    for claim in config.claims:
        text = dump([_claim(claim.name, claim.namespace, claim.size, config.csi.storage_class)])
        key = f"claim/{claim.namespace}/{claim.name}"
        yield Step(key, "claim", claim.name, claim.namespace, apply, text, repeats=True)


def _claim(name: str, namespace: str, size: str, storage_class: str) -> dict[str, Any]:
    wanted = {"resources": {"requests": {"storage": size}}}
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": storage_class, **wanted}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def fill(command: Sequence[str], values: Mapping[str, str]) -> Command:
    """The command with all `@{…}` replaced; an empty parent leaves its argument out."""
    filled: list[str] = []
    for word in command:
        if word == "@{parent}" and command[0] == "nebius":
            filled += ("--parent-id", values["parent"]) if values["parent"] else ()
        else:
            filled.append(TOKEN.sub(lambda hit: values[hit[1]], word))
    return tuple(filled)


# The code of gRPC, as the CLI prints it; a word such as "profile not found" is none.
ABSENT = r"code *[=:] *\"?(NotFound|NOT_FOUND)"


def is_absent(command: Command, stderr: str, parent: str = "") -> bool:
    """A command failed because there is no such thing, as opposed to no network, permission, or project.

    Anything else must not be taken for that: what is there already would be made again, and later be deleted as ours.
    kubectl and `helm list` end well where there is nothing.
    """
    if command[0] != "nebius":
        return command[:2] == ("helm", "uninstall") and "release: not found" in stderr
    return re.search(ABSENT, stderr) is not None and not (parent and parent in stderr)
