"""Every registered task is a whole one."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import kubetune
from kubetune.tasks import TASKS
from kubetune.tasks.task import Task


def test_a_task_without_a_method_that_it_needs_says_so() -> None:
    class Half(Task):
        auto_class = "AutoModel"

    with pytest.raises(NotImplementedError):
        Half().backward(None, None, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("module", TASKS.values(), ids=TASKS)
def test_a_task_has_its_class_and_all_methods_without_a_default(module: str) -> None:
    task = import_module(module).TASK
    assert isinstance(task, Task)
    assert task.auto_class.startswith("AutoModelFor")
    without_default = {
        "build",
        "with_adapters",
        "load",
        "plain_logits",
        "backward",
        "evaluate",
        "metrics",
    }
    for name in {*without_default, "sample_losses"}:
        assert getattr(type(task), name) is not getattr(Task, name), name


def test_nobody_asks_a_task_whether_it_has_something() -> None:
    asking = ("hasattr(task", "getattr(task,", "hasattr(run.task", "hasattr(self.task")
    for path in Path(kubetune.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        assert not any(words in text for words in asking), path
