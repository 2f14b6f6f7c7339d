"""Runs on a cluster as functions: the manifests of one, and submitting it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from kubetune.config.schema import Config, SourceConfig
from kubetune.errors import ConfigError, DataError
from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests import local_files
from kubetune.k8s.manifests import render as make_manifests
from kubetune.k8s.manifests.mistakes import Mistake
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, plan_without_data
from kubetune.library.cluster_connection import open_cluster
from kubetune.library.configs import ConfigLike, config_of

if TYPE_CHECKING:
    from kubetune.k8s.cluster.submit import JobRef
    from kubetune.plan.plan import Plan


def render(config: ConfigLike) -> list[Manifest]:
    """Return the Kubernetes objects of a run as plain dicts, in the order in which to apply them.

    The same config gives the same objects everywhere; no cluster is asked. Small data files are among
    them, in a ConfigMap. Secrets are not: pods refer to them by name. Advice is given as warnings.

    Raises:
        ConfigError: the config is wrong, has no `kubernetes`, or asks for something that cannot run.
    """
    config = config_of(config)
    objects, findings = checked_manifests(config, plan_without_data(config), local_files(config))
    _warn(findings)
    return objects


def _warn(findings: Sequence[Mistake]) -> None:
    """Give advice on a run as warnings."""
    # At stacklevel 3, the warning points to the caller of `render` or `submit`.
    for finding in findings:
        warnings.warn(f"{finding.key}: {finding.text}", stacklevel=3)


def checked_manifests(
    config: Config, plan: Plan, files: Mapping[str, str]
) -> tuple[list[Manifest], list[Mistake]]:
    """Return the objects of a run, and findings about them. Raise ConfigError for what cannot run."""
    objects = make_manifests(config, plan, files)
    findings = lint(RunSpec.of(config, plan, files), objects)
    fatal = [f"{finding.key}: {finding.text}" for finding in findings if finding.fatal]
    if fatal:
        raise ConfigError(fatal)
    return objects, findings


def submit(
    config: ConfigLike, *, replace: bool = False, dry_run: bool = False, check: bool = True
) -> JobRef:
    """Start a run on the cluster of the kubeconfig. Return what was done, without waiting for its end.

    Doing it twice changes nothing. `replace`: pods of this run that have ended or differ are stopped,
    and new ones continue from the newest checkpoint. `dry_run`: the cluster checks all objects, and
    nothing is changed. `check`: data files in the ConfigMap are read first. Advice is given as warnings.

    Raises:
        ConfigError: the config is wrong, the name belongs to another run, or there are pods that only
            `replace` would stop.
        DataError: bad records in data files of the ConfigMap.
        MissingExtra: the extra k8s is not installed.
        EnvironmentFault: no cluster, or everything that the server refuses.
    """
    # Everything that can be wrong without a cluster is looked for first.
    config = config_of(config)
    files = local_files(config)
    _, findings = checked_manifests(config, plan_without_data(config), files)
    _warn(findings)
    if check:
        check_data(chain(*config.sources.values()), files, skip_option="check=False")
    assert config.kubernetes is not None
    cluster = open_cluster(config.kubernetes.namespace)
    from kubetune.k8s.cluster.submit import submit as apply_all

    # Where the command line asks, a function has its answer from the caller.
    def confirm(question: str) -> bool:
        if not replace:
            raise ConfigError(f"{question}? Call with replace=True for that. Nothing was changed.")
        return True

    return apply_all(cluster, config, files, confirm=confirm, dry_run=dry_run)


def check_data(
    sources: Iterable[SourceConfig], files: Mapping[str, str], *, skip_option: str
) -> None:
    """Read all records of the data files in the ConfigMap. Raise DataError with the bad ones.

    Pods would raise the same, minutes later. What needs a tokenizer, such as lengths, only they see.
    `skip_option` is how the user submits without this check.
    """
    from kubetune.data.inspect.shapes import check_shapes

    for source in sources:
        # A path may have a number of records after a #.
        if source.path.partition("#")[0] not in files:
            continue
        shapes = check_shapes(source)
        if shapes.problems.total:
            message = shapes.problems.error().problem
        elif not shapes.kinds:
            message = f"{source.path} holds no records"
        else:
            continue
        raise DataError(f"{message}.\nNothing was changed. {skip_option} submits it all the same.")
