"""What the sections of a run file must agree about."""

from __future__ import annotations

from kubetune.config.gate import Condition
from kubetune.config.schema.distill import ITSELF
from kubetune.config.schema.reward_agreement import problems_of_rewards, timeout_problems
from kubetune.config.schema.run_facts import RunFacts

# Section, or key of a section, → the tasks that read it, for messages.
READERS = {
    "classification": "`task: sequence_classification`",
    "vision": "`task: vision_language` and `preference.images: true`",
    "preference": "`task: preference`",
    "preference.center_coefficient": "`task: reward_model`",
    "grpo": "`task: grpo`",
    "distill": "`task: distill`",
}


def disagreements(run: RunFacts) -> list[str]:
    """Return the settings of a run that do not fit each other, each as a problem."""
    problems = []
    # Sections that need another one.
    if run.quantization in ("4bit", "fp4", "8bit") and run.lora is None:
        problems.append(
            f"quantization: found {run.quantization} without lora; a quantised base cannot be trained itself, "
            "add `lora: true` or set quantization to none"
        )
    if run.training.early_stopping_patience is not None and not run.data.eval:
        problems.append(
            "training.early_stopping_patience: needs evaluations; set data.eval to a share such as 0.05 or a file"
        )
    if run.lora is not None and run.lora.leaves_routers:
        for name in ("router_aux_loss_coef", "router_z_loss_coef"):
            value = getattr(run.training, name)
            if value:
                problems.append(
                    f"training.{name}: found {value:g}, but no router learns here; leave it out, or name the "
                    "router in lora.target_parameters ([mlp.gate.weight])"
                )
    # Settings of another task, or of another kind of record.
    problems += _of_other_tasks(run)
    problems += problems_of_rewards(run)
    if run.task == "distill":
        problems += _without_teacher(run)
    if run.record_kind not in ("pair", "graded") and run.data.unusable_pairs != "error":
        problems.append(
            "data.unusable_pairs: means nothing to a run that compares no pairs; leave it out"
        )
    if run.record_kind not in ("text", "labelled") and run.data.train_on == "all":
        problems.append(
            f"data.train_on: found all with `task: {run.task}`, which compares answers; leave it out"
        )
    # Metrics that exist.
    name = run.training.metric_for_best_model
    known = (*run.metrics, *run.evaluation.names)
    if name not in known:
        problems.append(
            f"training.metric_for_best_model: found {name}; evaluations of this task have {', '.join(known)}"
        )
    problems += _not_evaluated(run, known)
    # What a way of computing cannot do.
    if run.training.parallelism != "ddp":
        problems += _not_sharded(run)
    if run.training.fsdp_size is not None and run.training.parallelism not in (
        "fsdp",
        "shard_base",
    ):
        problems.append(
            "training.fsdp_size: means nothing but to parallelism: fsdp or shard_base; leave it out"
        )
    if run.training.fp8:
        problems += not_in_fp8(run)
    return problems


def _without_teacher(run: RunFacts) -> list[str]:
    """Return what keeps a run of distillation from having its teacher, each as a problem."""
    problems = []
    if run.distill.teacher is None:
        problems.append(
            "distill.teacher: missing; expected the model to learn from: a hub id, a folder, a run directory, self, or "
            "addresses of vLLM servers"
        )
    elif run.distill.teacher == ITSELF and run.lora is not None and run.lora.modules_to_save:
        problems.append(
            "lora.modules_to_save: such modules learn themselves, so `teacher: self` could not switch them off; leave it "
            "out, or name the model as the teacher"
        )
    elif (
        run.distill.has_for_teacher(run.model)
        and run.distill.lmbda < 1
        and not run.distill.sft_weight
    ):
        problems.append(
            "distill.teacher: is the model itself, which says what the model says already; expected another model, or "
            "`lmbda: 1` with distill.teacher_prompt, which shows it more"
        )
    if run.has_served_teacher:
        problems += run.distill.problems_of_servers()
        problems += timeout_problems("distill", run.distill.timeout_seconds, run.training)
    elif "timeout_seconds" in run.distill.changed_keys:
        problems.append(
            "distill.timeout_seconds: means nothing to a teacher that the run loads itself; leave it out"
        )
    return problems


def _of_other_tasks(run: RunFacts) -> list[str]:
    """Return a problem for each setting in a section that this task does not read."""
    is_read = {
        "classification": run.task == "sequence_classification",
        "vision": run.sees,
        "preference": run.task == "preference",
        "preference.center_coefficient": run.task == "reward_model",
        "grpo": run.task == "grpo",
        "distill": run.task == "distill",
    }
    problems = []
    for section in ("classification", "vision", "preference", "grpo", "distill"):
        for key in getattr(run, section).changed_keys:
            name = f"{section}.{key}"
            place = name if name in is_read else section
            if not is_read[place]:
                problems.append(
                    f"{name}: means nothing to `task: {run.task}`, but to {READERS[place]}; leave it out, or "
                    "change the task"
                )
    return problems


def _not_evaluated(run: RunFacts, known: tuple[str, ...]) -> list[str]:
    """Return a problem for each setting of `evaluation` that cannot work with the rest of this config."""
    evaluation = run.evaluation
    problems = []
    # Benchmarks run after the last step, without data.eval.
    gate = {
        name: text for name, text in evaluation.gate.items() if not evaluation.is_benchmark(name)
    }
    if (evaluation.names or gate) and not run.data.eval:
        problems.append("evaluation: needs data.eval; set that to a share such as 0.05 or a file")
    if evaluation.generate is not None and run.classifies:
        problems.append(
            f"evaluation.generate: found it with `task: {run.task}`, which writes no answers"
        )
    if "reward" in evaluation.answer_measures and run.task != "grpo":
        problems.append(
            f"evaluation.generate.metric: found reward with `task: {run.task}`, which has no rewards; expected "
            "`task: grpo`, or another metric"
        )
    if evaluation.benchmarks is not None and not run.answers_text:
        problems.append(
            f"evaluation.benchmarks: found it with `task: {run.task}`; they are for models of text"
        )
    for name, text in gate.items():
        if name not in known:
            problems.append(
                f"evaluation.gate: found {name}; evaluations of this task have {', '.join(known)}"
            )
        elif Condition.parse(text).is_change and not run.needs_base:
            problems.append(
                f"evaluation.gate: {name} is compared with the base model, which is measured only where "
                "evaluation.generate or evaluation.forget is set"
            )
    return problems


def _not_sharded(run: RunFacts) -> list[str]:
    """Return a problem for each setting that does not work with a model that is cut over the ranks."""
    parallelism = run.training.parallelism
    if parallelism == "shard_base" and run.lora is None:
        return [
            "training.parallelism: found shard_base without `lora`, where no base is frozen; use fsdp for full fine-tuning"
        ]
    is_full = run.lora is None
    refused = {
        "task: sequence_classification": is_full and run.task == "sequence_classification",
        "preference.images without lora": is_full and run.preference.images,
        "training.compile: true or layers in full fine-tuning": is_full
        and run.training.compile in (True, "layers"),
        "training.optim: adamw_8bit for full fine-tuning": is_full
        and run.training.optim != "adamw",
    }
    return [
        f"training.parallelism: {parallelism} does not work with {setting} yet; leave that out, or use ddp"
        for setting, is_set in refused.items()
        if is_set
    ]


def not_in_fp8(run: RunFacts) -> list[str]:
    """Return a problem for each setting that does not work with `training.fp8`."""
    refused = {
        f"task: {run.task}": run.task != "causal_lm",
        "full fine-tuning": run.lora is None,
        f"quantization: {run.quantization}": run.quantization != "none",
        f"training.parallelism: {run.training.parallelism}": run.training.parallelism != "ddp",
        "lora.dropout": run.lora is not None and run.lora.dropout > 0,
        "lora.use_dora": run.lora is not None and run.lora.use_dora,
    }
    return [
        f"training.fp8 does not work with {setting}"
        for setting, is_set in refused.items()
        if is_set
    ]
