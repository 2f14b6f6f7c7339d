"""The page to chat with a run and its base model, or with two runs.

It shows what `kubetune chat --compare` and `--beside` do.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kubetune.base import logs
from kubetune.config.resolved import read_config
from kubetune.errors import ConfigError
from kubetune.library.results import require_sampling
from kubetune.ui.chat.opening import (
    ASKING,
    MOST_PROMPTS,
    first_of,
    questions_of,
    rows_to_classify,
    runs_to_talk_to,
)
from kubetune.ui.chat.talkers import MOST_MODELS
from kubetune.ui.chat.verdicts import verdict_html
from kubetune.ui.site import body_of, find_run, page, runs_of, site_of

# Limits of a question, which comes from a browser.
_MOST_TURNS = 400
_MOST_NEW_TOKENS = 4096


def chat(request: Request) -> Response:
    """Show the page, for the runs that are chosen."""
    site = site_of(request)
    listed, offered = runs_to_talk_to(site)
    asked_for = request.query_params.get("dir", "")
    name = asked_for or first_of(offered)
    beside = request.query_params.get("beside", "" if asked_for else "base")
    if not name:
        nobody = {"title": "Chat", "asking": "Chat", "offered": []}
        return page(request, "chat.html", "kubetune chat RUN", nobody)

    # The command line that does the same.
    run_dir = find_run(site, name)
    chosen = site.records.name_of(run_dir)
    if beside == chosen:
        beside = "base"
    words = ["kubetune", "chat", str(run_dir)]
    config = read_config(run_dir)
    verb = ASKING.get(config.task, "Chat")
    if verb != "Chat":
        words[1] = "generate"
        # The model before training has no classes of these data, and no rewards.
        beside = ""
    if beside == "base":
        words.append("--compare")
    elif beside:
        words += ["--beside", str(find_run(site, beside))]

    # A trial is offered where it was asked for.
    offered = [run for run in listed if run in offered or run["dir"] == chosen]
    questions = questions_of(run_dir) if verb == "Chat" else []
    most = MOST_PROMPTS
    if verb == "Classify" and isinstance(config.data.eval, tuple):
        questions = rows_to_classify(config.data.eval)
        most = 2 * MOST_PROMPTS  # a row of each of several classes
    # Of few questions half are left to be asked.
    examples = [asked for asked in questions[: max(1, len(questions) // 2)] if asked.after]
    examples = examples[:MOST_PROMPTS]
    facts = {
        "title": verb,
        "asking": verb,
        "listed": listed,
        "names": _names(listed, [chosen, beside]),
        "offered": offered,
        "chosen": chosen,
        "is_asked_for": bool(asked_for),
        "beside": beside,
        "examples": examples,
        "prompts": [asked for asked in questions if asked not in examples][:most],
    }
    return page(request, "chat.html", shlex.join(words), facts)


def _names(listed: Sequence[Mapping[str, Any]], others: Sequence[str]) -> dict[str, str]:
    """Return the name of each run by its directory. If two runs share a name, each is called by its directory."""
    counts = Counter(run["name"] for run in listed)
    names = {other: other for other in others}
    for run in listed:
        is_told_apart = run["name"] and counts[run["name"]] == 1
        names[run["dir"]] = run["name"] if is_told_apart else run["dir"]
    return names


def stay(request: Request) -> Response:
    """Return the stream that a page keeps open. Its models are held as long as it is open."""
    site = site_of(request)
    # Each is a process with a model in memory, so their number is limited.
    names = request.query_params.getlist("dir")
    if not 1 <= len(names) <= MOST_MODELS:
        raise ConfigError(f"dir: found {len(names)} runs; expected 1 to {MOST_MODELS}")
    return StreamingResponse(site.talkers.stay(runs_of(request)), media_type="text/event-stream")


async def say(request: Request) -> Response:
    """Return the answer of one model, as lines of JSON while it is generated."""
    site = site_of(request)
    body = await body_of(request)
    run_dir = find_run(site, str(body.get("dir", "")))
    # Everything is checked before the process of the model sees it.
    question = {
        "base": body.get("base") is True,
        "messages": _messages(body.get("messages")),
        "sampling": _sampling(body),
    }

    async def lines() -> AsyncIterator[bytes]:
        async for part in site.talkers.get(run_dir).answer(question):
            if "verdict" in part:
                part = {"html": verdict_html(part["verdict"])}
            yield logs.scrub(json.dumps(part)).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _messages(turns: Any) -> list[dict[str, str]]:
    """Return the conversation of a question. Raise ConfigError for anything but a list of turns."""
    if not isinstance(turns, list) or not 1 <= len(turns) <= _MOST_TURNS:
        raise ConfigError(f"messages: expected a list of turns, from 1 to {_MOST_TURNS}")
    if not all(_is_turn(turn) for turn in turns):
        raise ConfigError(
            "messages: expected turns of role system, user or assistant with a text as content"
        )
    return turns


def _is_turn(turn: Any) -> bool:
    """True for a message that a chat template can take."""
    if not isinstance(turn, dict) or turn.keys() != {"role", "content"}:
        return False
    return isinstance(turn["content"], str) and turn["role"] in (
        "system",
        "user",
        "assistant",
    )


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the answer is to be sampled. Raise ConfigError for numbers that make no sense."""
    try:
        # Texts of numbers are numbers too: a form sends texts.
        tokens = int(body.get("max_new_tokens", 256))
        temperature = float(body.get("temperature", 0))
        top_p = float(body.get("top_p", 1))
        seed = int(body.get("seed", 0))
    except (TypeError, ValueError, OverflowError):
        raise ConfigError("max_new_tokens, temperature, top_p and seed: expected numbers") from None

    require_sampling(tokens, temperature, top_p)
    return {
        "max_new_tokens": min(tokens, _MOST_NEW_TOKENS),
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
