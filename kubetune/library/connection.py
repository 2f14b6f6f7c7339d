"""The way to a cluster. Light: verbs that only ask a cluster import nothing else of the library."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kubetune.errors import ConfigError
from kubetune.extras import require

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster


def open_cluster(namespace: str | None, **settings: Any) -> Cluster:
    """The cluster of the kubeconfig. Raises EnvironmentFault, and MissingExtra where the extra k8s is not installed.

    Raises ConfigError for a namespace that none can be called: an empty one is not taken for the kubeconfig's.

    `settings` are those of `client.Cluster`.
    """
    if namespace is not None:
        from kubetune.config.schema.cluster import DNS_LABEL

        if not re.fullmatch(DNS_LABEL, namespace):
            expected = "63 lower-case letters, digits and dashes at most"
            raise ConfigError(
                f"namespace: found {namespace!r}; expected {expected}. Nothing was asked of the cluster."
            )
    require("work with a cluster", "lightkube", "httpx2")
    from kubetune.k8s.api.client import Cluster

    return Cluster(namespace, **settings)
