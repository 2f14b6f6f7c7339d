"""How soon kubetune says what is wrong: a row for each of many mistakes, with the seconds to its first and last word.

    python scripts/first_words.py              every mistake, in a folder of its own
    python scripts/first_words.py export       those whose command has this word

The goal on a quiet machine is 2 s. Each mistake also says whether the process that named it had imported torch, which
takes most of a second on a fast machine and many on a slow one; a test holds that it never has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

import kubetune
from kubetune.base.yaml_reader import read_file
from kubetune.config.load import load_config
from kubetune.rundir import checkpoints, exit_status
from kubetune.supervisor.run_folder import create_run_dir

MODEL = Path(kubetune.__file__).parent / "cli" / "local" / "embedded" / "model"
GOAL_SECONDS = 2.0

RUN = """\
name: first-words
model: {model}
data: {{train: {train}, max_length: 128, cache: cache}}
lora: {{r: 8}}
output: {output}
"""
GRPO = "task: grpo\nrewards: [{reward}]\n"

# Each command with a part of its last words.
MISTAKES = {
    "kubetune trian run.yaml": "train",
    "kubetune train none.yaml": "none.yaml",
    "kubetune train run.yaml training.learning_rate=fast": "learning_rate",
    "kubetune train run.yaml task=sft": "causal_lm",
    "kubetune train run.yaml data.train=trian.jsonl": "did you mean",
    "kubetune train run.yaml model=some/model": "hf download",
    "kubetune train run.yaml model=./modle": "no such folder",
    "kubetune train run.yaml lora.target_modules=[qproj]": "q_proj",
    "kubetune train run.yaml hooks.on_event=no-such-program": "no-such-program",
    "kubetune train run.yaml compute.gpus_per_node=9": "9 GPUs",
    "kubetune train run.yaml output=train.jsonl/run": "no folder",
    "kubetune train run.yaml data.max_length=8": "would be left out",
    "kubetune train bad.yaml": "bad.jsonl:41",
    "kubetune train untemplated.yaml": "chat_template",
    "kubetune train sees.yaml": "preprocessor_config.json",
    "kubetune train form.yaml": "is no reward function",
    "kubetune train answers.yaml": "no record has an answer",
    "kubetune train done.yaml": "is done since step 2",
    "kubetune train done.yaml training.seed=7": "another config",
    "kubetune plan run.yaml data.max_length=8": "would be left out",
    "kubetune plan run.yaml model=some/model": "hf download",
    "kubetune plan run.yaml lora.target_modules=[qproj]": "q_proj",
    "kubetune plan answers.yaml": "no record has an answer",
    "kubetune data check none.jsonl": "does not exist",
    "kubetune data check bad.yaml": "bad.jsonl:41",
    "kubetune init none.csv": "does not exist",
    "kubetune init train.jsonl --model some/model": "hf download",
    "kubetune export done --gguf q4": "one of bf16",
    "kubetune export done --quantize int3": "fp8",
    "kubetune export done --dtype int8": "bfloat16",
    "kubetune export done --checkpoint 9": "no checkpoint",
    "kubetune export begun": "no checkpoint",
    "kubetune evaluate done --data nope.jsonl": "does not exist",
    "kubetune evaluate done": "evaluation data",
    "kubetune evaluate begun": "no checkpoint",
    "kubetune generate begun hello": "no checkpoint",
    "kubetune generate done hello --temperature -1": "--temperature",
    "kubetune generate none hello": "no such folder",
    "kubetune chat begun": "no checkpoint",
    "kubetune chat done --beside begun": "no checkpoint",
    "kubetune report none": "no such folder",
    "kubetune watch none": "none",
    "kubetune submit run.yaml": "kubernetes",
}  # fmt: skip


def make_world(folder: Path) -> None:
    """Write the files that the commands name."""
    rows: list[Mapping[str, object]] = [
        {"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}."} for n in range(40)
    ]
    _write_rows(folder / "train.jsonl", rows)
    _write_rows(folder / "bad.jsonl", [*rows, {"word": "a"}])
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    _write_rows(folder / "talks.jsonl", [{"messages": talk}] * 40)
    _write_rows(folder / "asked.jsonl", [{"messages": talk[:1], "n": n} for n in range(40)])
    _write_rows(folder / "seen.jsonl", [{"image": "a.png", "prompt": "What?", "completion": "Red"}])
    shutil.copy(Path(__file__).parents[1] / "docs" / "images" / "demo.gif", folder / "a.png")
    (folder / "mine.py").write_text("def score(prompt, answer, reference, record): ...\n")

    bare = shutil.copytree(MODEL, folder / "bare")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    sees = shutil.copytree(MODEL, folder / "model")
    facts = json.loads((sees / "config.json").read_text())
    facts |= {"model_type": "qwen2_vl", "image_token_id": 5, "vision_config": {"patch_size": 14}}
    (sees / "config.json").write_text(json.dumps(facts))

    for name, train, model, more in (
        ("run", "train.jsonl", MODEL, ""),
        ("bad", "bad.jsonl", MODEL, ""),
        ("done", "train.jsonl", MODEL, ""),
        ("begun", "train.jsonl", MODEL, ""),
        ("untemplated", "talks.jsonl", bare, ""),
        ("sees", "seen.jsonl", sees, "task: vision_language\n"),
        ("form", "asked.jsonl", MODEL, GRPO.format(reward="{file: mine.py, function: score}")),
        ("answers", "asked.jsonl", MODEL, GRPO.format(reward="exact_match")),
    ):
        text = RUN.format(model=model, train=train, output=name if name != "run" else "out")
        (folder / f"{name}.yaml").write_text(text + more)
    _begin(folder, "begun")
    _begin(folder, "done")
    _end(folder / "done")


def _write_rows(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _begin(folder: Path, name: str) -> None:
    """Make the run directory of a run that has begun."""
    file = read_file(folder / f"{name}.yaml")
    config = load_config(file)
    create_run_dir(config, folder / name, source=file.text)


def _end(run_dir: Path) -> None:
    """Let a run directory look as if the run had ended, as far as is read before a model is loaded."""
    checkpoints.commit(run_dir, checkpoints.State(step=2), lambda folder: None)
    for name in ("best", "last"):
        checkpoints.link(run_dir, name, 2)
    (run_dir / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
    exit_status.write_exit_status(run_dir, exit_status.ExitStatus(0, exit_status.DONE, 2))


def measure(command: str, folder: Path) -> tuple[float, float, float, int, str]:
    """Run a command into a pipe; return the seconds to its first byte and to its end, CPU seconds, exit code, text."""
    words = [sys.executable, "-m", *command.split()]
    environ = os.environ | {"HF_HUB_OFFLINE": "1"}
    cpu = _cpu_seconds()
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    text = process.stdout.read(1)
    first = time.monotonic() - began
    text += process.stdout.read()
    code = process.wait()
    total = time.monotonic() - began
    return first, total, _cpu_seconds() - cpu, code, text.decode(errors="replace")


def _cpu_seconds() -> float:
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Print the table. Return 1 if a word came too late or was not said."""
    wanted = sys.argv[1:]
    late = 0
    print(
        f"{'first':>6} {'last':>6} {'CPU':>6} {'exit':>4}  command (seconds; load {os.getloadavg()[0]:.1f})"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_world(folder)
        for command, says in MISTAKES.items():
            if not all(word in command for word in wanted):
                continue
            first, total, cpu, code, text = measure(command, folder)
            remark = ""
            if says not in text:
                remark = f"   does not say {says!r}: {text[-200:]!r}"
            elif total > GOAL_SECONDS:
                remark = "   late"
            late += bool(remark)
            print(f"{first:6.2f} {total:6.2f} {cpu:6.2f} {code:4}  {command}{remark}", flush=True)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
