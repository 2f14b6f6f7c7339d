"""What may be wrong with the files, folders and variables that pods of a run see."""

from __future__ import annotations

from collections.abc import Iterator
from posixpath import normpath

from kubetune.base.registry.address import MOUNTED
from kubetune.base.secrets import HUB_TOKENS, is_secret, names_secret, seems_random
from kubetune.config.data_files import is_hub_id
from kubetune.config.schema.model import BUILT_IN_TEMPLATE
from kubetune.k8s.manifests.configmap import MAX_CARRIED_BYTES
from kubetune.k8s.manifests.mistakes import Mistake, advice, error
from kubetune.k8s.manifests.pod_environment import RESERVED
from kubetune.k8s.manifests.run_spec import (
    RunSpec,
    source_paths,
)
from kubetune.k8s.run_names import (
    CACHE,
    CONFIG_FOLDER,
    DATA_FOLDER,
    DOCKER_FOLDER,
    OUTPUTS,
    on_volume,
)

TAKEN = (
    *(OUTPUTS, CACHE, CONFIG_FOLDER, DATA_FOLDER, DOCKER_FOLDER, MOUNTED),
    *("/tmp", "/dev/shm"),
)


def check_variables(spec: RunSpec) -> Iterator[Mistake]:
    """Yield variables that kubetune sets itself, and those that hold a secret."""
    k = spec.kubernetes
    for section, names in (("env", k.env), ("secrets", k.secrets)):
        for name in names:
            if name in RESERVED or name.startswith(("PET_", "TORCHELASTIC_", "KUBETUNE_")):
                yield error(
                    f"kubernetes.{section}.{name}",
                    "is set by kubetune, torchrun or the operator; another value would break the rendezvous. Remove it",
                )

    # Values of variables are part of the pod's spec, which many may read who may not read Secrets.
    for name, text in k.env.items():
        key = f"kubernetes.env.{name}"
        path = ("kubernetes", "env", name)
        holds_secret = text and (names_secret(name) or is_secret(path, text, known=True))
        if name in k.secrets:
            yield error(key, "given under kubernetes.secrets too; keep one")
        elif holds_secret:
            yield error(
                key,
                "a secret value in an environment variable is readable in every manifest; put it into a Secret "
                f"and write kubernetes.secrets.{name}: {{secret: NAME}} instead",
            )
        elif seems_random(text):
            yield advice(
                key,
                "looks like a random token; if it opens anything, put it into a Secret and write "
                f"kubernetes.secrets.{name}: {{secret: NAME}} instead, as manifests are readable",
            )


def check_push(spec: RunSpec) -> Iterator[Mistake]:
    """Yield an upload at the end that pods have no token for."""
    push = spec.config.push
    # Patches may bring one.
    if push is None or spec.kubernetes.patches or spec.kubernetes.secrets.keys() & set(HUB_TOKENS):
        return
    yield error(
        "push",
        f"the pods have no token for the hub, so {push.repo} would get nothing; add `HF_TOKEN: hf-token` to "
        "kubernetes.secrets, and make that Secret with `kubetune secret set HF_TOKEN`",
    )


def check_mirror(spec: RunSpec) -> Iterator[Mistake]:
    """Yield a copy in an object store for which the run file gives the pods no credentials."""
    mirror = spec.config.mirror
    k = spec.kubernetes
    # A ServiceAccount may have a role, and patches may bring one.
    if mirror is None or k.patches or k.service_account is not None:
        return
    # Most runs have no copy.
    from kubetune.rundir.mirror.credentials import named_by, origins_of

    origins = origins_of(mirror)
    if named_by(origins, [*k.secrets, *k.env]):
        return
    yield advice(
        "mirror",
        f"the run file gives the pods no credentials for {mirror}; unless their nodes have a role for it, add "
        f"{origins.wanted} to kubernetes.secrets, and make that Secret with `kubetune secret set`",
    )


def check_volumes(spec: RunSpec) -> Iterator[Mistake]:
    """Yield mounts over a folder that has a user already: they would hide its files."""
    of_image = ("/", "/etc", "/usr", "/proc", "/sys", "/dev")
    users: dict[str, str] = dict.fromkeys(TAKEN, "kubetune's own volumes")
    users.update(dict.fromkeys(of_image, "the image itself"))

    for index, mount in enumerate(spec.kubernetes.mounts):
        # As the kernel reads it: `//outputs` and `/data/../outputs` are /outputs.
        path = "/" + normpath(mount.path).lstrip("/")
        if path in users:
            yield error(
                f"kubernetes.mounts.{index}.path",
                f"{path} is taken by {users[path]}; choose another folder",
            )
        users.setdefault(path, f"mounts[{index}]")


def check_paths(spec: RunSpec) -> Iterator[Mistake]:
    """Yield paths of the user's machine that no pod will see."""
    config = spec.config
    model = spec.model
    paths: dict[str, str | None] = dict(source_paths(spec.sources))
    paths["model.path"] = model.path
    paths["model.tokenizer"] = model.tokenizer

    # Chat templates, and Python code, are files even where their names could be hub ids.
    files: dict[str, str | None] = {}
    if model.chat_template != BUILT_IN_TEMPLATE:
        files["model.chat_template"] = model.chat_template
    if config.evaluation.metrics is not None:
        files["evaluation.metrics.file"] = config.evaluation.metrics.file
    for index, reward in enumerate(config.rewards):
        files[f"rewards.{index}.file"] = reward.file
        paths[f"rewards.{index}.reward_model"] = reward.reward_model
        paths[f"rewards.{index}.teacher"] = reward.teacher
    if config.evaluation.benchmarks is not None:
        files["evaluation.benchmarks.tasks_folder"] = config.evaluation.benchmarks.tasks_folder

    for key, path in (paths | files).items():
        if not path or "://" in path:
            continue
        # A pod fetches hub ids itself.
        if is_hub_id(path) and key not in files:
            continue
        if path not in spec.files and not on_volume(spec.kubernetes, path):
            yield error(
                key,
                f"{path} is not in the pods; put it on a volume, mount that with kubernetes.mounts, and give the path "
                f"there, or use a hub id. Text files travel along up to {MAX_CARRIED_BYTES >> 10} KiB in all",
            )

    # The image's file system is read-only.
    report = config.logging.report_json
    if report and report.startswith("/") and not on_volume(spec.kubernetes, report):
        yield error(
            "logging.report_json",
            f"{report} cannot be written: only {OUTPUTS}, {CACHE} and /tmp can",
        )
