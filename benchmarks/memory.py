"""Compare the peak memory that `kubetune plan` foresees with what the same run then takes.

    python -m benchmarks.memory [--fresh] [--case NAME …]

Each case is a real `kubetune train` of a few steps over rows that are all as long as they may be, in processes of its
own. On a CPU the peak is the resident memory of a rank, Python included; on a GPU what torch allocated there. Other
programs on the machine do not change these numbers, only how long it takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks import models
from benchmarks.corpus import Corpus, token_pairs, token_rows, word, write_pairs, write_tokens
from benchmarks.flops import Shape
from benchmarks.harness import WORK, end_on_sigterm
from benchmarks.results import (
    FOLDER,
    ROOT,
    Results,
    describe_machine,
    read_results,
    source_digest,
)
from kubetune.base.files import write_atomic
from kubetune.rundir.machine import slug

SUITE = "memory"
STEPS = 3
ROWS = 64
WIDE = {"wide": Shape(1024, 12, 2816, 16, 8, 64, vocab_size=32_000)}

# Models of these kinds of transformers, with sizes of their own beside FAMILY.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "phi3": {"num_key_value_heads": 6},
    "gemma2": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 64_000,
        "num_hidden_layers": 4,
    },
    "gpt_neox": {"intermediate_size": 1536},
    "mistral": {"num_key_value_heads": 3},
    "llama": {"num_key_value_heads": 6},
    "opt": {"ffn_dim": 1536, "word_embed_proj_dim": 384},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 64},
    "roberta": {"intermediate_size": 1536},
    "stablelm": {"num_key_value_heads": 6},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 40_000,
        "num_hidden_layers": 5,
    },
    "granite": {"num_key_value_heads": 2, "logits_scaling": 8.0},
    "olmo2": {
        "num_key_value_heads": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "vocab_size": 16_000,
    },
    "cohere": {"num_key_value_heads": 3, "vocab_size": 32_000},
    "bert": {"intermediate_size": 1536},
    "helium": {"num_key_value_heads": 2, "head_dim": 64},
    "starcoder2": {"num_key_value_heads": 2, "intermediate_size": 1536},
}
FAMILY = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1152,
    "vocab_size": 24_000,
    "max_position_embeddings": 2_050,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A run whose memory is foreseen and measured."""

    model: str
    length: int  # tokens of each row
    batch: int  # rows at once
    settings: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    # Texts, pairs of answers, texts with labels, or questions about images of SIDE × SIDE pixels.
    rows: Literal["texts", "pairs", "labels", "images"] = "texts"
    shared: int = 0  # first tokens of a text that half of the others have too


LORA = {"lora.r": 16}
FSDP = {"training.parallelism": "fsdp"}
FP32 = {"model.dtype": "float32"}
BF16 = {"model.dtype": "bfloat16"}
FULL = {"training.max_steps": 6}
SIX = LORA | FULL
RECOMPUTES = {"training.gradient_checkpointing": "true"}
CLASSIFIES = {"task": "sequence_classification"}
SEES = {"task": "vision_language"}
EIGHT = {"training.global_batch_size": 8}
CASES = {
    "tiny-lora": Case("tiny", 64, 1, LORA),
    "lora": Case("q32k", 512, 1, LORA),
    "lora-batch-4": Case("q32k", 512, 4, LORA),
    "lora-batch-16": Case("q32k", 512, 16, LORA),
    "lora-recompute": Case("q32k", 512, 16, LORA | RECOMPUTES),
    "lora-bf16": Case("q32k", 512, 4, SIX | BF16),
    "lora-long": Case("q32k", 2048, 1, LORA),
    "full": Case("q32k", 512, 1),
    "full-batch-8": Case("q32k", 512, 8),
    "full-large-vocabulary": Case("q152k", 512, 1),
    "full-two-processes": Case("q32k", 512, 2, {}, 2),
    "full-fsdp": Case("q32k", 512, 2, FSDP, 2),
    "lora-fsdp": Case("q32k", 512, 2, LORA | FSDP, 2),
    "wide-full-fsdp": Case("wide", 256, 2, FSDP, 2),
    "wide-lora": Case("wide", 256, 4, LORA),
    "wide-full": Case("wide", 256, 2),
    "qwen2-lora-3x1024": Case("qwen2", 1024, 3, SIX),
    "qwen2-full-1x1024": Case("qwen2", 1024, 1, FULL),
    "phi3-lora-2x768": Case("phi3", 768, 2, SIX),
    "gemma2-full-2x384": Case("gemma2", 384, 2, FULL),
    "gpt-neox-lora-4x320": Case("gpt_neox", 320, 4, SIX),
    "mistral-fsdp-1x384": Case("mistral", 384, 1, FULL | FSDP, 2),
    "llama-full-recomputed-4x512": Case("llama", 512, 4, FULL | RECOMPUTES),
    "opt-full-6x200": Case("opt", 200, 6, FULL),
    "qwen3-full-8x192": Case("qwen3", 192, 8, FULL),
    "stablelm-lora-16x96": Case("stablelm", 96, 16, SIX),
    "llama-full-3x256": Case("llama", 256, 3, FULL | FP32),
    "qwen2-lora-2x512": Case("qwen2", 512, 2, SIX | FP32),
    "qwen3-lora-1x2048": Case("qwen3", 2048, 1, SIX | FP32),
    "phi3-full-1x640": Case("phi3", 640, 1, FULL | FP32),
    "gemma3-full-2x256": Case("gemma3_text", 256, 2, FULL | FP32),
    "mistral-lora-fsdp-2x256": Case("mistral", 256, 2, SIX | FSDP | FP32, 2),
    "gpt-neox-full-4x160": Case("gpt_neox", 160, 4, FULL | FP32),
    "granite-lora-2x384": Case("granite", 384, 2, SIX | FP32),
    "olmo2-full-bf16-2x320": Case("olmo2", 320, 2, FULL | BF16),
    "cohere-full-5x192": Case("cohere", 192, 5, FULL | FP32),
    "helium-full-fsdp-2x256": Case("helium", 256, 2, FULL | FSDP | FP32, 2),
    "bert-classifies-full-4x256": Case("bert", 256, 4, FULL | FP32 | CLASSIFIES, rows="labels"),
    "roberta-classifies-lora-16x96": Case(
        "roberta", 96, 16, SIX | FP32 | CLASSIFIES, rows="labels"
    ),
    "qwen2-lora-4bit-3x448": Case("qwen2", 448, 3, SIX | FP32 | {"quantization": "4bit"}),
    "q32k-lora-8bit-2x384": Case("q32k", 384, 2, SIX | FP32 | {"quantization": "8bit"}),
    "llama-lora-shared-3x640": Case("llama", 640, 3, SIX | FP32 | EIGHT, shared=512),
    "qwen3-full-shared-2x1024": Case("qwen3", 1024, 2, FULL | FP32 | EIGHT, shared=640),
    "llama-lora-dpo-2x320": Case(
        "llama", 320, 2, SIX | FP32 | {"task": "preference"}, rows="pairs"
    ),
    "starcoder2-full-3x288": Case("starcoder2", 288, 3, FULL | FP32),
    "gemma2-lora-bf16-4x224": Case("gemma2", 224, 4, SIX | BF16),
    "llama-lora-4bit-2x384": Case("llama", 384, 2, SIX | FP32 | {"quantization": "4bit"}),
    "qwen3-lora-8bit-4x192": Case("qwen3", 192, 4, SIX | FP32 | {"quantization": "8bit"}),
    "gemma3-sees-2x512": Case("gemma3", 512, 2, SIX | FP32 | SEES, rows="images"),
    "llava-sees-1x800": Case("llava", 800, 1, SIX | FP32 | SEES, rows="images"),
    "granite-lora-bf16-3x256": Case("granite", 256, 3, SIX | BF16),
}
# Of an image, in pixels. A token stands for 28 × 28 of them.
SIDE = 336
ENCODERS = ("bert", "roberta")
# Models that see, and tokens of the shortest rows that hold an image and some words.
SEEING = {"gemma3": 256, "llava": 640, "qwen2_5_vl": 256}
# Kinds of runs that `--draw` takes: a case of each.
DRAWN = ("full", "full", "lora", "lora", "lora", "4bit", "8bit", "classifies", "prefers", "sees")


def drawn(seed: int) -> dict[str, Case]:
    """Return a case of each kind, with model, method, dtype, recomputation, loss, length and batch by lot."""
    lot = random.Random(seed)
    cases = {}
    for kind in DRAWN:
        name, case = _draw(lot, kind)
        cases[name] = case
    return cases


def _draw(lot: random.Random, kind: str) -> tuple[str, Case]:
    # The order of the draws decides what a seed means. All are made, whether the kind needs them or not.
    decoders = sorted(FAMILIES.keys() - ENCODERS)
    names = {"sees": sorted(SEEING), "classifies": [*ENCODERS * 4, *decoders]}.get(kind, decoders)
    model = lot.choice(names)
    longest = {"classifies": 512, "prefers": 800}.get(kind, 1024)
    length = lot.randrange(SEEING.get(model, 96), longest + 1, 32)
    tokens = 2 * length if kind == "prefers" else length  # of a row
    batch = lot.randint(max(1, 1024 // tokens), max(1, 2560 // tokens))
    is_lora = kind != "full" and (kind in ("lora", "4bit", "8bit") or lot.random() < 0.6)
    dtype = lot.choice(("float32", "float32", "bfloat16"))
    recomputes = lot.random() < 0.2
    loss = lot.choice(("dpo", "ipo", "hinge", "robust", "orpo", "simpo", "cpo"))

    settings = (SIX if is_lora else FULL) | {"model.dtype": dtype}
    words = [model, "lora" if is_lora else "full"]
    rows: Any = {"classifies": "labels", "prefers": "pairs", "sees": "images"}.get(kind, "texts")
    if kind in ("4bit", "8bit"):
        settings |= {"quantization": kind}
        words.append(kind)
    elif kind == "prefers":
        settings |= {"task": "preference", "preference.loss": loss}
        if loss == "robust":
            settings["preference.label_smoothing"] = 0.1
        words.append(loss)
    elif kind == "classifies":
        settings |= CLASSIFIES
        words.append(kind)
    elif kind == "sees":
        settings |= SEES
        words.append(kind)
    if recomputes:
        settings |= RECOMPUTES
        words.append("recomputed")
    if dtype == "bfloat16":
        words.append("bf16")
    words.append(f"{batch}x{length}")
    return "-".join(words), Case(model, length, batch, settings, rows=rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the file of today does not hold yet, with a line for each."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{SUITE}", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--case", nargs="+", choices=CASES, help="left out: all")
    parser.add_argument("--draw", type=int, metavar="SEED", help="ten cases drawn by lot instead")
    parser.add_argument(
        "--fresh", action="store_true", help="replace today's results instead of going on with them"
    )
    parser.add_argument(
        "--foresee", action="store_true", help="keep what was measured, and foresee it anew"
    )
    args = parser.parse_args(argv)
    models.SHAPES.update(WIDE)
    end_on_sigterm()
    results = open_memory_results(fresh=args.fresh)
    if args.draw is not None:
        cases = drawn(args.draw)
    else:
        cases = {name: CASES[name] for name in args.case or CASES}
    for name, case in cases.items():
        measurement = results.find(SUITE, {"case": name})
        if measurement is None:
            measurement = measure(name, case)
            results.add(SUITE, {"case": name}, measurement)
        elif args.foresee and "failed" not in measurement:
            results.measurements.remove(measurement)
            measurement |= foresee(settings_of(case), measurement["measured_bytes"])
            results.measurements.append(measurement)
            write_atomic(results.path, json.dumps(results.data, indent=1) + "\n")
        print(line(name, measurement), flush=True)


def open_memory_results(*, fresh: bool) -> Results:
    """Return today's file of this machine. Small changes of the code hardly change memory, so they begin no new one."""
    machine = describe_machine()
    path = FOLDER / f"{datetime.now(UTC):%Y-%m-%d}-{slug(machine)}-memory.json"
    if path.exists() and not fresh:
        return read_results(path)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Results(
        path,
        {"started": started, "machine": machine, "source": source_digest(), "measurements": []},
    )


def settings_of(case: Case) -> dict[str, Any]:
    """Return the settings of a case. Make its model and rows if they are not there."""
    folder = WORK / SUITE
    settings = _common_settings(case, folder)
    if case.rows == "images":
        seeing = write_seeing(folder / case.model, case.model, case.length)
        return settings | seeing | case.settings
    model = folder / "models" / case.model
    settings["model"] = model
    if case.model in FAMILIES:
        sizes = FAMILY | FAMILIES[case.model]
        models.make_family(case.model, sizes, model)
        settings["model.tokenizer"] = model / models.WORDS
        vocab_size = sizes["vocab_size"]
    else:
        models.make_model(case.model, model)
        vocab_size = models.SHAPES[case.model].vocab_size

    kind = "" if case.rows == "texts" and not case.shared else f"{case.rows}-{case.shared}"
    data = folder / f"{case.model}-{case.length}{kind}.jsonl"
    settings["data.train"] = data
    if not data.exists():
        length = case.length - case.shared  # of what a row has for itself
        corpus = Corpus(
            ROWS,
            mean=length,
            sigma=0,
            shortest=length,
            longest=length,
            shared=case.shared,
            beginnings=2,
        )
        write_rows(data, case, corpus, vocab_size)
    return settings | case.settings


def _common_settings(case: Case, folder: Path) -> dict[str, Any]:
    return {
        "data.max_length": case.length,
        "data.cache": folder / "cache",
        "training.max_steps": STEPS,
        "training.per_device_train_batch_size": case.batch,
        "training.save_steps": 1_000_000,
        "training.compile": "false",
        "compute.processes": case.processes,
        "compute.memory": "16Gi",
    }


def write_seeing(folder: Path, name: str, length: int) -> dict[str, Any]:
    """Return the settings of a model that sees, and of questions about an image each. Make what is not there.

    A question has more words than `length` allows, and is cut off.
    """
    from PIL import Image

    data = folder / f"questions-{length}.jsonl"
    settings = {"model": folder, "data.train": data, "data.overlong": "truncate"}
    if data.exists():
        return settings
    _save_seeing(folder, name)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    words = " ".join(["what colour is it"] * length)
    with data.open("w") as file:
        for number in range(ROWS):
            image = f"images/{number}.png"
            Image.new("RGB", (SIDE, SIDE), (number * 3, 80, 120)).save(folder / image)
            turns = [
                {"role": "user", "content": f"<image>{number}"},
                {"role": "assistant", "content": words},
            ]
            file.write(json.dumps({"messages": turns, "images": [image]}) + "\n")
    return settings


def _save_seeing(folder: Path, name: str) -> None:
    from tests.pictures import FAMILIES as SEEING_FAMILIES
    from tests.pictures import save_family_model, save_seeing_model

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "head_dim": 64}
    sizes |= {"intermediate_size": 1152, "max_position_embeddings": 2048, "vocab_size": 24_000}
    folder.mkdir(parents=True, exist_ok=True)
    if name == "qwen2_5_vl":
        tower = {
            "depth": 6,
            "hidden_size": 256,
            "num_heads": 4,
            "intermediate_size": 704,
            "out_hidden_size": 384,
        }
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
        save_seeing_model(folder, sizes=sizes | {"rope_parameters": rope}, of_tower=tower)
        return
    small = SEEING_FAMILIES[name]
    tower = {
        "image_size": SIDE,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 704,
    }
    text = small.text | sizes | {"num_key_value_heads": 2}
    square = {"height": SIDE, "width": SIDE}
    family = replace(small, text=text, vision=small.vision | tower)
    if name == "gemma3":  # 12 × 12 tokens of 24 × 24 patches
        family = replace(
            family,
            text=text | {"query_pre_attn_scalar": 64, "sliding_window": 512},
            images={"size": square},
            config={"mm_tokens_per_image": 144},
            settings={"image_seq_length": 144},
        )
    else:
        family = replace(family, images={"size": {"shortest_edge": SIDE}, "crop_size": square})
    save_family_model(folder, name, family=family)


def write_rows(path: Path, case: Case, corpus: Corpus, vocab_size: int) -> None:
    """Write the rows of a case."""
    if case.rows == "pairs":
        write_pairs(path, token_pairs(corpus, vocab_size))
        return
    rows = token_rows(corpus, vocab_size)
    if case.rows == "texts":
        write_tokens(path, rows)
        return
    with path.open("w") as file:
        for number, row in enumerate(rows):
            # A token short, for those that begin and end a text.
            text = " ".join(map(word, row.ids[:-1]))
            file.write(json.dumps({"text": text, "label": f"l{number % 2}"}) + "\n")


def foresee(settings: dict[str, Any], measured: int) -> dict[str, Any]:
    """Return what `kubetune plan` says, and how far that is from what was measured."""
    planned = _kubetune("plan", "--json", settings=settings)
    if planned.returncode:
        raise SystemExit(planned.stderr)
    memory = json.loads(planned.stdout)["memory"]
    return {
        "predicted_bytes": memory["peak_bytes"],
        "error": memory["peak_bytes"] / measured - 1,
        "parts": memory["parts"],
    }


def measure(name: str, case: Case) -> dict[str, Any]:
    """Measure one run, and return that with the plan of the same run."""
    settings = settings_of(case)
    run_dir = WORK / SUITE / "runs" / name
    shutil.rmtree(run_dir, ignore_errors=True)
    done = _kubetune("train", settings=settings | {"output": run_dir})
    if done.returncode:
        return {"failed": done.stderr.strip()[-300:]}
    measured = json.loads((run_dir / "report.json").read_text())["peak_memory_bytes"]
    return {
        "measured_bytes": measured,
        **foresee(settings, measured),
        # Without folders of this machine.
        "settings": {key: value for key, value in settings.items() if not isinstance(value, Path)},
        "shape": case.model,
    }


def _kubetune(*words: str, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    assignments = [f"{key}={value}" for key, value in settings.items()]
    environ = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.run(
        [sys.executable, "-m", "kubetune", *words, *assignments],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
    )


def line(name: str, measurement: dict[str, Any]) -> str:
    """Return one case in a line."""
    if "failed" in measurement:
        return f"{name:<24} failed: {measurement['failed']}"
    predicted = measurement["predicted_bytes"] / 2**20
    measured = measurement["measured_bytes"] / 2**20
    error = measurement["error"]
    return (
        f"{name:<24} predicted {predicted:7,.0f} MiB, measured {measured:7,.0f} MiB, {error:+.1%}"
    )


if __name__ == "__main__":
    main()
