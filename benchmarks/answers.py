"""Answers and log-likelihoods beside those of stock transformers and of lm-evaluation-harness's own model.

    python -m benchmarks.answers [--repeats N] [--write]

One process with one thread asks the same model in each way in turn, so that what else runs on the machine counts for
all alike. CPU seconds are compared. Every way must give the same. Weights are random: such a model does not end by
itself, so it answers at full length each time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import models, table
from benchmarks.corpus import FIRST_WORD, Corpus, lengths
from benchmarks.harness import WORK
from benchmarks.results import ROOT, Results, open_results
from benchmarks.summary import grouped

PAGE = ROOT / "docs" / "evaluation.md"
NEW_TOKENS = 24  # of each answer
BATCH = 16
QUESTIONS = 32
SHOTS = 200  # tokens of examples in front of a question
ASKED = 60  # tokens of a question
CHOICES = 4
LABELS = {
    "kubetune": "kubetune, 16 at a time",
    "one by one": "`model.generate`, row by row",
    "batched": "`model.generate`, 16 at a time as they come, padded on the left",
    "harness": "lm-evaluation-harness, its Hugging Face model, 16 at a time",
}
TITLES = {
    "answers": f"{QUESTIONS} answers of {NEW_TOKENS} tokens",
    "answers, LoRA": "the same, with adapters on all linear layers",
    "choices": f"{QUESTIONS} questions of {ASKED} tokens, {CHOICES} choices of 1 to 12",
    "choices, 5 shots": f"the same behind {SHOTS} tokens of examples, choices of one token",
}
Way = Callable[[], Sequence[Any]]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is not measured yet, and show the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.answers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", choices=models.SHAPES, default="q32k")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the table into docs/evaluation.md"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = open_results(quick=False, fresh=args.fresh, subject="answers")
    folder = WORK / "models" / args.model
    models.make_model(args.model, folder)
    for case in TITLES:
        if case.startswith("answers"):
            ways = answering(folder, adapted=case.endswith("LoRA"))
        else:
            ways = choosing(folder, has_shots=case.endswith("shots"))
        measure(case, ways, args.repeats, results)
    text = render(results)
    print(text)
    if args.write:
        PAGE.write_text(table.fill(PAGE.read_text("utf-8"), text), "utf-8")


def measure(case: str, ways: Mapping[str, Way], repeats: int, results: Results) -> None:
    """Time every way, one after the other, `repeats` times."""
    for repeat in range(repeats):
        expected: Sequence[Any] | None = None  # what the first way of this repeat gives
        for way, ask in ways.items():
            key = {"case": case, "way": way, "repeat": repeat}
            if results.find("answers", key) is not None:
                continue
            start_cpu = time.process_time()
            start = time.perf_counter()
            answers = ask()
            cpu_seconds = time.process_time() - start_cpu
            seconds = time.perf_counter() - start
            if expected is None:
                expected = answers
            same = _same(answers, expected)
            results.add(
                "answers", key, {"cpu_seconds": cpu_seconds, "seconds": seconds, "same": same}
            )
            print(f"{case:<20} {way:<12} {cpu_seconds:8.2f} CPU-s", flush=True)


def _same(answers: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the share of equal answers, or the largest relative difference of log-likelihoods."""
    if isinstance(answers[0], float):
        return max(abs(a / b - 1) for a, b in zip(answers, expected, strict=True))
    equal = sum(a == b for a, b in zip(answers, expected, strict=True))
    return equal / len(answers)


def answering(folder: Path, *, adapted: bool) -> dict[str, Way]:
    """Return the ways to have the same questions answered, greedily."""
    from transformers import AutoModelForCausalLM

    from kubetune.config.schema import LoraConfig, ModelConfig
    from kubetune.config.schema.evaluation import GenerateConfig
    from kubetune.data.text.tokenizer import load_tokenizer
    from kubetune.distributed.process_group import World
    from kubetune.models.adapters.lora import add_lora
    from kubetune.models.learner import Learner
    from kubetune.models.padding_free import choose_attention
    from kubetune.scoring.asking import answer
    from kubetune.scoring.judge import Judge
    from kubetune.scoring.questions import Question

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapted:
        model = add_lora(model, LoraConfig(r=16), task_type="CAUSAL_LM", seed=0)
    stock: Any = model.eval()
    draw = random.Random(0)
    sizes = lengths(Corpus(rows=QUESTIONS, mean=100, longest=400))
    prompts = [[draw.randrange(FIRST_WORD, 30_000) for _ in range(size)] for size in sizes]
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": tokenizer.pad_id}

    def theirs(size: int) -> Sequence[str]:
        answers = []
        for start in range(0, len(prompts), size):
            part = prompts[start : start + size]
            longest = max(map(len, part))
            # Padded on the left, so that every row goes on at the same place.
            ids = torch.full((len(part), longest), tokenizer.pad_id)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(part):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            out = stock.generate(input_ids=ids, attention_mask=mask, **settings)
            for row_ids in out[:, longest:].tolist():
                answers.append(tokenizer.decode(row_ids).strip())
        return answers

    wanted = GenerateConfig(metric=("exact_match",), max_new_tokens=NEW_TOKENS, batch_size=BATCH)
    questions = [Question(row, tuple(ids), (5,)) for row, ids in enumerate(prompts)]
    judge = Judge(wanted, tokenizer, questions)

    def ours() -> Sequence[str]:
        learner = Learner(model, choose_attention(model))
        answers = answer(judge, learner, World(), lambda: False) or {}
        stock.eval().set_attn_implementation("sdpa")
        return [answers[row] for row in range(len(prompts))]

    return {"one by one": lambda: theirs(1), "batched": lambda: theirs(BATCH), "kubetune": ours}


def choosing(folder: Path, *, has_shots: bool) -> dict[str, Way]:
    """Return the ways to the log-likelihoods of the same choices."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kubetune.models.learner import Learner
    from kubetune.models.padding_free import choose_attention
    from kubetune.scoring.harness import log_likelihoods

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draw = random.Random(0)

    def ids(number: int) -> list[int]:
        return [draw.randrange(FIRST_WORD, 30_000) for _ in range(number)]

    # With examples in front, the choices are the same letters for every question, as in MMLU.
    shots = ids(SHOTS) if has_shots else []
    letters = [ids(1) for _ in range(CHOICES)]
    pairs: list[tuple[list[int], list[int]]] = []
    for _ in range(QUESTIONS):
        context = shots + ids(ASKED)
        for letter in letters:
            choice = letter if has_shots else ids(draw.randint(1, 12))
            pairs.append((context, choice))
    stock = HFLM(model, tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=BATCH)

    def theirs() -> Sequence[float]:
        model.set_attn_implementation("sdpa")
        requests = [((str(context), str(choice)), context, choice) for context, choice in pairs]
        return [value for value, _ in stock._loglikelihood_tokens(requests, disable_tqdm=True)]

    def ours() -> Sequence[float]:
        learner = Learner(model, choose_attention(model))
        return [value for value, _ in log_likelihoods(learner, pairs, stock.max_length)]

    return {"harness": theirs, "kubetune": ours}


def render(results: Results) -> str:
    """Return the measurements as a table: medians, and how many times as long as ours each way takes."""
    lines = ["| what | way | CPU seconds | beside ours |", "|---|---|---|---|"]
    medians = {}
    groups = grouped(results.measurements, ("case", "way"))
    for key, runs in groups.items():
        medians[key] = median(run["cpu_seconds"] for run in runs)
    for (case, way), seconds in medians.items():
        ratio = ""
        if way != "kubetune":
            ratio = f"{seconds / medians[case, 'kubetune']:.2f} ×"
        lines.append(f"| {TITLES[case]} | {LABELS[way]} | {seconds:.2f} | {ratio} |")
    machine = results.data["machine"]
    repeats = max(map(len, groups.values()))
    times = f"medians of {repeats}" if repeats > 1 else "measured once"
    head = f"{machine['cpu']}, one thread, {results.data['started'][:10]}; {times}:"
    return "\n".join([head, "", *lines])


if __name__ == "__main__":
    main()
