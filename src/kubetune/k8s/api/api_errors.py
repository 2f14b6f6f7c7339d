"""Every refusal of an API server as a sentence: what it means, and what to do about it.

Pure functions of the request and the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.yaml_text import dump
from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.kinds import Kind
from kubetune.k8s.api.passing import PATIENCE_SECONDS, passing_refusal

# Messages of API servers. They are the only place where these facts are: a Status has no field for them.
_CANNOT = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
)
_RBAC = "rbac.authorization.k8s.io"
# runc's and crun's words for a command that they cannot start.
_NO_PROGRAM = re.compile(
    r'exec: "(?P<program>[^"]+)": (?:executable file not found in \$PATH|.*no such file or directory)'
    r"|executable file [`'\"]?(?P<other>[^`'\"\s]+)[`'\"]? not found"
)
_NOT_EXECUTABLE = re.compile(r'exec: "(?P<program>[^"]+)": (?:.*permission denied|is a directory)')
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')
_QUOTA = re.compile(r"exceeded quota: (?P<quota>[^,]+), (?P<amounts>.*)")


class ApiError(EnvironmentFault):
    """A request to the API server failed: it was refused, or nobody answered.

    `pause_seconds` is the time without requests that the server asks for; `again_seconds` for how long the same request
    is worth another try. `code` is the HTTP status, 0 where nobody answered.
    """

    again_seconds: float = PATIENCE_SECONDS
    code: int = 0

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Refused(ApiError):
    """The API server refused a request. `words` is what the server itself said."""

    again_seconds = 0.0

    def __init__(
        self, message: str, code: int, pause_seconds: float = 0.0, words: str = ""
    ) -> None:
        super().__init__(message, pause_seconds)
        self.code = code
        self.words = words or message


class MissingRight(Refused):
    """No Role grants the request. `rule` would."""

    def __init__(self, sentence: str, rule: dict[str, Any], namespace: str) -> None:
        self.sentence = sentence
        self.rule = rule
        self.namespace = namespace
        super().__init__(missing_rights([self]), 403)


class NoNamespace(Refused):
    """There is no namespace of that name."""


class Unreachable(ApiError):
    """The API server does not answer, or a connection to it broke."""


class NotLoggedIn(Unreachable):
    """The program that logs in fails, though it has worked before."""


class Distrusted(Unreachable):
    """The API server does not prove who it is. Waiting does not help."""

    again_seconds = 0.0


class NoProgram(Refused):
    """A running container has no such program, or may not start it. `exit_code` is a shell's: 127 or 126."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, 500)
        self.exit_code = exit_code


def may_pass(error: Exception) -> bool:
    """True if the same request may succeed later: nobody answered, or the server or the node had a problem."""
    if isinstance(error, NoProgram):
        return False
    if isinstance(error, Refused):
        return error.again_seconds > 0 or error.code >= 500
    return isinstance(error, Unreachable)


@dataclass(frozen=True)
class ApiCall:
    """A request to the API server, with its name in messages: `get log of Pod fit-0`."""

    verb: str  # as in a Role
    kind: Kind
    namespace: str
    name: str = ""
    subresource: str = ""  # such as `log`

    @property
    def path(self) -> str:
        """Return the URL path of the object. An object that is yet to be created has no name in it."""
        name = "" if self.verb == "create" else self.name
        return self.kind.path(self.namespace, name, self.subresource)

    def __str__(self) -> str:
        title = f"{self.kind.name} {self.name}".strip()
        if self.verb == self.subresource:
            return f"{self.verb} in {title}"
        if self.subresource:
            return f"{self.verb} {self.subresource} of {title}"
        return f"{self.verb} {title}"


def refusal(
    question: ApiCall, code: int, status: dict[str, Any], pause_seconds: float = 0.0
) -> Refused:
    """Return the error for an answer: its HTTP code, and the Status object (or as much of it as there was)."""
    message = str(status.get("message") or "no reason was given")
    pause_seconds = max(pause_seconds, _pause_wanted(status))
    # Any request may meet a namespace that does not exist, and then says nothing of its object.
    if match := _NAMESPACE.search(message):
        name = match[1]
        return NoNamespace(
            f"there is no namespace {name}; create it (kubectl create namespace {name}) or give -n another",
            code,
        )
    specific: Refused | None = None
    if question.subresource == "exec":
        specific = _no_program(question, message)
    if specific is None and code == 403:
        specific = _missing_right(question, message)
    if specific is not None:
        return specific
    sentence = f"{question}: {_sentence(question, code, message, status)}"
    refused = Refused(sentence, code, pause_seconds, message)
    row = passing_refusal(code, message, question.kind, question.subresource)
    # Of those that a server which has just started gives, the connection knows when to believe them.
    if row is not None and row.believed == "after a while":
        refused.again_seconds = row.seconds
    return refused


def _pause_wanted(status: dict[str, Any]) -> float:
    """Return the seconds without requests that a Status asks for."""
    seconds = (status.get("details") or {}).get("retryAfterSeconds")
    return float(seconds) if isinstance(seconds, int) else 0.0


def _no_program(question: ApiCall, message: str) -> NoProgram | None:
    """Return the error for a command that the pod's runtime could not start; None for any other refusal."""
    if match := _NO_PROGRAM.search(message):
        program = match["program"] or match["other"]
        return NoProgram(f"{question}: there is no program {program} in this pod", 127)
    if match := _NOT_EXECUTABLE.search(message):
        program = match["program"]
        return NoProgram(f"{question}: {program} is no program that may be started there", 126)
    return None


def _sentence(question: ApiCall, code: int, message: str, status: dict[str, Any]) -> str:
    """Return what a refusal means and what to do, by its code."""
    if code < 400:
        return f"something else than an API server answered ({code}): {message}"
    if code == 401:
        return "the cluster does not know who you are; log in again (your credentials may have expired)"
    if code == 403:
        return _forbidden(question, message)
    row = passing_refusal(code, message, question.kind, question.subresource)
    # A missing object is named in the details; a missing kind has none.
    is_no_object = not question.subresource and not (status.get("details") or {}).get("name")
    if code == 404 and question.kind.install and is_no_object:
        kind = question.kind
        return f"the cluster has no kind {kind.name} in {kind.api_version}; {kind.install}"
    if code == 404 and row is None:
        return f"not found in namespace {question.namespace}"
    if code == 409:
        if 'conflict with "' in message:
            return (
                f"{message}. Another tool has applied these fields, with other values: go on with that tool, or remove "
                "what it made (kubetune delete RUN; the results stay) and submit again"
            )
        return f"{message}; it was changed in the meantime"
    if code == 422:
        causes = (status.get("details") or {}).get("causes") or []
        reasons = []
        for cause in causes:
            # A policy objects to the object as a whole, and names no field.
            parts = [cause.get("field"), cause.get("message")]
            reasons.append(": ".join(part for part in parts if part))
        return f"the cluster refuses it as invalid: {'; '.join(reasons) or message}"
    if row is not None:
        return f"{row.meaning} ({code}): {message}; {row.advice}"
    return f"{message} ({code})"


def _forbidden(question: ApiCall, message: str) -> str:
    """Return what a 403 means that is not about rights: a quota, a policy, or an admission webhook."""
    if match := _QUOTA.search(message):
        return (
            f"quota {match['quota']} of namespace {question.namespace} is used up: {match['amounts']}; ask for less "
            "(compute.*, kubernetes.storage.*.size), wait until something ends, or have the quota raised"
        )
    if "violates PodSecurity" in message:
        return f"pod security of namespace {question.namespace} forbids it: {message.partition('violates ')[2]}"
    return f"forbidden: {message}"


def _missing_right(question: ApiCall, message: str) -> MissingRight | None:
    """Return the error for a right that no Role grants; None for any other refusal."""
    match = _CANNOT.search(message)
    if match is None:
        return None
    verb = match["verb"]
    group = match["group"]
    resource = match["resource"]
    title = f"{resource} in API group {group}" if group else resource
    sentence = (
        f"{question}: {match['user']} may not {verb} {title} in namespace {question.namespace}"
    )
    rule = {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
    return MissingRight(sentence, rule, question.namespace)


def missing_rights(errors: Sequence[MissingRight]) -> str:
    """Return what is not permitted, a line each, and one Role that grants all of it.

    may not get pods, may not list pods, may not list events
    →  rules: pods [get, list], events [list]
    """
    sentences = [error.sentence for error in errors]
    verbs: dict[tuple[str, str], dict[str, None]] = {}
    for error in errors:
        (group,) = error.rule["apiGroups"]
        (resource,) = error.rule["resources"]
        verbs.setdefault((group, resource), {}).update(dict.fromkeys(error.rule["verbs"]))
    # One rule for each resource, with all its verbs, is what a person would write.
    rules = []
    for (group, resource), allowed in verbs.items():
        rules.append({"apiGroups": [group], "resources": [resource], "verbs": list(allowed)})
    role = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": {"name": "kubetune-operator", "namespace": errors[0].namespace},
        "rules": rules,
    }
    advice = (
        "This Role, bound to them, grants it (kubernetes.operators in a run file makes one with all rights that "
        "kubetune needs)"
    )
    # Nobody may grant rights that they do not have themselves.
    if any(error.rule["apiGroups"] == [_RBAC] for error in errors):
        advice = (
            "Roles are for an administrator to make: one of them submits this run file once, or applies what `kubetune "
            "render` makes of kubernetes.operators, which you then leave out. The right to do it yourself would be"
        )
    text = ";\n".join(dict.fromkeys(sentences))
    return f"{text}. {advice}:\n{dump([role])}".rstrip()
