"""`kubetune rollouts`: the answers that a run by reward drew before a step, and how each was rewarded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import counted, visible
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.config.resolved import read_config
from kubetune.errors import ConfigError
from kubetune.rundir.rollout_files import weighted_sum

if TYPE_CHECKING:
    from kubetune.config.schema import RewardConfig
    from kubetune.training.rollouts.rollout_records import Group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="a run that draws answers",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="answers drawn by the weights after N steps (default: the newest)",
    )
    parser.add_argument(
        "--row",
        type=int,
        metavar="N",
        help="only the prompt of this row; without --step, at every step",
    )
    add_json(parser, "the answers as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Read the answers. Raise ConfigError for a run, a step or a row that has none."""
    from kubetune.training.rollouts import rollout_records

    config = read_config(args.run_dir)
    steps = rollout_records.steps_of(args.run_dir)
    if not steps:
        raise ConfigError(
            f"{args.run_dir} holds no answers; expected a run that draws them, such as `task: grpo`; this one "
            f"has `task: {config.task}`"
        )
    if args.step is not None and args.step not in steps:
        raise ConfigError(
            f"{args.run_dir} holds no answers drawn after {counted(args.step, 'step')}; it has those after "
            f"{steps[0]} to {steps[-1]}"
        )
    wanted = steps[-1:]
    if args.step is not None:
        wanted = [args.step]
    elif args.row is not None:
        wanted = steps
    facts = []
    for step in wanted:
        for group in rollout_records.read_groups(args.run_dir, step):
            if args.row is None or group.row == args.row:
                facts.append(_facts(step, group, config.rewards))
    if not facts:
        raise ConfigError(f"{args.run_dir}: no prompt of row {args.row} was answered then")

    def show() -> None:
        for of_group in facts:
            _show(of_group)

    return Answer(facts, show)


def _facts(step: int, group: Group, rewards: Sequence[RewardConfig]) -> dict[str, Any]:
    """Return a prompt with its answers, each with its reward: the weighted sum, and what makes it up."""
    weights = [(reward.title, reward.weight) for reward in rewards]
    answers = []
    for answer in group.answers:
        answers.append(
            {
                "text": answer.text,
                "reward": weighted_sum(answer.rewards, weights),
                "rewards": answer.rewards,
                "tokens": len(answer.ids),
                "is_cut": answer.is_cut,
                "logp": sum(answer.sampled),
            }
        )
    return {
        "step": step,
        "row": group.row,
        "prompt": group.text,
        "answers": answers,
        "errors": group.errors,
    }


def _show(facts: dict[str, Any]) -> None:
    print(f"step {facts['step']}, row {facts['row']}: {visible(facts['prompt'].strip())}")
    by_reward = sorted(
        facts["answers"],
        key=lambda answer: float("-inf") if answer["reward"] is None else answer["reward"],
        reverse=True,
    )
    for answer in by_reward:
        reward = "none" if answer["reward"] is None else f"{answer['reward']:.3g}"
        parts = []
        if len(answer["rewards"]) > 1:
            for name, value in answer["rewards"].items():
                parts.append(f"{name} {'none' if value is None else format(value, '.3g')}")
        if answer["is_cut"]:
            parts.append("cut off")
        note = f" ({', '.join(parts)})" if parts else ""
        print(f"  {reward:>6}  {visible(answer['text'].strip())}{note}")
    for name, error in facts["errors"].items():
        print(f"  {name} could not judge: {visible(error.splitlines()[-1])}")
    print()
