"""Every registered task has all that a task is asked for."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path

import pytest

import kubetune
from kubetune.tasks import TASKS
from kubetune.tasks.protocol import Task

MEMBERS = {name: member for name, member in vars(Task).items() if not name.startswith("_")}


@pytest.mark.parametrize("module", TASKS.values(), ids=TASKS)
def test_it_fulfils_the_protocol(module: str) -> None:
    task = import_module(module)
    assert isinstance(task.AUTO_CLASS, str)
    for name, member in MEMBERS.items():
        if inspect.isfunction(member):
            wanted, found = inspect.signature(member), inspect.signature(getattr(task, name))
            assert len(found.parameters) == len(wanted.parameters) - 1, name  # but for `self`


def test_nobody_asks_a_task_whether_it_has_something() -> None:
    asking = ("hasattr(task", "getattr(task,", "hasattr(run.task", "hasattr(self.task")
    for path in Path(kubetune.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        assert not any(words in text for words in asking), path
