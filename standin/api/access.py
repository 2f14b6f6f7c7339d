"""Rights of users. No token or `admin` may do everything; `sa:NAMESPACE:NAME` what RoleBindings grant that account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from standin.api.paths import Target
from standin.state.errors import ApiError, forbidden
from standin.state.objects import Object
from standin.state.resources import BY_KIND
from standin.state.store import Store

ADMIN = "admin"
_ACCOUNT = "system:serviceaccount:"


@dataclass(frozen=True)
class Action:
    """An action that a user wants to take."""

    verb: str
    group: str
    plural: str  # may end in `/subresource`
    namespace: str


def token_of(request: web.Request) -> str:
    """Return the token by which a request says whose it is, or that of the account for which the administrator speaks.

    Empty without one.
    """
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    account = request.headers.get("Impersonate-User", "")
    if token == ADMIN and account.startswith(_ACCOUNT):
        return account.replace(_ACCOUNT, "sa:")
    return token


def check(
    store: Store, token: str, verb: str, target: Target, take_refusal_at_start: Callable[[], bool]
) -> None:
    """Raise ApiError 403 unless the token's owner may do this.

    A server that has just started knows no Role: it refuses who needs one, as long as `take_refusal_at_start` says.
    """
    resource = target.resource
    if token not in ("", ADMIN) and take_refusal_at_start():
        raise _denied(token, verb, target, resource.plural)
    # Everybody may ask what they may do.
    if resource.kind == "SelfSubjectAccessReview":
        return
    plural = resource.plural
    if target.subresource:
        plural += f"/{target.subresource}"
    action = Action(verb, resource.group, plural, target.namespace)
    if not allowed(store, token, action):
        raise _denied(token, verb, target, plural)


def _denied(token: str, verb: str, target: Target, plural: str) -> ApiError:
    resource = target.resource
    what = resource.group_resource
    if target.name:
        what += f' "{target.name}"'
    user = _ACCOUNT + token.removeprefix("sa:")
    where = f'in API group "{resource.group}" in the namespace "{target.namespace}"'
    message = f'{what} is forbidden: User "{user}" cannot {verb} resource "{plural}" {where}'
    return forbidden(message, {"kind": resource.plural, "group": resource.group})


def allowed(store: Store, token: str, action: Action) -> bool:
    """True if some RoleBinding in the namespace grants an action to the owner of a token."""
    if token in ("", ADMIN):
        return True
    account = tuple(token.removeprefix("sa:").split(":"))
    for binding in store.list("RoleBinding", action.namespace):
        if not _binds(binding, account):
            continue
        role = store.get("Role", action.namespace, binding["roleRef"]["name"]) or {}
        if any(_grants(rule, action) for rule in role.get("rules", [])):
            return True
    return False


def _binds(binding: Object, account: tuple[str, ...]) -> bool:
    """True if a RoleBinding names a service account, which is (namespace, name)."""
    for subject in binding.get("subjects", []):
        name = (subject.get("namespace"), subject["name"])
        if subject["kind"] == "ServiceAccount" and name == account:
            return True
    return False


def _grants(rule: Object, action: Action) -> bool:
    """True if a rule of a Role covers an action."""
    wanted = {"verbs": action.verb, "apiGroups": action.group, "resources": action.plural}
    return all({"*", value} & set(rule.get(field, [])) for field, value in wanted.items())


def check_grant(store: Store, token: str, binding: Object) -> None:
    """Raise ApiError 404 for a RoleBinding without its Role.

    Who may not grant whatever they like is asked for the rights of the Role, so it has to be there.
    """
    if token in ("", ADMIN):
        return
    reference = binding["roleRef"]
    if reference["kind"] == "Role":
        namespace = binding["metadata"]["namespace"]
        store.require(BY_KIND["Role"], namespace, reference["name"])


def review(store: Store, token: str, body: Object) -> Object:
    """Answer a SelfSubjectAccessReview (`kubectl auth can-i`)."""
    asked = body["spec"].get("resourceAttributes", {})
    action = Action(
        asked.get("verb", ""),
        asked.get("group", ""),
        "/".join(filter(None, (asked.get("resource"), asked.get("subresource")))),
        asked.get("namespace", ""),
    )
    return {**body, "status": {"allowed": allowed(store, token, action)}}
