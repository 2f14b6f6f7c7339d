"""What a model forgets while it learns a task: from itself, shown the right answers, and by supervised fine-tuning.

    python -m benchmarks.self_distillation FOLDER [--tasks names]

Chosen before the first run, so that the outcome decides nothing of it:

- the base: the demo's model, which chats about services in prose, after it has learnt to answer as it is shown, with and
  without the request before what it is shown. Asked alone, it answers requests in prose, as before;
- the tasks: `places`, the service of a request in its namespace (`staging/cart`), and, of an earlier test, `commands` of
  kubectl. 1,200 requests to learn from, exact matches of 100 others in namespaces where the service is never in training.
  Then `owners`, which was added when the results of `places` were known: who looks after each of 60 services, exact
  matches of the same questions. There the teacher is shown a note and answers in its own words, as it did before, while
  it copies what it is shown for the other two. And `names`, which was added when the results of these three were known:
  the same questions, but the data hold the name alone, as people's labels do, while the base answers in sentences. An
  answer is right if it holds the name. Expected before its first run: fine-tuning teaches the model to answer in one
  word, also where nobody asked for that, and self-distillation does not;
- what is to be kept: 200 questions that are no requests, with the base's own greedy answers. Measured is the loss of
  these answers (`eval_forget_loss`), and how many the model still gives to the letter;
- three ways, each by LoRA of rank 16 in 225 steps of 16 requests with a cosine; the last weights count. `sft`;
  `self`, which draws one answer to each request and is judged by the base, shown request and answer (or note), over the
  whole vocabulary with beta 1; and `blind`, the same with a teacher that is shown the answer alone;
- the learning rate of `sft` and of `self` (and `blind`): of 5e-4, 1e-3 and 2e-3 the lowest with at least 90 % right
  answers to 100 further requests with a seed of 0, else the one with most. Forgetting has no part in it;
- self-distillation keeps more if its loss of the base's answers is below that of `sft` with each of the seeds 1, 2, 3.

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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import kubetune
from benchmarks.results import ROOT
from kubetune.rundir import metrics

# It lies beside the script that makes the demo's model.
sys.path.insert(0, str(ROOT / "scripts"))
world: Any = importlib.import_module("demo_world")

MODEL = ROOT / "src" / "kubetune" / "cli" / "local" / "embedded" / "model"
STEPS = 225
KEPT = 200
BASE_ROWS = 8000
COPIED = {"self": "{prompt}\n\nA good answer: {answer}", "blind": "A good answer: {answer}"}
NOTED = {"self": "{hint} {prompt}"}
SHOWN = {"places": COPIED, "commands": COPIED, "owners": NOTED, "names": NOTED}
RATES = (5e-4, 1e-3, 2e-3)
ENOUGH = 0.9
SEEDS = (1, 2, 3)


class Row(NamedTuple):
    """A question with its answer, and for a teacher a note that has the answer."""

    question: str
    answer: str
    hint: str = ""


def main(argv: Sequence[str] | None = None) -> None:
    """Train the base once, then each way with each seed, at the rate that a seed of its own chose."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.self_distillation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, help="folder for data, models and runs")
    parser.add_argument("--tasks", nargs="+", default=list(SHOWN))
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = make_base(folder)
    kept = write_kept(folder)
    results = []
    for task in args.tasks:
        rows = rows_of(task)
        for name, of_name in rows.items():
            write_rows(folder / f"{task}-{name}.jsonl", of_name)
        rates = {}
        for way in ("sft", "self"):
            rates[way] = choose_rate(folder, base, task, way)
        shown = {}
        for way, template in SHOWN[task].items():
            rates[way] = rates["self"]
            shown[way] = match_shown(folder, task, rows["choose"], template)
        count = len(rows["choose"])
        print(
            f"{task}: learning rates {rates}; the base, shown the answers, gives {shown} of {count}"
        )
        for seed in SEEDS:
            for way, rate in rates.items():
                result = measure(folder, base, task, way, rate, seed, kept)
                results.append({**result, "shown": shown.get(way)})
                (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(
        "| task | seed | learns | rate | right | loss of the base's answers | of them still given |"
    )
    print("|---|--:|---|--:|--:|--:|--:|")
    for result in results:
        print(
            f"| {result['task']} | {result['seed']} | {result['way']} | {result['rate']:g} | {result['right']:.0%} | "
            f"{result['forget_before']:.3f} → {result['forget_after']:.3f} | {result['still_given']} of {KEPT} |"
        )


def rows_of(task: str) -> dict[str, list[Row]]:
    """Return what is learnt, what is asked afterwards, and what is asked to choose the learning rate."""
    if task in ("owners", "names"):
        rows = draw_owners(by_name=task == "names")
        return {"train": rows, "test": rows, "choose": rows}
    return {
        "train": draw_task(task, 1, 1200, held_out=False),
        "test": draw_task(task, 2, 100, held_out=True),
        "choose": draw_task(task, 3, 100, held_out=True),
    }


def draw_owners(*, by_name: bool) -> list[Row]:
    """Return the question for each service but the first, whose note also names the owner of the service before it.

    `by_name`: the answer is the name alone.
    """
    rng = random.Random(6)
    owners = {service: rng.choice(world.PEOPLE) for service in world.SERVICES}
    rows = []
    for before, service in pairwise(world.SERVICES):
        answer = owners[service] if by_name else f"{owners[service]} looks after {service}."
        hint = f"{owners[before]} looks after {before} and {owners[service]} after {service}."
        rows.append(Row(f"Who looks after {service}?", answer, hint))
    return rows


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """Write conversations of one question each as JSON lines."""
    lines = []
    for row in rows:
        question = {"role": "user", "content": row.question}
        answer = {"role": "assistant", "content": row.answer}
        lines.append(json.dumps({"messages": [question, answer], "hint": row.hint}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def draw_request(rng: random.Random, held_out: bool) -> tuple[str, str, dict[str, str]]:
    """Draw a request, its answer in prose, and the right answer of each task."""
    service = rng.choice(world.SERVICES)
    names = [name for name in world.NAMESPACES if world.is_held_out(service, name) == held_out]
    namespace = rng.choice(names)
    intent = rng.choice(world.INTENTS)
    request, prose, command = world.fill_request(rng, intent, service, [namespace])
    return request, prose, {"places": f"{namespace}/{service}", "commands": command}


def draw_task(task: str, seed: int, count: int, held_out: bool) -> list[Row]:
    """Return different requests with their right answers."""
    rng = random.Random(seed)
    answers: dict[str, str] = {}
    while len(answers) < count:
        request, _, right = draw_request(rng, held_out)
        answers.setdefault(request, right[task])
    return [Row(*pair) for pair in answers.items()]


def train(run_file: Path, config: dict[str, Any]) -> Path:
    """Train, or go on with a run that is there. Return its directory."""
    run_dir = run_file.with_suffix("")
    run_file.write_text(json.dumps({**config, "output": str(run_dir), "compute": {"processes": 1}}))
    command = [sys.executable, "-m", "kubetune", "train", str(run_file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run_dir


def make_base(folder: Path) -> Path:
    """Return the model that all begin with: it learns prose as before, echoes, and to answer as it is shown."""
    rng = random.Random(5)
    rows: list[Row] = []
    while len(rows) < BASE_ROWS:
        kind = len(rows) % 4
        if kind < 2:
            question, answer = world.draw_piece(rng)
        elif kind == 2:
            question, answer = world.draw_echo(rng)
        else:
            question, prose, right = draw_request(rng, held_out=False)
            answer = rng.choice([prose, world.draw_echo(rng)[1], *right.values()])
            question = rng.choice(list(COPIED.values())).format(prompt=question, answer=answer)
        if question:
            rows.append(Row(question, answer))
    config = {
        "model": str(MODEL),
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


def write_kept(folder: Path) -> list[Row]:
    """Write what is to be kept, and return it: questions that are no requests, with the base's own answers."""
    rng = random.Random(4)
    questions = []
    for number in range(KEPT):
        question = world.draw_echo(rng)[0]
        if number % 2:
            question = rng.choice(world.QUESTIONS)[0].format(**world.note_slots(rng))
        questions.append(question)
    answers = kubetune.generate(folder / "base", questions, checkpoint="last", max_new_tokens=48)
    rows = [Row(*pair) for pair in zip(questions, answers, strict=True)]
    write_rows(folder / "kept.jsonl", rows)
    return rows


def metric_of(task: str) -> str:
    """Return the metric by which an answer is right."""
    return "contains" if task == "names" else "exact_match"


def match_shown(folder: Path, task: str, rows: Sequence[Row], template: str) -> int:
    """Return how many right answers the base gives which it is shown."""
    questions = []
    for row in rows:
        questions.append(template.format(prompt=row.question, answer=row.answer, hint=row.hint))
    answers = kubetune.generate(folder / "base", questions, checkpoint="last", max_new_tokens=48)
    if metric_of(task) == "contains":
        return sum(row.answer in answer for answer, row in zip(answers, rows, strict=True))
    return count_alike(answers, rows)


def count_alike(answers: Sequence[str], rows: Sequence[Row]) -> int:
    """Return how many answers are those of the rows."""
    return sum(answer == row.answer for answer, row in zip(answers, rows, strict=True))


def choose_rate(folder: Path, base: Path, task: str, way: str) -> float:
    """Return the lowest learning rate at which the task is learnt, else the one with most exact matches."""
    matches = {}
    for rate in RATES:
        run_dir = train_way(folder, base, task, way, rate, seed=0)
        matches[rate] = measured(run_dir)[f"eval_{metric_of(task)}"]
        if matches[rate] >= ENOUGH:
            return rate
    return max(matches, key=lambda rate: matches[rate])


def train_way(folder: Path, base: Path, task: str, way: str, rate: float, seed: int) -> Path:
    """Train in one way. Return the run directory."""
    requests = "test" if seed else "choose"
    config: dict[str, Any] = {
        "model": str(base),
        "data": {
            "train": str(folder / f"{task}-train.jsonl"),
            "eval": str(folder / f"{task}-{requests}.jsonl"),
            "max_length": 128,
        },
        "lora": {"r": 16},
        "evaluation": {
            "generate": {"metric": metric_of(task), "max_new_tokens": 40, "batch_size": 100},
            "forget": str(folder / "kept.jsonl"),
        },
        "training": {
            "max_steps": STEPS,
            "global_batch_size": 16,
            "per_device_train_batch_size": 16,
            "learning_rate": rate,
            "eval_steps": STEPS,
            "seed": seed,
        },
    }
    if way != "sft":
        config["task"] = "distill"
        config["distill"] = {
            "teacher": "self",
            "teacher_prompt": SHOWN[task][way],
            "max_completion_length": 40,
        }
    return train(folder / f"{task}-{way}-{rate:g}-{seed}.yaml", config)


def measured(run_dir: Path) -> dict[str, Any]:
    """Return the last evaluation of a run."""
    return [line for line in metrics.read_metrics(run_dir) if "eval_forget_loss" in line][-1]


def measure(
    folder: Path, base: Path, task: str, way: str, rate: float, seed: int, kept: Sequence[Row]
) -> dict[str, Any]:
    """Train one way, and return what was learnt and what was forgotten."""
    run_dir = train_way(folder, base, task, way, rate, seed)
    last = measured(run_dir)
    before = json.loads((run_dir / "base_evaluation.json").read_text())["metrics"]
    questions = [row.question for row in kept]
    answers = kubetune.generate(run_dir, questions, checkpoint="last", max_new_tokens=48)
    return {
        "task": task,
        "way": way,
        "seed": seed,
        "rate": rate,
        "right": last[f"eval_{metric_of(task)}"],
        "forget_before": before["eval_forget_loss"],
        "forget_after": last["eval_forget_loss"],
        "still_given": count_alike(answers, kept),
    }


if __name__ == "__main__":
    main()
