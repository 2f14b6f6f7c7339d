"""Conversions of what a run is called, where its numbers and its result go, and whose code it may run."""

from __future__ import annotations

import re
from typing import Any

from kubetune.plugins.importers.engine import Draft, Outcome, carried, dropped, near, unneeded
from kubetune.plugins.importers.readings import as_list

TRACKERS = ("mlflow", "wandb", "trackio")
REPOSITORY = r"[\w.-]+/[\w.-]+"


def hub_model(value: Any, _: Draft) -> Outcome:
    """Carry where the result is uploaded."""
    if re.fullmatch(REPOSITORY, str(value)):
        return carried(value)
    return dropped(f"push.repo wants ORG/NAME, found {value}")


def push(_: Any, draft: Draft) -> Outcome:
    """Upload the result where another key says where to."""
    if draft.get("hub_model_id"):
        return unneeded("follows from `push`, which hub_model_id sets")
    return dropped("no hub_model_id is given; set push.repo: ORG/NAME")


def run_name(value: Any, _: Draft) -> Outcome:
    """Make a name that Kubernetes accepts."""
    name = re.sub(r"[^a-z0-9]+", "-", str(value).lower()).strip("-")[:40].strip("-")
    if name == value:
        return carried(name)
    if name:
        return near(name, "lower case letters, digits and dashes, as Kubernetes wants")
    return dropped("holds no letter that a name may have")


def trackers(value: Any, draft: Draft) -> Outcome:
    """Switch on the trackers of `report_to`, or of verl's loggers `['console', 'wandb']`, each in its own section."""
    wanted = as_list(re.sub(r"[\[\]'\" ]", "", str(value)).lower())
    outcome = unneeded("no tracker; the run keeps its log in any case")
    # One key may switch on several: each is a note and a setting of its own, and the last outcome is the key's.
    for name in ("tensorboard", *TRACKERS):
        if name in wanted or (name == "tensorboard" and "all" in wanted):
            outcome = carried(True if name == "tensorboard" else None, path=f"tracking.{name}")
            draft.write(draft.at, outcome)
    known = ("tensorboard", *TRACKERS, "none", "all", "false", "console", "file")
    others = ", ".join(name for name in wanted if name not in known)
    if others:
        return dropped(
            f"kubetune has no {others}; it has TensorBoard, {', '.join(TRACKERS)} (tracking)"
        )
    return outcome


def remote_code(_: Any, draft: Draft) -> Outcome:
    """Carry the consent to code that comes with a model; ours needs a commit, for which no tool asks."""
    if re.fullmatch(r"[0-9a-f]{40}", str(draft.ours("model.revision"))):
        return carried(True)
    return dropped(
        "most models need no code of their own; where one does, set model.revision to a commit as well"
    )
