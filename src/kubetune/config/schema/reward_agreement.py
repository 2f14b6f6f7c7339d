"""What a run file must agree about where answers are drawn and rewarded: `grpo`, `rewards` and their servers."""

from __future__ import annotations

from kubetune.config.schema.distill import ITSELF
from kubetune.config.schema.run_facts import RunFacts
from kubetune.config.schema.training import TrainingConfig
from kubetune.config.vllm import LORA_RANKS


def problems_of_rewards(run: RunFacts) -> list[str]:
    """Return the settings of a run that do not fit its rewards, each as a problem."""
    problems = _problems_of_samplers(run)
    if run.draws_answers:
        problems += _problems_of_prompts(run)
    if run.task != "grpo":
        if run.rewards:
            problems.append(
                f"rewards: mean nothing to `task: {run.task}`, but to `task: grpo`; leave them out, or change the task"
            )
        return problems
    if not run.rewards:
        problems.append(
            "rewards: missing; expected what rewards an answer, such as `rewards: [exact_match]` or a function of "
            "yours, `{file: rewards.py, function: solved}`"
        )
    titles = [reward.title for reward in run.rewards]
    for title in sorted({title for title in titles if titles.count(title) > 1}):
        problems.append(f"rewards: two are called {title}; give one of them another name")
    if run.rewards and not any(reward.weight for reward in run.rewards):
        problems.append("rewards: all weights are 0, so no answer is better than another")
    return problems + _problems_of_servers(run)


def _problems_of_prompts(run: RunFacts) -> list[str]:
    """Return the settings of data that prompts cannot have, each as a problem."""
    problems = []
    if run.data.overlong in ("truncate", "split"):
        problems.append(
            f"data.overlong: found {run.data.overlong} with `task: {run.task}`, whose prompts are asked whole; expected "
            "drop or error"
        )
    if run.training.global_batch_tokens is not None:
        problems.append(
            f"training.global_batch_tokens: `task: {run.task}` does not work with it where answers are drawn; leave it out"
        )
    return problems


def _problems_of_samplers(run: RunFacts) -> list[str]:
    """Return what is wrong with pods that draw answers, each as a problem."""
    kubernetes = run.kubernetes
    servers = run.grpo.servers
    if not run.has_samplers:
        if servers is not None and not servers.urls:
            return ["grpo.servers.urls: missing; expected addresses, or kubernetes.samplers"]
        return []
    assert kubernetes is not None
    problems = []
    if run.task == "distill":
        if run.distill.model in (None, ITSELF):
            problems.append(
                "kubernetes.samplers: serve the model that distill.teacher names; expected its hub id or a folder that pods "
                "see, or no such pods"
            )
    elif run.task != "grpo" or servers is None:
        problems.append(
            "kubernetes.samplers: draw for `task: grpo` with `grpo.servers: {}`, or are the teacher of `task: distill`; "
            "change the task, or leave the pods out"
        )
    elif servers.urls:
        problems.append(
            "grpo.servers.urls: kubernetes.samplers have addresses of their own; leave one of both out"
        )
    if kubernetes.kind not in ("jobset", "job"):
        problems.append(
            f"kubernetes.samplers: found kind {kubernetes.kind}; expected jobset or job, by which both groups of pods start "
            "and end together"
        )
    elif kubernetes.kind == "job" and kubernetes.queue is not None:
        problems.append(
            "kubernetes.queue: found kind job with kubernetes.samplers, which are two Jobs; Kueue lets each of them go by "
            "itself, so one may hold its GPUs and wait for the other. Expected kind jobset, of which Kueue lets all pods go "
            "together, or no queue"
        )
    return problems


def _problems_of_servers(run: RunFacts) -> list[str]:
    """Return the settings of a run that stock servers cannot draw answers for, each as a problem."""
    servers = run.grpo.servers
    if servers is None:
        return []
    problems = []
    if run.lora is None:
        problems.append(
            "grpo.servers: stock vLLM servers take new adapters, and no new weights of a whole model; set lora, or leave "
            "the servers out"
        )
    else:
        for key in ("use_dora", "modules_to_save", "target_parameters"):
            if getattr(run.lora, key):
                problems.append(
                    f"lora.{key}: vLLM takes no such adapter; leave it out, or leave grpo.servers out"
                )
        if run.lora.r > LORA_RANKS[-1]:
            problems.append(
                f"lora.r is {run.lora.r}; vLLM takes adapters of a rank of at most {LORA_RANKS[-1]}"
            )
    return problems + timeout_problems("grpo.servers", servers.timeout_seconds, run.training)


def timeout_problems(section: str, seconds: float, training: TrainingConfig) -> list[str]:
    """Return a problem if servers get as much time as waiting ranks, or more."""
    if seconds < training.timeout_seconds:
        return []
    return [
        f"{section}.timeout_seconds is {seconds:g}; expected less than training.timeout_seconds, "
        f"{training.timeout_seconds:g}, after which ranks that wait are ended"
    ]
