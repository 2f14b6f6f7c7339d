"""What there is of a run's result: its point, its checkpoints, exports and pushes, and what one does with it next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kubetune.base.humanize import ago, counted, size
from kubetune.reporting.cards import Card
from kubetune.reporting.hero import hero
from kubetune.reporting.reading import RunRecord
from kubetune.ui.result.outcomes import Exported


def cards_of(
    run: RunRecord, exports: Sequence[Exported], pushes: Sequence[Mapping[str, Any]]
) -> list[Card]:
    """Return what there is, as cards."""
    cards = []
    point = hero(run)
    if point is not None:
        before = f"{point.value.before} → " if point.value.before else ""
        label = point.value.label[:1].upper() + point.value.label[1:]
        cards.append(Card(label, f"{before}{point.value.after}", point.sure))
    return [*cards, _checkpoint(run), _exported(exports), _pushed(pushes)]


def next_verb(exports: Sequence[Exported], pushes: Sequence[Mapping[str, Any]]) -> str:
    """Return what one does next: export what is not yet exported, then push it."""
    if exports and not any(push.get("ok") for push in pushes):
        return "push"
    return "export"


def _checkpoint(run: RunRecord) -> Card:
    """Return the checkpoint that verbs take."""
    kept = sorted(run.checkpoints, key=lambda checkpoint: checkpoint.step)
    if not kept:
        return Card("Checkpoint", "none", "the run has not saved one yet")
    best = [checkpoint for checkpoint in kept if "best" in checkpoint.links]
    chosen = (best or kept)[-1]
    which = "best" if best else "last"
    return Card(
        "Checkpoint", f"step {chosen.step:,}", f"{which} of {len(kept)}, {size(chosen.bytes)}"
    )


def _exported(exports: Sequence[Exported]) -> Card:
    """Return the newest export."""
    if not exports:
        return Card("Exported", "not yet")
    newest = exports[0]
    about = f"{_when(newest.time)}, {counted(len(exports), 'folder')}"
    return Card("Exported", newest.kind or "damaged", about)


def _pushed(pushes: Sequence[Mapping[str, Any]]) -> Card:
    """Return the newest push."""
    if not pushes:
        return Card("Pushed", "not yet")
    newest = pushes[0]
    place = str(newest.get("repo") or newest.get("url") or "")
    if not newest.get("ok"):
        return Card("Pushed", "refused", place)
    return Card("Pushed", place or "arrived", _when(newest.get("time")))


def _when(moment: Any) -> str:
    """Return how long ago something was; of a received folder, whatever it says instead of a time."""
    try:
        return ago(moment)
    except (TypeError, ValueError):
        return str(moment)[:20]
