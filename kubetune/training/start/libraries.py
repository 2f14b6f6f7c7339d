"""The import of all that every run needs, whatever it learns: most of a start."""

from __future__ import annotations

from kubetune.base import fast_import


def import_libraries() -> None:
    """Import torch and transformers without what no run uses of them; once they are there, it costs nothing."""
    with fast_import.sparingly():
        from kubetune.data.prepared import identity, prepare, statistics  # noqa: F401
        from kubetune.models import patches
        from kubetune.planning import actuals  # noqa: F401

        fast_import.open_torch()
        patches.import_transformers()
        from kubetune.training import judgement, loop  # noqa: F401
