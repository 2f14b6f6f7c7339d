"""Every answer of an API server that is not a yes, as a sentence: what it means, and what to do about it.

Pure: what was asked and what came back go in, words come out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kubetune.base.yaml_text import dump
from kubetune.errors import EnvironmentFault
from kubetune.k8s.api.kinds import Kind

_CANNOT = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
)
_RBAC = "rbac.authorization.k8s.io"
_NOT_READY = "not yet ready to handle request"
# runc's and crun's words for a command that they cannot start.
_NO_PROGRAM = re.compile(
    r'exec: "(?P<program>[^"]+)": (?:executable file not found in \$PATH|.*no such file or directory)'
    r"|executable file [`'\"]?(?P<other>[^`'\"\s]+)[`'\"]? not found"
)
_NOT_EXECUTABLE = re.compile(r'exec: "(?P<program>[^"]+)": (?:.*permission denied|is a directory)')
_NAMESPACE = re.compile(r'namespaces "([^"]+)" not found')
_QUOTA = re.compile(r"exceeded quota: (?P<quota>[^,]+), (?P<amounts>.*)")


class ApiError(EnvironmentFault):
    """A request to the API server had no good end: it was refused, or nobody answered.

    `pause_seconds` is as long as the server asks to be spared.
    """

    def __init__(self, message: str, pause_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.pause_seconds = pause_seconds


class Refused(ApiError):
    """The API server said no. `code` is the HTTP status."""

    def __init__(self, message: str, code: int, pause_seconds: float = 0.0) -> None:
        super().__init__(message, pause_seconds)
        self.code = code


class MissingRight(Refused):
    """No Role grants what was asked. `rule` is the one that would."""

    def __init__(self, sentence: str, rule: dict[str, Any], namespace: str) -> None:
        self.sentence, self.rule, self.namespace = sentence, rule, namespace
        super().__init__(missing_rights([self]), 403)


class NoNamespace(Refused):
    """There is no namespace of that name, and so nothing else to be said."""


class Unreachable(ApiError):
    """The API server does not answer, or a connection to it broke."""


class NotLoggedIn(Unreachable):
    """The program that logs in fails, though it has worked before."""


class Distrusted(Unreachable):
    """The API server does not prove who it is."""


class NoProgram(Refused):
    """A container runs, and has no such program, or may not start it. `exit_code` is a shell's: 127 or 126."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, 500)
        self.exit_code = exit_code


def may_pass(error: Exception) -> bool:
    """True if the same request may succeed later: nobody answered, or the server or the node had a problem."""
    if isinstance(error, NoProgram):
        return False
    return isinstance(error, Unreachable) or (isinstance(error, Refused) and error.code >= 500)


def is_doubtful(code: int, message: str) -> bool:
    """True if an API server that has just started may refuse so, though it will know better in a moment.

    It checks rights and accounts before it has read them all, and says of admission that it is not ready yet.
    """
    if code == 401:
        return True
    return code == 403 and bool(_CANNOT.search(message) or _NOT_READY in message)


@dataclass(frozen=True)
class Question:
    """Request to the API server, as it is named to people."""

    verb: str
    kind: Kind
    namespace: str
    name: str = ""
    subresource: str = ""

    @property
    def path(self) -> str:
        """URL path of what is asked for; what is yet to be created has no name there."""
        name = "" if self.verb == "create" else self.name
        return self.kind.path(self.namespace, name, self.subresource)

    def __str__(self) -> str:
        what = f"{self.kind.name} {self.name}".strip()
        if self.verb == self.subresource:
            return f"{self.verb} in {what}"
        return f"{self.verb} {f'{self.subresource} of ' if self.subresource else ''}{what}"


def refusal(
    question: Question, code: int, status: dict[str, Any], pause_seconds: float = 0.0
) -> Refused:
    """Return the error for an answer: its HTTP code, and the Status object (or as much of it as there was)."""
    message = str(status.get("message") or "no reason was given")
    if found := _NAMESPACE.search(message):
        missing = f"there is no namespace {found[1]}; create it (kubectl create namespace {found[1]}) or give -n another"
        return NoNamespace(missing, code)
    if question.subresource == "exec" and (not_started := _no_program(question, message)):
        return not_started
    if code == 403 and (right := _missing_right(question, message)):
        return right
    sentence = f"{question}: {_sentence(question, code, message, status)}"
    return Refused(sentence, code, pause_seconds)


def _no_program(question: Question, message: str) -> NoProgram | None:
    """The error for a command that the pod's runtime could not start; None for any other refusal."""
    if missing := _NO_PROGRAM.search(message):
        program = missing["program"] or missing["other"]
        return NoProgram(f"{question}: there is no program {program} in this pod", 127)
    if refused := _NOT_EXECUTABLE.search(message):
        program = refused["program"]
        return NoProgram(f"{question}: {program} is no program that may be started there", 126)
    return None


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
        # A policy objects to the object as a whole, and names no field.
        listed = [
            ": ".join(filter(None, (cause.get("field"), cause.get("message")))) for cause in causes
        ]
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
    return f"forbidden: {message}"


def _missing_right(question: Question, message: str) -> MissingRight | None:
    """The error for a right that no Role grants; None for any other refusal."""
    match = _CANNOT.search(message)
    if match is None:
        return None
    group, resource = match["group"], match["resource"]
    where = f"{resource} in API group {group}" if group else resource
    sentence = f"{question}: {match['user']} may not {match['verb']} {where} in namespace {question.namespace}"
    rule = {"apiGroups": [group], "resources": [resource], "verbs": [match["verb"]]}
    return MissingRight(sentence, rule, question.namespace)


def missing_rights(errors: Sequence[MissingRight]) -> str:
    """Return what is not permitted, a line each, and one Role that grants all of it."""
    sentences = [error.sentence for error in errors]
    rules: list[dict[str, Any]] = []
    for error in errors:
        same = [rule for rule in rules if {**rule, "verbs": None} == {**error.rule, "verbs": None}]
        if not same:
            rules.append({**error.rule, "verbs": list(error.rule["verbs"])})
        elif error.rule["verbs"][0] not in same[0]["verbs"]:
            same[0]["verbs"] += error.rule["verbs"]
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
    if any(error.rule["apiGroups"] == [_RBAC] for error in errors):
        advice = (
            "Roles are for an administrator to make: one of them submits this run file once, or applies what `kubetune "
            "render` makes of kubernetes.operators, which you then leave out. The right to do it yourself would be"
        )
    text = ";\n".join(dict.fromkeys(sentences))
    return f"{text}. {advice}:\n{dump([role])}".rstrip()
