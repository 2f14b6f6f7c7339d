"""Functions of the user's that are passed to `train`: which of them a run can find, and what `on_event` is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import kubetune
from kubetune import errors
from kubetune.base import processes
from kubetune.config.schema.evaluation import OwnMetricsConfig
from kubetune.library.users_functions import RunFollower, with_metrics
from kubetune.rundir import metrics
from kubetune.scoring import own_functions

RUN: dict[str, Any] = {
    "model": "org/model",
    "data": {"train": "org/data", "eval": 0.1},
    "lora": {"r": 4},
}
SOURCE = "def {name}(prompt, answer, reference, record):\n    return 1.0\n"


def judged(prompt: str, answer: str, reference: str, record: dict[str, Any]) -> float:
    return float(answer == reference)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function of another file."""
    (tmp_path / "elsewhere.py").write_text(SOURCE.format(name="strict"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "elsewhere", raising=False)
    from elsewhere import strict  # type: ignore[import-not-found]

    return strict


def test_a_function_becomes_its_file_and_name_however_the_config_is_given() -> None:
    of_mapping = with_metrics(
        {**RUN, "training": {"metric_for_best_model": "eval_judged"}}, [judged]
    )
    assert of_mapping.evaluation.metrics == OwnMetricsConfig(file=__file__, functions=("judged",))
    assert of_mapping.evaluation.generate is not None
    assert with_metrics(of_mapping, [judged]) == of_mapping, (
        "the config of a run that goes on has them already"
    )
    assert with_metrics(kubetune.load_config(RUN), [judged]).evaluation == of_mapping.evaluation
    assert with_metrics(of_mapping, []) is of_mapping


def test_what_a_run_could_not_find_is_refused_before_anything_starts(other: Any) -> None:
    def inner(prompt: str, answer: str, reference: str, record: dict[str, Any]) -> float:
        return 1.0

    for wrong in (lambda *arguments: 1.0, inner, "text".count, len, other.__call__):
        with pytest.raises(
            errors.ConfigError, match="expected one defined at the top of a Python file"
        ):
            kubetune.train(RUN, metrics=[wrong])
    with pytest.raises(errors.ConfigError, match=r"elsewhere\.py; expected those of one file"):
        kubetune.train(RUN, metrics=[judged, other])
    with pytest.raises(errors.ConfigError, match=r"has evaluation\.metrics already"):
        kubetune.train(with_metrics(RUN, [judged]), metrics=[other])


def test_functions_that_are_called_here_need_a_name_and_the_arguments() -> None:
    def narrow(prompt: str) -> float:
        return 1.0

    with pytest.raises(errors.ConfigError) as caught:
        own_functions.named([lambda *arguments: 1.0, narrow])
    assert "expected a function that has a name" in caught.value.problems[0]
    assert (
        "narrow: too many positional arguments; expected narrow(prompt, "
        in caught.value.problems[1]
    )

    def half(prompt: str, answer: str, reference: str, record: dict[str, Any]) -> float:
        return 1 / len(answer)

    functions = own_functions.named([half])
    assert functions["half"]("", "ab", "", {}) == 0.5
    with pytest.raises(
        errors.ConfigError, match=r"(?s)half raised ZeroDivisionError.*return 1 / len\(answer\)"
    ):
        functions["half"]("", "", "", {})


def test_a_program_that_trains_when_it_is_read_for_its_functions_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"import kubetune\n{SOURCE.format(name='mine')}kubetune.train('run.yaml', metrics=[mine])\n"
    )
    monkeypatch.setenv(processes.AGENT_PID, "1")  # as in every process of a run
    with pytest.raises(
        errors.ConfigError,
        match=r'(?s)program\.py cannot be run.*below `if __name__ == "__main__":`',
    ):
        own_functions.load(OwnMetricsConfig(file=str(program), functions=("mine",)))


def line(step: int, **values: float) -> str:
    return json.dumps({"step": step, "loss": 1.0, **values}) + "\n"


def test_each_line_of_a_run_is_told_once_and_again_where_it_is_done_again(tmp_path: Path) -> None:
    path = tmp_path / metrics.METRICS
    path.write_text(line(1) + line(2))
    metrics.record_event(tmp_path, "exit")
    follower = RunFollower(tmp_path)
    assert list(follower.read()) == [], "what was there before"
    with metrics.MetricsLog(
        tmp_path, resume_step=1
    ) as log:  # puts a shorter file in the place of the old one
        metrics.record_event(tmp_path, "resume", step=1)
        log.write(2, {"loss": 0.5})
        metrics.record_event(tmp_path, "stop")
        assert [followed.get("event") or followed["loss"] for followed in follower.read()] == [
            "resume",
            0.5,
            "stop",
        ]
        log.write(2, {"eval_loss": 0.25})
        with path.open("a") as file:
            file.write(line(3)[:9])
        assert [followed["eval_loss"] for followed in follower.read()] == [0.25], (
            "a line that is not whole yet waits"
        )
    assert list(follower.read()) == []
