"""The date that chat templates write: fixed by the first start of a run, so that a resumed one reads the same text."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kubetune.config.schema import Config


def today() -> str:
    """The date of this day, here."""
    return date.today().isoformat()


def day_of(config: Config) -> str:
    """`data.date`; today where no start of the run has filled it in yet."""
    return config.data.date or today()


def dated(config: Config, first_start: Any) -> Config:
    """The config with the date that the run keeps: that of its first start, else its own, else today's.

    `first_start`: what was resolved then, None where this is it. One of a version that kept no date gets none.
    """
    known = None if first_start is None else (first_start.get("data") or {}).get("date")
    day = known or config.data.date or (None if first_start is not None else today())
    return config.model_copy(update={"data": config.data.model_copy(update={"date": day})})
