"""Every answer of an API server that is not a yes, as a sentence: what it means, and what to do about it.

Pure: what was asked and what came back go in, words come out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kubetune.base.yaml_text import dump
from kubetune.errors import EnvironmentFault
from kubetune.kube_api.kinds import Kind

_CANNOT = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
)
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')
_QUOTA = re.compile(r"exceeded quota: (?P<quota>[^,]+), (?P<amounts>.*)")


class ApiError(EnvironmentFault):
    """A request to the API server had no good end: it was refused, or nobody answered."""


class Refused(ApiError):
    """The API server said no. `code` is the HTTP status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class NoNamespace(Refused):
    """There is no namespace of that name, and so nothing else to be said."""


class Unreachable(ApiError):
    """The API server does not answer, or a connection to it broke. `pause_seconds`: as long as it asks to be spared."""

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


@dataclass(frozen=True)
class Question:
    """Request to the API server, as it is named to people."""

    verb: str
    kind: Kind
    namespace: str
    name: str = ""
    subresource: str = ""

    def __str__(self) -> str:
        what = f"{self.kind.name} {self.name}".strip()
        if self.verb == self.subresource:
            return f"{self.verb} in {what}"
        return f"{self.verb} {f'{self.subresource} of ' if self.subresource else ''}{what}"


def refusal(question: Question, code: int, status: dict[str, Any]) -> Refused:
    """The error for an answer: its HTTP code, and the Status object (or as much of one as there was) it came with."""
    message = str(status.get("message") or "no reason was given")
    if found := _NAMESPACE.search(message):
        missing = (
            f"there is no namespace {found[1]}; create it (kubectl create namespace {found[1]}) or give -n another"
        )
        return NoNamespace(missing, code)
    return Refused(f"{question}: {_sentence(question, code, message, status)}", code)


def _sentence(question: Question, code: int, message: str, status: dict[str, Any]) -> str:
    if code < 400:
        return f"something else than an API server answered ({code}): {message}"
    if code == 401:
        return "the cluster does not know who you are; log in again (your credentials may have expired)"
    if code == 403:
        return _forbidden(question, message)
    if code == 404 and not question.subresource and not (status.get("details") or {}).get("name"):
        how = question.kind.install or "ask whoever runs the cluster"
        return f"the cluster has no kind {question.kind.name} in {question.kind.api_version}; {how}"
    if code == 404:
        return f"not found in namespace {question.namespace}"
    if code == 409:
        return f"{message}; somebody else changed it meanwhile, or another tool owns these fields"
    if code == 422:
        causes = (status.get("details") or {}).get("causes") or []
        listed = [f"{cause.get('field')}: {cause.get('message')}" for cause in causes]
        return "the cluster refuses it as invalid: " + ("; ".join(listed) or message)
    if question.subresource and code >= 500:
        # Only these go on from the API server to the node.
        return f"its node cannot be asked ({code}): {message}; see kubectl get nodes"
    if code == 429 or code >= 500:
        return f"the API server has a problem ({code}): {message}; try again later"
    return f"{message} ({code})"


def _forbidden(question: Question, message: str) -> str:
    if quota := _QUOTA.search(message):
        return (
            f"quota {quota['quota']} of namespace {question.namespace} is used up: {quota['amounts']}; ask for less "
            "(compute.*, kubernetes.storage.*.size), wait until something ends, or have the quota raised"
        )
    if "violates PodSecurity" in message:
        return f"pod security of namespace {question.namespace} forbids it: {message.partition('violates ')[2]}"
    found = _CANNOT.search(message)
    if found is None:
        return f"forbidden: {message}"
    group = found["group"]
    where = f"{found['resource']} in API group {group}" if group else found["resource"]
    rule = {"apiGroups": [group], "resources": [found["resource"]], "verbs": [found["verb"]]}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "kubetune-operator", "namespace": question.namespace},
        "rules": [rule],
    }
    return (
        f"{found['user']} may not {found['verb']} {where} in namespace {question.namespace}. This Role, bound to them, "
        "grants it (kubernetes.operators in a run file makes one with all rights that kubetune needs):\n"
        f"{dump([role])}".rstrip()
    )
