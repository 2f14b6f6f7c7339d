"""Functions of the user's that are passed to `train`: how they reach the processes that call them.

A metric is called by rank 0, a process of its own: it goes there as the file that defines it and its name, which the
run keeps in its config, so that a run that goes on calls it too. `on_event` never leaves this process: it is told what
the run writes into its directory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubetune.base.yaml_reader import FileText
from kubetune.config.load import load_config, load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.configs import ConfigLike, config_of
from kubetune.rundir.metrics import EVENTS, METRICS, follower

Metric = Callable[[str, str, str, dict[str, Any]], float]
"""`function(prompt, answer, reference, record)`."""

BEGINNINGS: Final = {"start", "resume"}
"""Events by which a run says from which step it goes on."""


def with_metrics(config: ConfigLike | FileText, functions: Sequence[Metric]) -> Config:
    """The config with these functions as `evaluation.metrics`. Raises ConfigError for those that cannot be named."""
    if not functions:
        return config_of(config)
    section = _named(functions)
    if not isinstance(config, Config):
        return load_config(config, flags={"evaluation.generate": {}, "evaluation.metrics": section})
    values = resolved(config)
    if values["evaluation"]["metrics"] not in (None, section):
        raise ConfigError(
            f"metrics: the config has evaluation.metrics already, {values['evaluation']['metrics']}"
        )
    evaluation = {**values["evaluation"], "metrics": section}
    evaluation["generate"] = evaluation["generate"] or {}
    return load_resolved({**values, "evaluation": evaluation})


def _named(functions: Sequence[Metric]) -> dict[str, Any]:
    """The file and the names of functions, as a run file has them."""
    problems, places = [], list[str]()
    for function in functions:
        name, module = (
            getattr(function, "__name__", ""),
            sys.modules.get(getattr(function, "__module__", None) or ""),
        )
        file = getattr(module, "__file__", None)
        if not name.isidentifier() or file is None or getattr(module, name, None) is not function:
            problems.append(
                f"metrics: found {name or function!r}; the run has processes of its own, which find a function by its "
                "file and name: expected one defined at the top of a Python file and imported from there (in a "
                "notebook, `%%writefile my_metrics.py` makes a cell that file). No lambdas, inner functions or methods"
            )
        elif (path := str(Path(file).absolute())) not in places:
            places.append(path)
    if len(places) > 1:
        problems.append(
            f"metrics: found functions of {' and '.join(places)}; expected those of one file"
        )
    if problems:
        raise ConfigError(problems)
    return {"file": places[0], "functions": [function.__name__ for function in functions]}


class RunFollower:
    """Lines that a run adds to metrics.jsonl and events.jsonl from now on, each told once.

    What a run that goes on from a checkpoint does again is told again.
    """

    def __init__(self, run_dir: Path) -> None:
        self._metrics, self._events = follower(run_dir / METRICS), follower(run_dir / EVENTS)
        self._known = {_key(line) for line in self._metrics.read()}
        for _ in self._events.read():
            pass

    def read(self) -> Iterator[dict[str, Any]]:
        """The new lines: how the run began, what it measured, what became of it."""
        # Metrics are read first: the event by which a run began is then there, if it was before them.
        lines, events = list(self._metrics.read()), list(self._events.read())
        begun = max(
            (n for n, event in enumerate(events, 1) if event.get("event") in BEGINNINGS), default=0
        )
        for event in events[:begun]:
            if event["event"] in BEGINNINGS:
                self._known = {key for key in self._known if key[0] <= event.get("step", 0)}
            yield event
        for line in lines:
            if _key(line) not in self._known:
                self._known.add(_key(line))
                yield line
        yield from events[begun:]


def _key(line: Mapping[str, Any]) -> tuple[int, bool]:
    return line.get("step", -1), "eval_loss" in line
