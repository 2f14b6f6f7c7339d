"""The three forms that a reward function of the user's may have, told apart by the name of a parameter.

    completions     TRL, axolotl, ms-swift, unsloth   f(prompts, completions, **columns) -> a number for each answer
    solution_str    verl                              f(data_source, solution_str, ground_truth, extra_info) -> a number
    queries         OpenRLHF                          f(queries, prompts, labels) -> a number for each answer

Nothing is run here: a verdict on a run judges the text of the file in the same words as the reward process the function.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

FORMS: Final = (
    "f(prompts, completions, **columns) as TRL has it, f(data_source, solution_str, ground_truth, extra_info=None) as "
    "verl has it, or f(queries, prompts, labels) as OpenRLHF has it"
)


def form_of(parameters: Iterable[str], place: str) -> str:
    """Return the parameter that tells the form of a function. Raise ValueError for one in any other form."""
    names = list(parameters)
    # Each name belongs to one form only.
    for name in ("completions", "solution_str", "queries"):
        if name in names:
            return name
    raise ValueError(f"{place}({', '.join(names)}) is no reward function; expected {FORMS}")
