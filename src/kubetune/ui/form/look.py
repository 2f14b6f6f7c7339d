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
    # Without this list, every field is somebody's choice, as in a run that is repeated.
    touched = body.get("touched")
    typed = dict(values)
    if isinstance(touched, list):
        typed = {key: values.get(key, "") for key in touched}
        typed["data.train"] = values.get("data.train", "")
        typed["model.path"] = values.get("model.path", "")
        seen["suits"] = suited_texts(None, typed)
    seen["held_out"] = _held_out(values, seen, None)
    path = values.get("data.train")
    # Data of the hub would have to be fetched, and lists of sources have settings of their own.
    if not isinstance(path, str) or not os.path.exists(_file_of(path)):
        return seen
    source = SourceConfig(path=path)
    try:
        records = list(islice(read_source(source, Problems()), _ROWS))
        proposal = propose(source)
        # Somebody may want another task that such data are for too.
        if typed.get("task") in _ALSO_FOR.get(proposal.task.value, ()):
            proposal = propose(source, typed["task"])
    except (KubetuneError, OSError) as error:
        refused = known(error)
        if refused is None:
            raise
        return {**seen, "problems": [str(refused).splitlines()[0]]}

    if isinstance(touched, list):
        suits = suited_texts(proposal, typed)
        if "name" in suits and (site.folder / suits["name"]).exists():
            suits["name"] = free_name(site.folder, suits["name"])
        seen["suits"] = suits
        seen["filled"] = filled_in(suits, typed)
        typed = {**typed, **suits}
    seen["held_out"] = _held_out(values, seen, proposal.rows)
    return {**seen, **_shown(records, proposal), "fixes": for_data(proposal, typed)}


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
