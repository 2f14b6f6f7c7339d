"""The garbage collector, paused while large libraries are imported.

A module's objects live as long as the process. The collector still walks through all of them again and again while
torch and transformers are imported, which takes about a second. Light: nothing here imports anything large.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Import within this block without collections. Later ones pass over what was imported here."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
