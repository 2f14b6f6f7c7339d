"""The user's functions that are passed to `train`, and how they reach the processes that call them.

A metric is called by rank 0, which is another process. It gets the file that defines the function and
its name; both are kept in the run's config, so that a run that is resumed calls it too. `on_event` is
called in this process, with the lines that the run writes into its directory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubetune.base.yaml_reader import FileText
from kubetune.config.load import load_config
from kubetune.config.resolved import load_resolved, resolved
from kubetune.config.schema import Config
from kubetune.errors import ConfigError
from kubetune.library.configs import ConfigLike, config_of
from kubetune.rundir.metrics import EVENTS, METRICS, follower, is_evaluation

# `function(prompt, answer, reference, record)`.
Metric = Callable[[str, str, str, dict[str, Any]], float]

# Events that say from which step a run continues.
BEGINNINGS: Final = {"start", "resume"}


def with_metrics(config: ConfigLike | FileText, functions: Sequence[Metric]) -> Config:
    """Return the config with these functions as `evaluation.metrics`.

    Raise ConfigError for functions that another process cannot import.
    """
    if not functions:
        return config_of(config)
    section = _named(functions)
    # A file or a mapping is read with the functions in it, so that one error names all problems.
    if not isinstance(config, Config):
        return load_config(config, flags={"evaluation.generate": {}, "evaluation.metrics": section})
    values = resolved(config)
    evaluation = values["evaluation"]
    if evaluation["metrics"] not in (None, section):
        raise ConfigError(
            f"metrics: the config has evaluation.metrics already, {evaluation['metrics']}"
        )
    evaluation["metrics"] = section
    evaluation["generate"] = evaluation["generate"] or {}  # metrics judge answers
    return load_resolved(values)


def _named(functions: Sequence[Metric]) -> dict[str, Any]:
    """Return the file and the names of functions, as a run file has them."""
    problems = []
    files = []
    names = []
    for function in functions:
        name = getattr(function, "__name__", "")
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        # A lambda has no identifier as a name, a notebook no file, and a method or an inner function
        # is not what the module has under its name.
        if not name.isidentifier() or file is None or getattr(module, name, None) is not function:
            problems.append(
                f"metrics: found {name or function!r}; the run has processes of its own, which find a function by its "
                "file and name: expected one defined at the top of a Python file and imported from there (in a "
                "notebook, `%%writefile my_metrics.py` makes a cell that file). No lambdas, inner functions or methods"
            )
        else:
            files.append(str(Path(file).absolute()))
            names.append(name)
    files = list(dict.fromkeys(files))
    if len(files) > 1:
        problems.append(
            f"metrics: found functions of {' and '.join(files)}; expected those of one file"
        )
    if problems:
        raise ConfigError(problems)
    return {"file": files[0], "functions": names}


class RunFollower:
    """Reads the lines that a run adds to metrics.jsonl and events.jsonl, each line once.

    A run that resumes from a checkpoint repeats steps; their lines are read again:

        metrics   step 1, 2, 3, 4                      3, 4, 5
        events    start, save at 2, …    resume from 2
    """

    def __init__(self, run_dir: Path) -> None:
        self._metrics = follower(run_dir / METRICS)
        self._events = follower(run_dir / EVENTS)
        # Lines of an earlier start are no news.
        self._seen = {_key(line) for line in self._metrics.read()}
        for _ in self._events.read():
            pass  # only new events count

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the new lines: how the run started, then what it measured, then its other events."""
        # Metrics are read first. If they follow a start, its event is then in the other file.
        lines = list(self._metrics.read())
        events = list(self._events.read())
        after_start = 0
        for number, event in enumerate(events, 1):
            if event.get("event") in BEGINNINGS:
                after_start = number
        for event in events[:after_start]:
            if event["event"] in BEGINNINGS:
                # Later steps come again.
                first_step = event.get("step", 0)
                self._seen = {key for key in self._seen if key[0] <= first_step}
            yield event
        for line in lines:
            if _key(line) not in self._seen:
                self._seen.add(_key(line))
                yield line
        yield from events[after_start:]


def _key(line: Mapping[str, Any]) -> tuple[int, bool]:
    """Return what tells lines apart: a step may have one line of training and one of evaluation."""
    return line.get("step", -1), is_evaluation(line)
