"""The choices that the page offers for a run's result. One that does not fit has the verb's own reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from kubetune.config.resolved import read_config
from kubetune.errors import KubetuneError
from kubetune.plan.model_shapes import read_config as read_model_config
from kubetune.result.forms import FORMS
from kubetune.result.forms.form import QUANTIZE
from kubetune.result.forms.wanted import TrainedModel, WantedExport
from kubetune.result.gguf_files.families import known_family
from kubetune.result.gguf_files.weight_types import ADAPTER, TYPES
from kubetune.result.inference import requirements
from kubetune.rundir import checkpoints
from kubetune.scoring.comparison import require_answers

# The form of an export for which the verb needs no option.
PLAIN: Final = "plain"


@dataclass(frozen=True)
class Choice:
    """Something that can be chosen on the page, unless there is a `refusal`."""

    value: str
    label: str
    about: str = ""
    refusal: str = ""  # why it does not fit this run


def evaluations_of(run_dir: Path) -> list[Choice]:
    """Return what the run can be evaluated on."""
    config = read_config(run_dir)
    return [
        _choice(
            "own",
            "Its evaluation data",
            "Every metric of the task, as in training.",
            lambda: requirements.require_evaluation_data(config.data, run_dir),
        ),
        Choice("data", "Other data", "A file, or what a run file may have as data.train."),
        _choice(
            "base",
            "Answers, against the model before training",
            "Each metric with its 95 % interval, answers gained and lost, and p. No model is loaded: "
            "the evaluations of the training kept the answers.",
            lambda: require_answers(run_dir, 0),
        ),
        _choice(
            "benchmarks",
            "Benchmarks",
            "Tasks of lm-evaluation-harness.",
            lambda: requirements.require_benchmarks(
                run_dir, config.task, answers_text=config.answers_text
            ),
        ),
    ]


def forms_of(run_dir: Path, gguf_types: Sequence[Choice]) -> list[Choice]:
    """Return the forms that the run's model can be exported in. `gguf_types`: from `gguf_types_of`."""
    trained = TrainedModel.of(read_config(run_dir), run_dir)
    choices = pushed_forms_of(run_dir)
    for name, form in FORMS.items():
        if form.option == QUANTIZE:
            require = partial(form.require, trained, WantedExport(quantize=name))
            choices.append(_choice(name, form.label, form.about, require))
        elif name == "gguf":
            # If llama.cpp cannot run the model at all, every type is refused for the same reason.
            refusal = ""
            if all(choice.refusal for choice in gguf_types):
                refusal = gguf_types[0].refusal
            choices.append(Choice(name, form.label, form.about, refusal))
    return choices


def pushed_forms_of(run_dir: Path) -> list[Choice]:
    """Return the forms that the run's model can be pushed in."""
    trained = TrainedModel.of(read_config(run_dir), run_dir)
    plain = FORMS["model" if trained.lora is None else "adapter"]
    merged = FORMS["merged"]
    require = partial(merged.require, trained, WantedExport(merged=True))
    return [
        Choice(PLAIN, plain.label, plain.about),
        _choice("merged", merged.label, merged.about, require),
    ]


def gguf_types_of(run_dir: Path) -> list[Choice]:
    """Return the types of weights that a GGUF file can have, and `adapter`."""
    config = read_config(run_dir)
    trained = TrainedModel.of(config, run_dir)

    def require_family() -> None:
        # A model that was trained whole is described by its checkpoint.
        described = config.model.path
        if config.lora is None:
            described = str(checkpoints.choose(run_dir))
        # A base that is not on this machine is fetched by the verb, which refuses it for the same reason.
        facts = read_model_config(described, os.environ)
        if facts is not None:
            known_family(facts)

    # The family is the same for all types, so the model's files are read once.
    of_family = _choice("family", "", "", require_family).refusal
    choices = []
    for kind in TYPES:
        label = kind
        if kind == ADAPTER:
            label = "the adapter alone"
        require = partial(FORMS["gguf"].require, trained, WantedExport(gguf=kind))
        choice = _choice(kind, label, "", require)
        choices.append(replace(choice, refusal=choice.refusal or of_family))
    return choices


def _choice(value: str, label: str, about: str, require: Callable[[], Any]) -> Choice:
    """Return a choice that is refused with what `require` raises."""
    try:
        require()
    except KubetuneError as error:
        # Nothing was begun, so the page need not say that nothing was written.
        refusal = str(error).removesuffix(" Nothing was written.")
        return Choice(value, label, about, refusal)
    return Choice(value, label, about)
