"""What rewards the commands of `kubetune demo --task grpo`: a function in verl's form, as a user would write one."""

from __future__ import annotations

import re
from difflib import SequenceMatcher


def graded(
    data_source: str | None,
    solution_str: str,
    ground_truth: str,
    extra_info: object = None,
) -> float:
    """Return how good a command is: 0 with another verb than the right one, else 0.4 to 1 by how much of it is right.

    The verb gates the rest: else `kubectl scale deployment maps` would be rewarded where port-forward was asked for,
    for the name alone, and the model would settle on that.
    """
    if verb_of(solution_str) != verb_of(ground_truth):
        return 0.0
    alike = SequenceMatcher(None, pieces_of(solution_str), pieces_of(ground_truth), autojunk=False)
    return 0.4 + 0.6 * alike.ratio()


def verb_of(command: str) -> str:
    """Return `kubectl set image` of `kubectl set image deployment/cart cart=cart:1.2 -n demo`."""
    return re.split(r" (?:deployment|service)\b", command)[0]


def pieces_of(command: str) -> list[str]:
    """Return words, pairs of digits and signs, so that a number of which half is right counts half."""
    return re.findall(r"[a-z]+|\d{1,2}|\S", command)
