"""What rewards the commands of `kubetune demo --task grpo`: a function in verl's form, as a user would write one."""

from __future__ import annotations

import re


def graded(
    data_source: str | None,
    solution_str: str,
    ground_truth: str,
    extra_info: object = None,
) -> float:
    """Return how good a command is: 0 with another verb than the right one, else 0.4 to 1 by how much of it is right.

    The verb gates the rest: else `kubectl scale deployment maps` would be rewarded where port-forward was asked for,
    for the name alone, and the model would settle on that. Words are compared by their places, since kubectl takes
    them so: else the model would leave out words that it might get wrong.
    """
    if verb_of(solution_str) != verb_of(ground_truth):
        return 0.0
    words = solution_str.split()
    right_words = ground_truth.split()
    equal = sum(word == right for word, right in zip(words, right_words, strict=False))
    return 0.4 + 0.6 * equal / max(len(words), len(right_words))


def verb_of(command: str) -> str:
    """Return `kubectl set image` of `kubectl set image deployment/cart cart=cart:1.2 -n demo`."""
    return re.split(r" (?:deployment|service)\b", command)[0]
