"""Import what every run needs, whatever it learns. This takes most of a start's time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubetune.base import collector

if TYPE_CHECKING:
    from kubetune.tasks.task import Task


def import_libraries() -> None:
    """Import torch, transformers and what every run needs of them. A second call costs nothing."""
    # Imports make many objects and no garbage, so the garbage collector would only cost time.
    with collector.paused():
        import transformers.generation.utils
        import transformers.modeling_utils  # noqa: F401

        from kubetune.training import rank  # noqa: F401


def import_task(name: str, *, trains_adapter: bool) -> Task:
    """Return a task by `Config.task_name`, with all that it needs imported."""
    import_libraries()
    from kubetune.tasks import task_of

    with collector.paused():
        task = task_of(name)
        if trains_adapter:
            import peft  # noqa: F401
    return task
