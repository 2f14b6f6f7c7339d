"""The reference of rows that are only evaluated: the base of a trained model."""

from __future__ import annotations

import transformers

from kubetune.data.prepared.rows import Rows
from kubetune.distributed.process_group import World
from kubetune.models.learner import Learner
from kubetune.models.loading import load_pretrained
from kubetune.models.model_spec import ModelSpec
from kubetune.plan.plan import Plan
from kubetune.tasks import causal_lm, vision_language
from kubetune.training.reference.scores import AskedForAnswers, scores


def ask_base(spec: ModelSpec, learner: Learner, rows: Rows, plan: Plan, world: World) -> None:
    """Set `reference` of rows that are only evaluated, by the base of a trained model.

    If every weight was trained, the base is loaded as a second model.
    """
    if spec.lora is None:
        task = causal_lm.TASK if spec.vision is None else vision_language.TASK
        model = load_pretrained(getattr(transformers, task.auto_class), spec, world.device)
        learner = task.learner_of(model, spec)
    rows.reference = scores(AskedForAnswers(), learner, {"eval": rows}, plan, world)["eval"]
