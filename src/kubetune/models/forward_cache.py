"""The cache that a forward of a model returns, and how the next forward takes it."""

from __future__ import annotations

from typing import Any

# `cache` since transformers 5.24. Before, and in the code that some models bring along, recurrent models had the third.
NAMES = ("cache", "past_key_values", "cache_params")


def cache_of(output: Any) -> dict[str, Any]:
    """Return the cache in the output of a forward, as the argument for the next one.

    Raise AttributeError if there is none: the model has no cache, or calls it otherwise.
    """
    # Not `getattr`, which warns of an older name that leads to the newer one.
    for name in NAMES:
        if output.get(name) is not None:
            return {name: output[name]}
    raise AttributeError(f"the model's forward returns no cache ({', '.join(NAMES)})")
