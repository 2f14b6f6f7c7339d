"""The three forms that a reward function of the user's may have, told apart by the name of a parameter.

    completions     TRL, axolotl, ms-swift, unsloth   f(prompts, completions, **columns) -> a number for each answer
    solution_str    verl                              f(data_source, solution_str, ground_truth, extra_info) -> a number
    queries         OpenRLHF                          f(queries, prompts, labels) -> a number for each answer

Nothing is run here: a verdict on a run judges the text of the file in the same words as the reward process the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Final

FORMS: Final = (
    "f(prompts, completions, **columns) as TRL has it, f(data_source, solution_str, ground_truth, extra_info=None) as "
    "verl has it, or f(queries, prompts, labels) as OpenRLHF has it"
)
TRL: Final = "completions"
# By the form: what a function is given. TRL's get the columns of the record too.
_GIVEN: Final = {
    TRL: (
        "prompts",
        "completions",
        "completion_ids",
        "trainer_state",
        "log_extra",
        "log_metric",
    ),
    "solution_str": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "queries": ("queries", "prompts", "labels"),
}
# By the form: the parameter that gets the right answer, or None where a record has none.
RIGHT_ANSWER: Final = {"solution_str": "ground_truth", "queries": "labels"}
# Columns whose names are near those of arguments. TRL does not hand them over either.
NOT_HANDED_OVER: Final = frozenset({"prompt", "completion", "completion_ids"})


def form_of(parameters: Iterable[str], place: str) -> str:
    """Return the parameter that tells the form of a function. Raise ValueError for one in any other form."""
    names = list(parameters)
    # Each name belongs to one form only.
    for name in _GIVEN:
        if name in names:
            return name
    raise ValueError(f"{place}({', '.join(names)}) is no reward function; expected {FORMS}")


def columns_of(signature: inspect.Signature, place: str) -> tuple[str, ...]:
    """Return the columns that a function cannot be called without.

        f(completions, solution, level=None, **rest)   → ("solution",)

    Raise ValueError for a function in none of the forms, and for a parameter that its form gives nothing.
    """
    named = {}
    for name, parameter in signature.parameters.items():
        # `*completions` gets nothing by its name.
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            named[name] = parameter
    form = form_of(named, place)
    by_position = [name for name in named if named[name].kind is inspect.Parameter.POSITIONAL_ONLY]
    if by_position:
        raise ValueError(
            f"{place} takes {', '.join(by_position)} by position alone, and is called by names; leave out the `/` behind "
            f"{by_position[-1]}"
        )
    needed = []
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in _GIVEN[form]:
            needed.append(name)
    if form != TRL and needed:
        raise ValueError(
            f"{place} needs {', '.join(needed)}, which nothing gives it; expected {FORMS}"
        )
    return tuple(needed)
