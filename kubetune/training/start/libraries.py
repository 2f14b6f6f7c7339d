"""The import of all that every run needs, whatever it learns: most of a start."""

from __future__ import annotations

from kubetune.base import collector


def import_libraries() -> None:
    """Import torch, transformers and what every run needs of them. Once they are there, it costs nothing."""
    with collector.paused():
        import transformers.generation.utils
        import transformers.modeling_utils  # noqa: F401

        from kubetune.data.prepared import identity, prepare, statistics  # noqa: F401
        from kubetune.plan import actuals  # noqa: F401
        from kubetune.training import judgement, train  # noqa: F401
