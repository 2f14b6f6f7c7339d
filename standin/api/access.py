"""Rights of users. No token or `admin` may do everything; `sa:NAMESPACE:NAME` what RoleBindings grant that account."""

from __future__ import annotations

from collections.abc import Callable

from standin.state.errors import ApiError, forbidden
from standin.state.objects import Object
from standin.state.resources import Target
from standin.state.store import Store

ADMIN = "admin"


def check(
    store: Store, token: str, verb: str, target: Target, is_starting: Callable[[], bool]
) -> None:
    """Raise ApiError 403 unless the token's owner may do this.

    While the server `is_starting` it knows no Role, and who needs one is refused.
    """
    resource, namespace, name = target.resource, target.namespace, target.name
    if token not in ("", ADMIN) and is_starting():
        raise _denied(token, verb, target, resource.plural)
    plural = f"{resource.plural}/{target.subresource}" if target.subresource else resource.plural
    if resource.kind != "SelfSubjectAccessReview" and not allowed(
        store, token, verb, resource.group, plural, namespace, name
    ):
        raise _denied(token, verb, target, plural)


def _denied(token: str, verb: str, target: Target, plural: str) -> ApiError:
    resource = target.resource
    what = f'{resource.group_resource} "{target.name}"' if target.name else resource.group_resource
    user = "system:serviceaccount:" + token.removeprefix("sa:")
    where = f'in API group "{resource.group}" in the namespace "{target.namespace}"'
    message = f'{what} is forbidden: User "{user}" cannot {verb} resource "{plural}" {where}'
    return forbidden(message, {"kind": resource.plural, "group": resource.group})


def allowed(
    store: Store, token: str, verb: str, group: str, plural: str, namespace: str, name: str | None
) -> bool:
    """Some RoleBinding in the namespace grants the verb; `plural` may end in `/subresource`."""
    if token in ("", ADMIN):
        return True
    account = tuple(token.removeprefix("sa:").split(":"))
    for binding in store.list("RoleBinding", namespace):
        subjects = [s for s in binding.get("subjects", []) if s["kind"] == "ServiceAccount"]
        if account not in [
            (subject.get("namespace", namespace), subject["name"]) for subject in subjects
        ]:
            continue
        role = store.get("Role", namespace, binding["roleRef"]["name"]) or {}
        if any(_grants(rule, verb, group, plural, name) for rule in role.get("rules", [])):
            return True
    return False


def _grants(rule: Object, verb: str, group: str, plural: str, name: str | None) -> bool:
    wanted = (("verbs", verb), ("apiGroups", group), ("resources", plural))
    named = not rule.get("resourceNames") or name in rule["resourceNames"]
    return named and all({"*", value} & set(rule.get(field, [])) for field, value in wanted)


def review(store: Store, token: str, body: Object) -> Object:
    """Answer a SelfSubjectAccessReview (`kubectl auth can-i`)."""
    asked = body["spec"].get("resourceAttributes", {})
    plural = "/".join(filter(None, (asked.get("resource"), asked.get("subresource"))))
    verb, group, namespace = (
        asked.get("verb", ""),
        asked.get("group", ""),
        asked.get("namespace", ""),
    )
    granted = allowed(store, token, verb, group, plural, namespace, asked.get("name"))
    return body | {"status": {"allowed": granted}}
