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
    for the name alone, and the model would settle on that. Pieces are compared by their places: else the model would
    leave out what it might get wrong. In `cart=cart:1.2` each name and each number is a piece, so that each that is
    right is rewarded by itself.
    """
    if verb_of(solution_str) != verb_of(ground_truth):
        return 0.0
    pieces = pieces_of(solution_str)
    right_pieces = pieces_of(ground_truth)
    equal = sum(piece == right for piece, right in zip(pieces, right_pieces, strict=False))
    return 0.4 + 0.6 * equal / max(len(pieces), len(right_pieces))


def pieces_of(command: str) -> list[str]:
    """Return `kubectl, logs, deployment, cart, --tail, 5, -n, demo` of `kubectl logs deployment/cart --tail=5 -n demo`."""
    return re.split(r"[\s/=:.]", command.strip())


def verb_of(command: str) -> str:
    """Return `kubectl set image` of `kubectl set image deployment/cart cart=cart:1.2 -n demo`."""
    return re.split(r" (?:deployment|service)\b", command)[0]
