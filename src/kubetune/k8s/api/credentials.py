"""The API server and who we are to it: the current context of the kubeconfig, or a pod's own account.

lightkube makes TLS and tokens of what kubeconfig.py has read. Not for asking an API server anything: client.py.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
from lightkube import ConfigError as LightkubeError
from lightkube.config.client_adapter import user_auth, verify_cluster
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, KubeConfig

from kubetune.config.schema.quantities import DNS_LABEL
from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.kubeconfig import ClusterEntry, Kubeconfig, UserEntry, beside, content
from kubetune.k8s.api.login_program import ExecLogin

_DEFAULT = "~/.kube/config"
_ACCOUNT = Path(SERVICE_ACCOUNT)


@dataclass(frozen=True)
class Login:
    """Everything that a connection to an API server is made from."""

    server: str  # URL
    namespace: str
    verify: ssl.SSLContext
    auth: httpx2.Auth | None = None
    proxy: str | None = None  # URL; None: the environment's, if it has one
    # in the server's certificate, where it is not that of `server`
    tls_server_name: str | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)  # name and text, of each request

    @property
    def way(self) -> str:
        """Return the server, and the proxy that requests to it go by, for messages."""
        proxy = self.proxy
        address = urlsplit(self.server)
        # HTTPS_PROXY and its like, as httpx2 reads them.
        if not proxy and not proxy_bypass(address.hostname or ""):
            proxies = getproxies()
            proxy = proxies.get(address.scheme) or proxies.get("all")
        if proxy:
            return f"{self.server} (by proxy {proxy})"
        return self.server


def read_login(tell: Callable[[str], None]) -> Login:
    """Return the login of the current context, as kubectl finds it; in a pod without a kubeconfig, that of its account.

    `tell` learns that a program which logs in takes long. Raise EnvironmentFault saying what is wrong, and in which
    file.
    """
    names = [name for name in os.environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    paths = [Path(os.path.expanduser(name)) for name in names or [_DEFAULT]]
    # KUBECONFIG may name files that do not exist, as kubectl allows.
    files = [path for path in paths if path.is_file()]
    if files:
        return _login_of_context(Kubeconfig(files), tell)
    is_in_pod = (_ACCOUNT / "token").is_file() and "KUBERNETES_SERVICE_HOST" in os.environ
    if is_in_pod and not names:
        return _login_of_account()
    where = _DEFAULT
    if names:
        where = " or ".join(map(str, paths))
    raise EnvironmentFault(
        f"there is no kubeconfig at {where}; set KUBECONFIG to one, or copy it there"
    )


def _login_of_account() -> Login:
    """Return the login of a pod's service account, whose token changes now and then."""
    try:
        account = KubeConfig.from_service_account(_ACCOUNT)
        (context,) = account.contexts.values()
        (cluster,) = account.clusters.values()
        (user,) = account.users.values()
        verify = verify_cluster(cluster, user, str)
    except (LightkubeError, OSError, ValueError, LookupError) as error:
        raise EnvironmentFault(f"{_ACCOUNT}: the pod's account cannot be used: {error}") from None
    return Login(cluster.server, (context.namespace or "default").strip(), verify, user_auth(user))


def _login_of_context(kubeconfig: Kubeconfig, tell: Callable[[str], None]) -> Login:
    """Return the login of the current context: its cluster, its user and its namespace."""
    current = kubeconfig.current
    if not current:
        raise EnvironmentFault(
            f"{kubeconfig.name}: no current context; choose one of {kubeconfig.names('context')}: "
            "kubectl config use-context NAME"
        )
    context, context_file = kubeconfig.entry("context", current, "current-context")
    cluster, cluster_file = kubeconfig.entry("cluster", context.cluster, f"context {current}")
    user = UserEntry()
    user_file = context_file
    if context.user:
        user, user_file = kubeconfig.entry("user", context.user, f"context {current}")

    # Report every mistake here, with its file, rather than at the first request.
    namespace = context.namespace or "default"
    problem = not_a_namespace(namespace)
    if problem:
        raise EnvironmentFault(f"{context_file}: context {current}: {problem}")
    _check_address(cluster, f"{cluster_file}: cluster {context.cluster}: ")
    _check_user(user, user_file, f"{user_file}: user {context.user}: ")
    try:
        verify = verify_cluster(cluster, user, str)
    # Errors of ssl are OSErrors.
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{_certificates(cluster, cluster_file)}: {error}") from None

    # A token comes before a program, as for kubectl.
    auth: httpx2.Auth | None
    if user.exec and not (user.token or user.token_file):
        auth = ExecLogin(user.exec, cluster, verify, user_file, tell)
    else:
        auth = user_auth(user)
    return Login(
        server=cluster.server,
        namespace=namespace,
        verify=verify,
        auth=auth,
        proxy=cluster.proxy_url,
        tls_server_name=cluster.tls_server_name,
        headers=_impersonation(user),
    )


def not_a_namespace(name: str) -> str:
    """Return what is wrong with a name that no namespace can have; empty for others."""
    if re.fullmatch(DNS_LABEL, name):
        return ""
    return f"namespace is {name!r}; expected lower-case letters, digits and hyphens, up to 63"


def _certificates(cluster: ClusterEntry, file: Path) -> str:
    """Return which certificates cannot be used, for a message."""
    if not cluster.certificate_auth_data and "SSL_CERT_FILE" in os.environ:
        name = os.environ["SSL_CERT_FILE"]
        return (
            f"the certificates of SSL_CERT_FILE ({name}) that servers are known by cannot be read"
        )
    return f"{file}: certificate-authority or client-certificate cannot be used"


def _check_address(cluster: ClusterEntry, where: str) -> None:
    """Raise EnvironmentFault for a server that no request can be sent to."""
    if not cluster.server:
        raise EnvironmentFault(f"{where}`server` is missing")
    try:
        address = urlsplit(cluster.server)
        has_host = address.scheme in ("http", "https") and bool(address.hostname)
        # The port is read here: urlsplit raises ValueError for one that is no number.
        is_address = has_host and address.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise EnvironmentFault(f"{where}`server` is {cluster.server}; expected https://HOST:PORT")


def _check_user(user: UserEntry, file: Path, where: str) -> None:
    """Make the token's path absolute. Raise EnvironmentFault for what lightkube would crash on, or pass over."""
    if user.auth_provider:
        raise EnvironmentFault(
            f"{where}auth-provider is no longer understood, by kubectl neither; have the kubeconfig made anew by your "
            "cloud's command, which writes `exec` instead"
        )
    if bool(user.client_cert_data) != bool(user.client_key_data):
        missing = "client-key" if user.client_cert_data else "client-certificate"
        raise EnvironmentFault(f"{file}: {missing} (or {missing}-data) is missing")
    # These become headers, which hold one line.
    for key, text in (("token", user.token), ("as", user.as_user), ("as-uid", user.as_uid)):
        if text and not text.strip().isprintable():
            raise EnvironmentFault(f"{where}{key} is no text of one line")
    if user.token_file:
        token = content(file, "tokenFile", user.token_file).decode(errors="replace").strip()
        user.token_file = str(beside(file, user.token_file))
        if not token.isprintable():
            raise EnvironmentFault(
                f"{where}tokenFile: {user.token_file}: more than one line of text"
            )


def _impersonation(user: UserEntry) -> list[tuple[str, str]]:
    """Return the headers that say as whom to act, where the kubeconfig names somebody.

    Neither lightkube nor kr8s knows of it.
    """
    if not user.as_user:
        return []
    headers = [("Impersonate-User", user.as_user)]
    for group in user.as_groups:
        headers.append(("Impersonate-Group", group))
    if user.as_uid:
        headers.append(("Impersonate-Uid", user.as_uid))
    for key, texts in user.as_extra.items():
        for text in texts:
            headers.append((f"Impersonate-Extra-{key}", text))
    return headers
