"""How much memory an export takes: the model once, whatever is done to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import toy
from tests.architectures import save_model

LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 6,
         "num_key_value_heads": 6, "head_dim": 128}  # fmt: skip
MEASURE = """
import sys, threading
from pathlib import Path
from kubetune.base.cpu import heap
heap.give_back()
import peft, torch, transformers.models.llama.modeling_llama
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.publishing.exporting import export_run

def anonymous():  # what no file could give back
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
found = export_run(Path(sys.argv[1]), wanted=WantedExport(merged=sys.argv[2] == "merged"), tell=lambda _: None)
done.set()
watcher.join()
print((peak - before) / sum(size for name, size in found.files.items() if name.startswith("model")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sections", "copies"),
    [
        ("merged", {}, 1.3),
        ("merged", {"quantization": "4bit"}, 1.6),
        ("model", {"lora": None}, 1.3),
    ],
)
def test_the_model_is_in_memory_once(
    kind: str, sections: dict[str, Any], copies: float, tmp_path: Path
) -> None:
    if "quantization" in sections:
        pytest.importorskip("bitsandbytes")
    inputs = toy.make_inputs(tmp_path)
    (inputs / "model" / "model.safetensors").unlink()
    save_model(inputs / "model", **LARGE)
    run_dir = toy.finished(
        tmp_path / "run", toy.make_config(inputs, {"max_steps": 1, "eval_steps": 1}, **sections)
    )
    command = [sys.executable, "-c", MEASURE, str(run_dir), kind]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(process.stdout) < copies
