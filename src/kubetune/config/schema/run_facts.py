"""What follows from several sections of a run file: defaults of a task, and what kind of run it is."""

from __future__ import annotations

from typing import Literal

from kubetune.config.metric_names import metrics_of
from kubetune.config.schema.data import SourceConfig
from kubetune.config.schema.distill import ITSELF
from kubetune.config.schema.grpo import GrpoConfig
from kubetune.config.schema.model import VisionConfig
from kubetune.config.schema.run_sections import RunSections

# Kinds of record that a task learns from.
#
# text: texts; labelled: texts with a label; pair: two answers, one of them better; graded: the same, with by how
# much; judged: answers that are each good or bad; prompt: prompts that the model itself answers.
RecordKind = Literal["text", "labelled", "pair", "graded", "judged", "prompt"]

# Sources of each split.
Sources = dict[Literal["train", "eval", "forget"], tuple[SourceConfig, ...]]

# Task → default learning rates for (adapters, all parameters), from TRL's scripts and LLaMA-Factory's examples.
#
# They are lower than those of supervised fine-tuning, since comparing answers pushes a model away from what it writes
# well.
LEARNING_RATES = {
    "preference": (5e-6, 5e-7),
    "reward_model": (1e-4, 1e-5),
    "grpo": (1e-5, 1e-6),
}


class RunFacts(RunSections):
    """The sections of a run, and what follows from them."""

    @property
    def learning_rate(self) -> float:
        """Return the learning rate, or the default of the task and method."""
        if self.training.learning_rate is not None:
            return self.training.learning_rate
        of_adapters, of_all_parameters = LEARNING_RATES.get(self.task, (2e-4, 1e-5))
        return of_adapters if self.lora else of_all_parameters

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return all metrics that evaluations of this task may have."""
        names = metrics_of(
            self.task, self.classification.problem_type, judged=self.record_kind == "judged"
        )
        if self.distill.teacher == ITSELF and self.lora is not None:
            # The model with its adapter off is asked about drawn answers alone.
            names = tuple(name for name in names if name != "eval_divergence")
        return names

    @property
    def task_name(self) -> str:
        """Return the name of the task in `tasks.TASKS`: pairs of answers about images are a task of their own."""
        return "vision_preference" if self.preference.images else self.task

    @property
    def classifies(self) -> bool:
        """True if a head judges each text by one of its tokens, instead of predicting tokens."""
        return self.task in ("sequence_classification", "reward_model")

    @property
    def sees(self) -> bool:
        """True if the model has a vision tower, so that the data may have images."""
        return self.task == "vision_language" or self.preference.images

    @property
    def answers_text(self) -> bool:
        """True if the model answers text with text: it neither classifies nor sees."""
        return not (self.classifies or self.sees)

    @property
    def sight(self) -> VisionConfig | None:
        """Return how the model sees images. None if it reads only text."""
        return self.vision if self.sees else None

    @property
    def record_kind(self) -> RecordKind:
        """Return the kind of record that the task learns from."""
        if self.task == "preference":
            return "judged" if self.preference.traits.judges else "pair"
        if self.draws_answers:
            return "prompt"
        kinds: dict[str, RecordKind] = {
            "sequence_classification": "labelled",
            "reward_model": "graded",
        }
        return kinds.get(self.task, "text")

    @property
    def draws_answers(self) -> bool:
        """True if the model learns from answers that are drawn to the prompts of the data."""
        return self.task == "grpo" or (self.task == "distill" and self.distill.lmbda > 0)

    @property
    def has_samplers(self) -> bool:
        """True if pods with vLLM run beside the trainer."""
        return self.kubernetes is not None and self.kubernetes.samplers is not None

    @property
    def has_served_teacher(self) -> bool:
        """True if the teacher is asked on servers, on a cluster at least."""
        return self.task == "distill" and (bool(self.distill.urls) or self.has_samplers)

    @property
    def teacher_path(self) -> str | None:
        """Return the path or hub id of the teacher. None without one, or if it is asked on servers."""
        if self.has_served_teacher:
            return None
        return self.model.path if self.distill.model == ITSELF else self.distill.model

    @property
    def drawing(self) -> GrpoConfig:
        """Return how answers are drawn."""
        return self.distill.drawing if self.task == "distill" else self.grpo

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the model with what it was before training."""
        return self.task == "preference" and self.preference.needs_reference

    @property
    def needs_base(self) -> bool:
        """True if the model before training is measured too, so that the run says whether it got better."""
        # What these tasks measure is read off rows that are evaluated anyway, so it costs one evaluation.
        tells = self.classifies or self.task in ("preference", "distill")
        return bool(self.evaluation.names) or (tells and bool(self.data.eval))

    @property
    def longest_row(self) -> int:
        """Return the tokens of the longest row that is allowed. A pair of answers is one row of two sequences."""
        if self.draws_answers:
            return self.data.max_length + self.drawing.max_completion_length
        sequences = 2 if self.record_kind in ("pair", "graded") else 1
        return sequences * self.data.max_length

    @property
    def uses_of_row(self) -> int:
        """Return how many steps of an epoch learn from each row: answers to a prompt may serve several."""
        return self.drawing.num_iterations if self.draws_answers else 1

    @property
    def sources(self) -> Sources:
        """Return the sources of each split. A share that is held out of training has none of its own."""
        data = self.data
        forget = self.evaluation.forget
        return {
            "train": data.train,
            "eval": data.eval if isinstance(data.eval, tuple) else (),
            "forget": forget.data if forget is not None else (),
        }
