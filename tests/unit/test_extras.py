"""What is asked for without the extra that it needs is refused in one line that says how to install it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
from packaging.requirements import Requirement

from kubetune import extras
from kubetune.base import faults
from kubetune.data.reading import images
from kubetune.errors import USER, MissingExtra
from kubetune.supervisor.observers import traces
from tests import toy
from tests.architectures import save_model

ROOT = Path(__file__).parents[2]
# Extras that bring programs and notebooks, which no module of kubetune imports.
OF_NO_MODULE = {"docs", "dev", "jupyter", "notebooks"}
# Modules that are called otherwise than what is installed for them.
MODULE_OF = {"pillow": "PIL", "opentelemetry-sdk": "opentelemetry"}
# Run at the start of every process: the modules that it names cannot be imported, or found.
WITHOUT = """
import os, sys
for name in os.environ["WITHOUT"].split():
    sys.modules[name] = None
"""
RUN = """
name: small
model: {path: nowhere/model}
data: {train: %s}
"""


def refusal(tmp_path: Path, extra: str, *words: str) -> str:
    """Return what a command without the modules of an extra says, which ends with the code of a wrong command."""
    modules = [module for module, brought in extras.EXTRA_OF.items() if brought == extra]
    blocked = tmp_path / "blocked"
    blocked.mkdir(exist_ok=True)
    offline = (ROOT / "tests" / "offline" / "sitecustomize.py").read_text()
    (blocked / "sitecustomize.py").write_text(offline + WITHOUT)
    # Of this checkout, wherever the environment has another one installed.
    path = os.pathsep.join([str(blocked), str(ROOT / "src")])
    environ = {**os.environ, "PYTHONPATH": path, "WITHOUT": " ".join(modules)}
    done = subprocess.run(
        [sys.executable, "-m", "kubetune", *words],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    assert done.returncode == USER, output
    return output


def test_the_table_is_that_of_the_project() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra, requirements in declared.items():
        if extra in OF_NO_MODULE:
            continue
        modules = set()
        for text in requirements:
            name = Requirement(text).name
            if not name.startswith("opentelemetry-exporter"):
                modules.add(MODULE_OF.get(name, name.replace("-", "_")))
        assert modules == {m for m, brought in extras.EXTRA_OF.items() if brought == extra}, extra
    assert set(extras.EXTRA_OF.values()) == declared.keys() - OF_NO_MODULE


@pytest.mark.parametrize("module", sorted(extras.EXTRA_OF))
def test_an_import_that_fails_for_an_extra_names_it(module: str) -> None:
    lack = faults.fault_of(
        ModuleNotFoundError(f"No module named '{module}'", name=f"{module}.part")
    )
    assert isinstance(lack, MissingExtra)
    assert f"pip install 'kubetune[{extras.EXTRA_OF[module]}]'" in str(lack)


def test_an_import_that_fails_for_something_else_stays_what_it_is() -> None:
    assert (
        faults.fault_of(ModuleNotFoundError("No module named 'surely_none'", name="surely_none"))
        is None
    )
    assert faults.fault_of(ModuleNotFoundError("of no name")) is None


VERBS_OF_CLUSTERS = (
    ("status",), ("status", "lost"), ("logs", "lost"), ("events", "lost"), ("watch", "lost"), ("stop", "lost"),
    ("resume", "lost"), ("delete", "lost"), ("cp", "lost"), ("top", "lost"), ("gpus", "lost"),
    ("exec", "lost", "--", "ls"), ("port-forward", "lost", "ui"), ("submit", "cluster.yaml", "--no-check"),
    ("dev", "cluster.yaml"), ("secret", "set", "PATH", "-n", "space"),
)  # fmt: skip
QUICK = {"logs", "exec", "submit", "secret"}


@pytest.mark.parametrize(
    "words",
    [
        words if words[0] in QUICK else pytest.param(words, marks=pytest.mark.slow)
        for words in VERBS_OF_CLUSTERS
    ],
    ids=" ".join,
)
def test_every_verb_of_a_cluster_names_the_extra(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    cluster = (
        "kubernetes: {image: here/kubetune:1, storage: {cache: {size: 1Gi}, outputs: {size: 1Gi}}}\n"
        "compute: {gpus_per_node: 0, cpu: 1, memory: 1Gi}\n"
    )
    (tmp_path / "cluster.yaml").write_text(RUN % "rows.jsonl" + cluster)
    output = refusal(tmp_path, "k8s", *words)
    assert "pip install 'kubetune[k8s]'" in output
    if "lost" in words:
        assert output.index("there is no such run") < output.index("kubetune[k8s]")


@pytest.mark.parametrize(
    "verb",
    ["status", *(pytest.param(v, marks=pytest.mark.slow) for v in ("logs", "watch", "stop", "cp"))],
)
def test_a_folder_that_is_none_is_no_matter_of_an_extra(tmp_path: Path, verb: str) -> None:
    output = refusal(tmp_path, "k8s", verb, "runs/none")
    assert re.search("runs/none: (there is no such run|no such run directory)", output)
    assert "kubetune[" not in output


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


GENERATED = "evaluation.generate={metric: [%s]}"
OTHERS = [
    ("tracking", ("train", "run.yaml", "tracking.tensorboard=true")),
    ("tracking", ("train", "run.yaml", "tracking.mlflow={}")),
    ("wandb", ("train", "run.yaml", "tracking.wandb={}")),
    ("trackio", ("train", "run.yaml", "tracking.trackio={}")),
    ("prometheus", ("train", "run.yaml", "tracking.prometheus={}")),
    ("mcp", ("mcp",)),
    ("ui", ("ui",)),
    ("hub", ("data", "check", "run.yaml", "data.train=rows.parquet")),
    ("hub", ("train", "run.yaml", "data.train=rows.parquet")),
    ("s3", ("sync", "outputs/none", "s3://bucket/run")),
    ("s3", ("train", "run.yaml", "output=s3://bucket/run")),
    ("gs", ("train", "run.yaml", "output=gs://bucket/run")),
    ("az", ("train", "run.yaml", "output=az://bucket/run")),
    ("math", ("plan", "run.yaml", "task=grpo", "rewards=accuracy_reward")),
    ("sweep", ("sweep", "run.yaml", "training.learning_rate=1e-4,1e-3")),
]
# What is missed only once a rank has imported torch, which takes seconds.
LATE = [
    ("quantization", ("train", "run.yaml", "quantization=4bit")),
    ("quantization", ("train", "run.yaml", "training.optim=adamw_8bit")),
    ("hub", ("train", "run.yaml", "data.train=somebody/something")),
    ("evaluation", ("train", "run.yaml", GENERATED % "rouge_l")),
    ("evaluation", ("train", "run.yaml", GENERATED % "bleu")),
    ("benchmarks", ("train", "run.yaml", "evaluation.benchmarks=[arc_easy]")),
]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        *OTHERS[::2],
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [*OTHERS[1::2], *LATE]),
    ],
    ids=lambda part: part if isinstance(part, str) else " ".join(part),
)
def test_every_other_verb_names_its_extra(
    tmp_path: Path, inputs: Path, extra: str, words: tuple[str, ...]
) -> None:
    config = toy.make_config(inputs)
    settings = config.model_dump_json(exclude_unset=True)
    (tmp_path / "run.yaml").write_text(settings)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    assert f"pip install 'kubetune[{extra}]'" in refusal(tmp_path, extra, *words)


def test_telling_a_collector_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match=r"pip install 'kubetune\[otel\]'"):
        traces.observe(cast(Any, None))


def test_images_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    images.pillow.cache_clear()
    with pytest.raises(MissingExtra, match=r"pip install 'kubetune\[vision\]'"):
        images.pillow()


@pytest.mark.parametrize("override", ["quantization=4bit", "training.optim=adamw_8bit"])
def test_train_refuses_before_anything_is_written_where_bitsandbytes_is_missing(
    tmp_path: Path, override: str
) -> None:
    save_model(tmp_path / "nowhere" / "model", "qwen3")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "run.yaml").write_text(RUN % "rows.jsonl" + "lora: {}\n")
    output = refusal(tmp_path, "quantization", "train", "run.yaml", override)
    assert "pip install 'kubetune[quantization]'" in output
    assert not (tmp_path / "outputs").exists()
