"""The way to a cluster. Light: verbs that only ask a cluster import nothing else of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kubetune.errors import EnvironmentFault

if TYPE_CHECKING:
    from kubetune.kube_api.client import Cluster


def open_cluster(namespace: str | None, **settings: Any) -> Cluster:
    """The cluster of the kubeconfig. Raises EnvironmentFault, also where lightkube is not installed.

    `settings` are those of `client.Cluster`.
    """
    try:
        from kubetune.kube_api.client import Cluster
    except ModuleNotFoundError as error:
        raise EnvironmentFault(
            f"{error.name} is not installed; to work with a cluster: pip install 'kubetune[k8s]'"
        ) from None
    return Cluster(namespace, **settings)
