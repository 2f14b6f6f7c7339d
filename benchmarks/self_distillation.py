"""What a model forgets while it learns a task: from itself, shown the right answers, and by supervised fine-tuning.

    python -m benchmarks.self_distillation FOLDER [--seeds N …]

Chosen before the first run, so that the outcome decides nothing of it:

- the base: the demo's model, which chats about services in prose, after it has learnt to repeat commands too (without
  the requests that ask for them), since a teacher that is shown an answer has to be able to say it;
- the task: the demo's, a request in, a kubectl command out; 1,200 requests, of 100 others exact matches are counted;
- what is to be kept: 200 questions that are no requests, with the base's own greedy answers; measured is the loss of
  these answers (`eval_forget_loss`), and how many the model still gives to the letter;
- both learn by LoRA of rank 16 in 225 steps of 16 requests at a learning rate of 2e-3 with a cosine; the last weights
  count. Self-distillation draws one answer to each request, and compares the whole vocabulary with beta 1.

Results are printed as Markdown, and written to FOLDER/results.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubetune
from benchmarks.results import ROOT
from kubetune.rundir import metrics

# It lies beside the script that makes the demo's model.
sys.path.insert(0, str(ROOT / "scripts"))
world: Any = importlib.import_module("demo_world")

EMBEDDED = ROOT / "src" / "kubetune" / "cli" / "local" / "embedded"
STEPS = 225
KEPT = 200
BASE_ROWS = 8000
SHOWN = "Say it again: {answer}"


def main(argv: Sequence[str] | None = None) -> None:
    """Train the base once, then both ways with each seed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.self_distillation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="folder for data, models and runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = make_base(folder)
    questions = write_kept(folder)
    results = []
    for seed in args.seeds:
        for way in ("sft", "self"):
            results.append(measure(folder, base, way, seed, questions))
            (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print("| seed | learns | exact match | loss of the base's answers | of them still given |")
    print("|--:|---|--:|--:|--:|")
    for result in results:
        print(
            f"| {result['seed']} | {result['way']} | {result['exact_match']:.0%} | {result['forget_before']:.3f} → "
            f"{result['forget_after']:.3f} | {result['still_given']} of {KEPT} |"
        )


def chat(question: str, answer: str) -> dict[str, Any]:
    """Return a conversation of one question."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def train(run_file: Path, config: dict[str, Any]) -> Path:
    """Train, or go on with a run that is there. Return its directory."""
    run_dir = run_file.with_suffix("")
    run_file.write_text(json.dumps({**config, "output": str(run_dir), "compute": {"processes": 1}}))
    command = [sys.executable, "-m", "kubetune", "train", str(run_file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run_dir


def make_base(folder: Path) -> Path:
    """Return the model that both begin with: half of what it learns is prose as before, a quarter each are echoes."""
    rng = random.Random(3)
    rows: list[dict[str, Any]] = []
    while len(rows) < BASE_ROWS:
        kind = len(rows) % 4
        if kind < 2:
            question, answer = world.draw_piece(rng)
        elif kind == 2:
            question, answer = world.draw_echo(rng)
        else:
            service = rng.choice(world.SERVICES)
            allowed = [name for name in world.NAMESPACES if not world.is_held_out(service, name)]
            _, _, answer = world.fill_request(rng, rng.choice(world.INTENTS), service, allowed)
            question = SHOWN.format(answer=answer)
        if question:
            rows.append(chat(question, answer))
    config = {
        "model": str(EMBEDDED / "model"),
        "data": {"train": str(write_rows(folder / "base.jsonl", rows)), "max_length": 128},
        "training": {
            "num_train_epochs": 3,
            "global_batch_size": 32,
            "per_device_train_batch_size": 32,
            "learning_rate": 1e-3,
        },
    }
    run_dir = train(folder / "base.yaml", config)
    exported = folder / "base-model"
    if not exported.exists():
        kubetune.export(run_dir, out=exported, checkpoint="last")
    return exported


def write_kept(folder: Path) -> list[tuple[str, str]]:
    """Write what is to be kept, and return it: questions that are no requests, with the base's own answers."""
    rng = random.Random(4)
    questions = []
    for number in range(KEPT):
        question = world.draw_echo(rng)[0]
        if number % 2:
            question = rng.choice(world.QUESTIONS)[0].format(**world.note_slots(rng))
        questions.append(question)
    answers = kubetune.generate(folder / "base", questions, checkpoint="last", max_new_tokens=48)
    pairs = list(zip(questions, answers, strict=True))
    write_rows(folder / "kept.jsonl", [chat(*pair) for pair in pairs])
    return pairs


def measure(
    folder: Path, base: Path, way: str, seed: int, kept: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Train one way, and return what was learnt and what was forgotten."""
    config: dict[str, Any] = {
        "model": str(base),
        "data": {
            "train": str(EMBEDDED / "data" / "train.jsonl"),
            "eval": str(EMBEDDED / "data" / "heldout.jsonl"),
            "max_length": 128,
        },
        "lora": {"r": 16},
        "evaluation": {
            "generate": {"metric": "exact_match", "max_new_tokens": 40, "batch_size": 100},
            "forget": str(folder / "kept.jsonl"),
        },
        "training": {
            "max_steps": STEPS,
            "global_batch_size": 16,
            "per_device_train_batch_size": 16,
            "learning_rate": 2e-3,
            "eval_steps": 75,
            "seed": seed,
        },
    }
    if way == "self":
        config["task"] = "distill"
        config["distill"] = {
            "teacher": "self",
            "teacher_prompt": SHOWN,
            "max_completion_length": 40,
        }
    run_dir = train(folder / f"{way}-{seed}.yaml", config)
    lines = [line for line in metrics.read_metrics(run_dir) if "eval_forget_loss" in line]
    base_of_run = json.loads((run_dir / "base_evaluation.json").read_text())
    questions = [question for question, _ in kept]
    answers = kubetune.generate(run_dir, questions, checkpoint="last", max_new_tokens=48)
    return {
        "way": way,
        "seed": seed,
        "exact_match": lines[-1]["eval_exact_match"],
        "forget_before": base_of_run["metrics"]["eval_forget_loss"],
        "forget_after": lines[-1]["eval_forget_loss"],
        "still_given": sum(answer == of_base for answer, (_, of_base) in zip(answers, kept, strict=True)),
        "curve": [(line["step"], line["eval_exact_match"], line["eval_forget_loss"]) for line in lines],
    }  # fmt: skip


if __name__ == "__main__":
    main()
