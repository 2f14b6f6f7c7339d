"""Open a cluster. Verbs that only ask a cluster import nothing else of the library."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kubetune.errors import ConfigError
from kubetune.extras import require

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Cluster


def open_cluster(namespace: str | None, **settings: Any) -> Cluster:
    """Return the cluster of the kubeconfig; `settings` are those of `client.Cluster`.

    Raise ConfigError for a namespace that cannot exist, EnvironmentFault if there is no cluster, and
    MissingExtra if the extra k8s is not installed.
    """
    # An empty namespace is a mistake, and does not stand for the kubeconfig's.
    if namespace is not None:
        from kubetune.config.schema.quantities import DNS_LABEL

        if not re.fullmatch(DNS_LABEL, namespace):
            expected = "63 lower-case letters, digits and dashes at most"
            raise ConfigError(
                f"namespace: found {namespace!r}; expected {expected}. Nothing was asked of the "
                "cluster."
            )
    require("work with a cluster", "lightkube", "httpx2")
    from kubetune.k8s.api.client import Cluster

    return Cluster(namespace, **settings)
