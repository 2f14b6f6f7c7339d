"""Import what every run needs, whatever it learns. This takes most of a start's time."""

from __future__ import annotations

from kubetune.base import collector


def import_libraries() -> None:
    """Import torch, transformers and what every run needs of them. A second call costs nothing."""
    # Imports make many objects and no garbage, so the garbage collector would only cost time.
    with collector.paused():
        import transformers.generation.utils
        import transformers.modeling_utils  # noqa: F401

        from kubetune.data.findings import kept_data  # noqa: F401
        from kubetune.data.prepared import identity, prepare  # noqa: F401
        from kubetune.plan import actuals  # noqa: F401
        from kubetune.training import judgement, train  # noqa: F401
