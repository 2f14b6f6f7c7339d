"""Runs on a cluster as functions: the manifests of one, and submitting it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from kubetune.config.schema import Config
from kubetune.errors import ConfigError, DataError
from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests import local_files
from kubetune.k8s.manifests import render as make_manifests
from kubetune.k8s.manifests.spec import Manifest, plan_without_data
from kubetune.library.configs import ConfigLike, config_of
from kubetune.library.connection import open_cluster

if TYPE_CHECKING:
    from kubetune.k8s.cluster.submit import JobRef


def render(config: ConfigLike) -> list[Manifest]:
    """The Kubernetes objects of a run as plain dicts, in the order in which they are to be applied.

    The same config gives the same objects everywhere; no cluster is asked. Small data files travel along in a
    ConfigMap. Secrets are not among them: pods refer to them by name. Advice is given as warnings.

    Raises:
        ConfigError: the config is wrong, has no `kubernetes`, or asks for what cannot run.
    """
    config = config_of(config)
    return _rendered(config, local_files(config))


def _rendered(config: Config, files: Mapping[str, str]) -> list[Manifest]:
    plan = plan_without_data(config)
    objects = make_manifests(config, plan, files)
    findings = lint(config, plan, objects, files)
    if fatal := [f"{found.key}: {found.text}" for found in findings if found.fatal]:
        raise ConfigError(fatal)
    for found in findings:
        warnings.warn(f"{found.key}: {found.text}", stacklevel=3)
    return objects


def submit(
    config: ConfigLike, *, replace: bool = False, dry_run: bool = False, check: bool = True
) -> JobRef:
    """Run on the cluster of the kubeconfig what `train` runs here; returns what came of it, without waiting.

    Doing it twice changes nothing. `replace`: pods of this run that have ended or differ are stopped, and new ones go
    on from the newest checkpoint. `dry_run`: the cluster checks all objects, and nothing is changed. `check`: data
    files that travel along are read first. Advice is given as warnings.

    Raises:
        ConfigError: the config is wrong, the name belongs to another run, or pods stand in the way without `replace`.
        DataError: bad records in data files that travel along.
        MissingExtra: the extra k8s is not installed.
        EnvironmentFault: no cluster, or everything that the server refuses.
    """
    config = config_of(config)
    files = local_files(config)
    _rendered(config, files)
    if check:
        check_data(config, files, spared_by="check=False")
    assert config.kubernetes is not None
    cluster = open_cluster(config.kubernetes.namespace)
    from kubetune.k8s.cluster.submit import submit as apply_all

    def confirm(question: str) -> bool:
        if not replace:
            raise ConfigError(f"{question}? Call with replace=True for that. Nothing was changed.")
        return True

    return apply_all(cluster, config, files, confirm=confirm, dry_run=dry_run)


def check_data(config: Config, files: Mapping[str, str], *, spared_by: str) -> None:
    """Read all records of the data files that travel along. Raises DataError with the bad ones, as the pods would.

    What needs a tokenizer, as lengths and empty rows do, shows there only. `spared_by`: how the user leaves this out.
    """
    from kubetune.data.inspect.check import check_shapes

    for source in chain(*config.sources.values()):
        if source.path.partition("#")[0] not in files:
            continue
        shapes = check_shapes(source)
        problems = shapes.problems
        if problems.total or not shapes.kinds:
            said = str(problems.error()) if problems.total else f"{source.path} holds no records."
            found = said.removesuffix(" Nothing was written.")
            raise DataError(f"{found}\nNothing was changed. {spared_by} submits it all the same.")
