"""The page to talk to runs on: one beside its base model, or two runs; as `kubetune chat --compare` or `--beside`."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kubetune.base import logs
from kubetune.errors import ConfigError
from kubetune.library.results import require_sampling
from kubetune.ui.site import Site, body_of, find_run, page, run_of, site_of
from kubetune.ui.talkers import MOST_MODELS

_LIMITS = {"messages": 400, "max_new_tokens": 4096}


def chat(request: Request) -> Response:
    """The page, for the runs that are chosen."""
    site = site_of(request)
    chosen = run_of(request) if request.query_params.get("dir") else None
    other = request.query_params.get("beside", "")
    beside = find_run(site, other) if other not in ("", "base") else None
    listed = [run for run in site.records.listed() if run["saved_step"] is not None]
    facts = {
        "title": "Chat",
        "listed": listed,
        "chosen": site.records.name_of(chosen) if chosen else "",
        "beside": other,
    }
    second = ["--beside", str(beside)] if beside else ["--compare"] * (other == "base")
    verb = shlex.join(["kubetune", "chat", str(chosen or "RUN"), *second])
    return page(request, "chat.html", verb, facts)


def stay(request: Request) -> Response:
    """The stream that a page keeps open while it is open: its models live as long."""
    site = site_of(request)
    run_dirs = _sides(site, request.query_params.getlist("dir"))
    return StreamingResponse(site.talkers.stay(run_dirs), media_type="text/event-stream")


def _sides(site: Site, names: Sequence[str]) -> list[Path]:
    if not 1 <= len(names) <= MOST_MODELS:
        raise ConfigError(f"dir: found {len(names)} runs; expected 1 to {MOST_MODELS}")
    return list(dict.fromkeys(find_run(site, name) for name in names))


async def say(request: Request) -> Response:
    """One turn: the answer of one side, as lines of JSON while it comes."""
    site, asked = site_of(request), await body_of(request)
    run_dir = find_run(site, str(asked.get("dir", "")))
    wanted = {
        "base": asked.get("base") is True,
        "messages": _messages(asked),
        "sampling": _sampling(asked),
    }

    async def lines() -> AsyncIterator[bytes]:
        async for part in site.talkers.get(run_dir).answer(wanted):
            yield logs.scrub(json.dumps(part)).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _messages(asked: Mapping[str, Any]) -> list[dict[str, str]]:
    turns = asked.get("messages")
    if not isinstance(turns, list) or not 1 <= len(turns) <= _LIMITS["messages"]:
        raise ConfigError(f"messages: expected a list of turns, from 1 to {_LIMITS['messages']}")
    if not all(_is_turn(turn) for turn in turns):
        raise ConfigError(
            "messages: expected turns of role system, user or assistant with a text as content"
        )
    return turns


def _is_turn(turn: Any) -> bool:
    if not isinstance(turn, dict) or turn.keys() != {"role", "content"}:
        return False
    return isinstance(turn["content"], str) and turn["role"] in ("system", "user", "assistant")


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        tokens = int(asked.get("max_new_tokens", 256))
        temperature = float(asked.get("temperature", 0))
        top_p = float(asked.get("top_p", 1))
        seed = int(asked.get("seed", 0))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError("max_new_tokens, temperature, top_p and seed: expected numbers") from None
    require_sampling(tokens, temperature, top_p)
    tokens = min(tokens, _LIMITS["max_new_tokens"])
    return {"max_new_tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
