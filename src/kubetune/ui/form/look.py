"""A look at data that somebody chooses or has chosen: their first rows, what they seem to be for, and what suits them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.faults import known
from kubetune.config.data_files import without_sample
from kubetune.config.schema import SourceConfig
from kubetune.data.proposed.proposal import Proposal
from kubetune.data.proposed.proposing import propose
from kubetune.data.reading.record import Record
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.sources import read_source
from kubetune.errors import KubetuneError
from kubetune.ui.form.field_sentences import held_out
from kubetune.ui.form.fixes import for_data
from kubetune.ui.form.form_fields import TASKS
from kubetune.ui.form.suited import filled_in, free_name, suited_texts
from kubetune.ui.site import Site, act

# Rows, columns, and characters of a value.
_ROWS = 3
_MOST_COLUMNS = 8
_MOST_CHARACTERS = 200

# Other tasks that can use the same data, by the task that is proposed for them.
_ALSO_FOR = {"preference": ("reward_model",), "causal_lm": ("distill", "grpo")}


async def look(request: Request) -> Response:
    """Answer with the first rows of the data that are typed, and the task that they seem to be for."""
    return await act(request, _looked)


def _looked(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows, columns, what suits the fields that nobody has touched, and buttons for what else the data need."""
    values = body.get("values")
    seen: dict[str, Any] = {
        "columns": [],
        "rows": [],
        "about": "",
        "fixes": [],
        "filled": [],
        "held_out": "",
    }
    if not isinstance(values, dict):
        return seen
    touched = body.get("touched")
    typed = _typed(values, touched)
    is_new = isinstance(touched, list)
    if is_new:
        seen["suits"] = suited_texts(None, typed)
    seen["held_out"] = _held_out(values, seen, None)
    path = values.get("data.train")
    # Data of the hub would have to be fetched, and lists of sources have settings of their own.
    if not isinstance(path, str) or not os.path.exists(_file_of(path)):
        return seen
    source = SourceConfig(path=path)
    try:
        records = list(islice(read_source(source, Problems()), _ROWS))
        proposal = _proposal(source, typed.get("task"))
    except (KubetuneError, OSError) as error:
        refused = known(error)
        if refused is None:
            raise
        return {**seen, "problems": [str(refused).splitlines()[0]]}

    if is_new:
        suits = _suits(site, proposal, typed)
        seen["suits"] = suits
        seen["filled"] = filled_in(suits, typed)
        typed = {**typed, **suits}
    seen["held_out"] = _held_out(values, seen, proposal.rows)
    return {**seen, **_shown(records, proposal), "fixes": for_data(proposal, typed)}


def _typed(values: Mapping[str, Any], touched: Any) -> dict[str, Any]:
    """Return the fields that are somebody's choice: those that were touched, and always data and model."""
    # Without this list, every field is somebody's choice, as in a run that is repeated.
    if not isinstance(touched, list):
        return dict(values)
    return {key: values.get(key, "") for key in (*touched, "data.train", "model.path")}


def _proposal(source: SourceConfig, task: Any) -> Proposal:
    """Return what data seem to be for. `task`: the one that is typed, which such data may be for too."""
    proposal = propose(source)
    if task in _ALSO_FOR.get(proposal.task.value, ()):
        return propose(source, task)
    return proposal


def _suits(site: Site, proposal: Proposal, typed: Mapping[str, Any]) -> dict[str, str]:
    """Return what suits the fields that nobody has touched, with a name that no run has."""
    suits = suited_texts(proposal, typed)
    if "name" in suits and (site.folder / suits["name"]).exists():
        suits["name"] = free_name(site.folder, suits["name"])
    return suits


def _held_out(values: Mapping[str, Any], seen: Mapping[str, Any], rows: int | None) -> str:
    """Return of what the evaluation data are a share, as they are filled in."""
    text = seen.get("suits", {}).get("data.eval", values.get("data.eval"))
    return held_out(str(text), rows)


def _shown(records: Sequence[Record], proposal: Proposal) -> dict[str, Any]:
    """Return the first rows, and in words what they are for and what of them nothing reads."""
    columns: dict[str, None] = {}
    for record in records:
        columns |= dict.fromkeys(record.value)
    shown = list(columns)[:_MOST_COLUMNS]
    rows = [[_short(record.value.get(column)) for column in shown] for record in records]
    about = f"{TASKS[proposal.task.value]}: {proposal.task.reason}"
    if proposal.rows is not None:
        about = f"{proposal.rows:,} rows. {about}"
    if len(columns) > len(shown):
        about += f". The first {len(shown)} of {len(columns)} columns are shown"
    for sentence in proposal.unused:
        about += f". {sentence[0].upper()}{sentence[1:]}"
    return {"columns": shown, "rows": rows, "about": about}


def _file_of(path: str) -> str:
    """Return the file of a source."""
    return os.path.expanduser(without_sample(path))


def _short(value: Any) -> str:
    """Return a value of a record as a cell. Turns of a conversation have a line each: `user: How are you?`."""
    if isinstance(value, str):
        text = value
    elif _is_conversation(value):
        text = "\n".join(f"{turn['role']}: {turn.get('content')}" for turn in value)
    else:
        text = json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > _MOST_CHARACTERS:
        return text[:_MOST_CHARACTERS] + " …"
    return text


def _is_conversation(value: Any) -> bool:
    """True for a list of turns that name who speaks."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in value)
