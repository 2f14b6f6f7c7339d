"""Reward functions of the user's own, in the three forms that tools have (data/reward_forms).

This runs only in the reward process.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kubetune.data.reward_forms import NOT_HANDED_OVER, TRL, columns_of, form_of
from kubetune.scoring.rewards.request import Judgement, Request

Function = Callable[..., Any]


def load(path: Path, name: str) -> Function:
    """Return a function of a Python file, which may import files next to it. Raise ValueError if it has none."""
    # A file is run once, though several of its functions may be rewards.
    module = sys.modules.get(f"kubetune rewards {path}")
    if module is None:
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec = importlib.util.spec_from_file_location(f"kubetune rewards {path}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module  # dataclasses look their module up
        spec.loader.exec_module(module)

    function: Any = getattr(module, name, None)
    if function is None:
        raise ValueError(f"{path} has no function {name}")
    # ms-swift's rewards are classes: an object of them is called.
    if inspect.isclass(function):
        function = function()
    if not callable(function):
        what = type(function).__name__
        raise ValueError(
            f"{path}: {name} gives an object of {what}, which has no `__call__`; expected a function"
        )
    columns_of(inspect.signature(function), f"{path}: {name}")
    for code in (function, type(function).__call__):
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise ValueError(
                f"{path}: {name} is a generator, and its values are never read; expected a function that returns numbers"
            )
    return cast(Function, function)


def judge(
    function: Function,
    request: Request,
    reference: str | None,
) -> Judgement:
    """Return what a function says of the answers. Raise what it raises, and ValueError for what is no number."""
    form = form_of(
        inspect.signature(function).parameters, getattr(function, "__name__", "function")
    )
    metrics: dict[str, list[float]] = {}
    if form == TRL:
        values = _called(function, _trl_arguments(request, metrics))
    elif form == "solution_str":
        values = []
        for text in request.texts:
            values.append(_called(function, _verl_arguments(request, text, reference)))
    else:
        number = len(request.texts)
        prompt = _as_text(request.prompt)
        queries = [prompt + text for text in request.texts]
        # OpenRLHF's queries are whole texts.
        arguments = {
            "queries": queries,
            "prompts": [prompt] * number,
            "labels": [reference] * number,
        }
        values = _called(function, arguments)

    # OpenRLHF's functions return a dict; others return a list, a tensor or an array.
    if isinstance(values, Mapping):
        values = values.get("rewards", values.get("scores"))
    if hasattr(values, "tolist"):
        values = values.tolist()  # tensors and arrays
    if not isinstance(values, (list, tuple)) or len(values) != len(request.texts):
        raise ValueError(
            f"returned {_shown(values)}; expected a list of {len(request.texts)} numbers, one for each answer"
        )

    means = {}
    for name, logged in metrics.items():
        means[name] = sum(logged) / len(logged)
    return Judgement([_number(value) for value in values], metrics=means)


def _called(function: Function, arguments: dict[str, Any]) -> Any:
    values = function(**_accepted(function, arguments))
    # TRL's functions may be coroutines.
    if inspect.isawaitable(values):
        return asyncio.run(_awaited(values))
    return values


async def _awaited(values: Any) -> Any:
    return await values


def _trl_arguments(request: Request, metrics: dict[str, list[float]]) -> dict[str, Any]:
    """Return the arguments of TRL: every column as a list, with one item for each answer."""
    number = len(request.texts)

    def log_metric(name: str, value: float) -> None:
        metrics.setdefault(name, []).append(float(value))

    completions: list[Any] = []
    for text in request.texts:
        if request.is_chat:
            completions.append([{"role": "assistant", "content": text}])
        else:
            completions.append(text)

    columns = {}
    for key, item in request.record.items():
        # A column with the name of an argument is not handed over twice; TRL leaves these columns out too.
        if key not in NOT_HANDED_OVER:
            columns[key] = [item] * number

    state = SimpleNamespace(global_step=request.step, max_steps=request.max_steps)
    return {
        **columns,
        "prompts": [request.prompt] * number,
        "completions": completions,
        "completion_ids": [list(ids) for ids in request.ids],
        "trainer_state": state,
        "log_extra": lambda column, values: None,
        "log_metric": log_metric,
    }


def _verl_arguments(
    request: Request,
    text: str,
    reference: str | None,
) -> dict[str, Any]:
    """Return the arguments of verl, of one answer."""
    record = request.record
    # verl's own data have the right answer one level below.
    model = record.get("reward_model")
    truth = model.get("ground_truth", reference) if isinstance(model, Mapping) else reference
    return {
        "data_source": record.get("data_source"),
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": record.get("extra_info"),
    }


def _accepted(function: Function, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    # `**kwargs` takes all of them.
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content", "")) for message in prompt)


def _number(value: Any) -> float | None:
    """Return a reward as a number, None if a function could not judge."""
    if isinstance(value, Mapping):
        value = value.get("score")
    if value is None:
        return None
    number = float(value)
    if math.isinf(number):
        raise ValueError(f"returned {number}; expected a finite number, or None")
    # NaN is no judgement.
    return None if math.isnan(number) else number


def _shown(values: Any) -> str:
    text = repr(values)
    return text if len(text) <= 80 else text[:77] + "…"
