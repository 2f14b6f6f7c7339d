"""Record the facts of a start before its first step: in the log, and as an event."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from kubetune.base import logs
from kubetune.batching.feed import evaluated
from kubetune.data.findings.checked import findings_of
from kubetune.data.prepared.prepare import Prepared
from kubetune.data.text.tokenizer import Tokenizer
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.models import patches, quantization
from kubetune.plan.linears import part_of, parts_line
from kubetune.plan.plan import Plan
from kubetune.training.optimizer.adamw import FlatAdamW


def gpu_name(world: World) -> str | None:
    """Return the name of this rank's GPU, None if it has none."""
    if world.device.type != "cuda":
        return None
    return torch.cuda.get_device_name(world.device)


def log_start(plan: Plan, world: World, data: Prepared, task: str) -> None:
    """Log what every log should begin with: ranks, data and batches."""
    # What torchrun or a cluster has set: the first thing to look at when ranks do not find each other.
    variables = [f"{name}={value}" for name, value in process_group.environment().items()]
    logs.DDP.info("%s, device %s", " ".join(variables) or "one process", world.device)

    rows = f"{len(data.train):,} rows"
    if data.eval is not None:
        rows += f", {len(evaluated(data.eval)):,} for evaluation"
    logs.DATA.info("%s, fingerprint %s", rows, data.fingerprint[:12])
    if data.labels is not None:
        logs.DATA.info("%s", data.labels)

    # What a person should know about the data is logged again at each start.
    for finding in findings_of(data):
        if finding.severity == "note":
            logs.DATA.info("%s", finding.line)
        else:
            logs.DATA.warning("%s", finding.line)

    logs.DATA.info("effective batch %s", plan.batch_text(task))


def log_model(learner: Any, optimizer: FlatAdamW) -> None:
    """Log how many parameters there are and are trained, and how sequences go through the model."""
    total = sum(quantization.count(parameter) for parameter in learner.model.parameters())
    trained = optimizer.size
    percent = 100 * trained / total
    logs.MODEL.info(
        "%s parameters, %s trained (%.3g %%)",
        f"{total:,}",
        f"{trained:,}",
        percent,
    )

    # Part of the model -> numbers of parameters, of the base and trained.
    of_base = Counter[str]()
    of_trained = Counter[str]()
    for name, parameter in learner.model.named_parameters():
        part = part_of(name)
        if ".lora_" not in name:
            of_base[part] += quantization.count(parameter)
        if parameter.requires_grad:
            of_trained[part] += parameter.numel()

    logs.MODEL.info("trained: %s", parts_line(of_trained, of_base))
    logs.MODEL.debug("trained: %s", ", ".join(optimizer.layout))

    if learner.route.padding_free:
        logs.MODEL.info(
            "padding-free packed batches of many sequences (self-check: %.1e)",
            learner.route.difference,
        )
        if learner.route.in_rows:
            logs.MODEL.info(
                "%s: sequences go as rows of padded batches, exact but slower, as no kernel here knows where they begin",
                ", ".join(learner.route.in_rows),
            )
    else:
        logs.MODEL.info("one sequence at a time: %s", learner.route.why_not)

    # Some patches may not apply to a newer transformers, which costs speed.
    why_slower = patches.why_slower()
    if why_slower:
        logs.MODEL.info("%s", why_slower)


def log_padding(tokenizer: Tokenizer, world: World) -> None:
    """Log it if EOS stands in for a pad token."""
    if world.is_main and not tokenizer.names_padding:
        logs.MODEL.info(
            "no pad token is named, so EOS is used where batches are filled up: in generation, and in what "
            "is saved or exported; training fills up nothing, so EOS is trained like any other token"
        )
