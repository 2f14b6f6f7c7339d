"""Poisons that somebody may plant in a run directory before others receive it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubetune.base import files
from kubetune.rundir import checkpoints, metrics

SECRET = "hunter2-of-somebody-else"
EVIL = "import pathlib\npathlib.Path({canary!r}).touch()\nraise SystemExit('evil ran')\n"


class Received:
    """A received run, the canary that no code may touch, and a secret outside of it."""

    def __init__(self, run: Path, outside: Path) -> None:
        self.run = run
        self.canary = outside / "canary"
        self.secret = outside / "secret.json"
        self.secret.write_text(json.dumps({"secret": SECRET}) + "\n")
        self.step = run / "checkpoints" / "step-000001"

    def settle(self, **changes: Any) -> None:
        """Change resolved.json and config.yaml, section by section."""
        known = json.loads((self.run / "resolved.json").read_text())
        for section, values in changes.items():
            known[section] = {**(known.get(section) or {}), **values}
        (self.run / "resolved.json").write_text(json.dumps(known))
        (self.run / "config.yaml").write_text(json.dumps(known))

    def settle_top(self, key: str, value: Any) -> None:
        """Change a key of resolved.json and config.yaml that is in no section."""
        known = json.loads((self.run / "resolved.json").read_text())
        known[key] = value
        for name in ("resolved.json", "config.yaml"):
            (self.run / name).write_text(json.dumps(known))

    def change(self, name: str, **values: Any) -> None:
        """Change a JSON file of the checkpoint."""
        path = self.step / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **values}))

    def seal(self) -> None:
        sums = {
            str(path.relative_to(self.step)): {
                "sha256": files.sha256_file(path),
                "bytes": path.stat().st_size,
            }
            for path in sorted(self.step.rglob("*"))
            if path.is_file() and path.name != checkpoints.MANIFEST
        }
        text = json.dumps({"version": 1, "files": sums}, indent=1) + "\n"
        (self.step / checkpoints.MANIFEST).write_text(text)

    def code(self, name: str) -> None:
        (self.step / name).write_text(EVIL.format(canary=str(self.canary)))


def code_in_the_checkpoint(received: Received) -> None:
    received.code("modeling_evil.py")
    names = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.LM"}
    received.change("config.json", model_type="evil", auto_map=names)
    received.settle(model={"trust_remote_code": True, "revision": "0" * 40, "path": "/nonexistent"})
    received.seal()


def code_of_a_known_architecture(received: Received) -> None:
    """Plant the same code for a model of which transformers has classes too."""
    received.code("modeling_evil.py")
    received.change("config.json", auto_map={"AutoModelForCausalLM": "modeling_evil.LM"})
    received.settle(model={"trust_remote_code": True, "revision": "0" * 40})
    received.seal()


def code_of_another_repository(received: Received) -> None:
    received.change("config.json", auto_map={"AutoModelForCausalLM": "evil/repo--modeling.LM"})
    received.settle(model={"trust_remote_code": True, "revision": "0" * 40})
    received.seal()


def code_nobody_asked_for(received: Received) -> None:
    """Plant a config.json that only code can read, in a run that says nothing of code, so that transformers may ask."""
    received.code("evil.py")
    received.change("config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    received.seal()


def code_of_tokenizer_and_processor(received: Received) -> None:
    received.code("evil.py")
    classes = {"AutoTokenizer": ["evil.T", "evil.T"], "AutoProcessor": "evil.P"}
    received.change("tokenizer_config.json", tokenizer_class="Evil", auto_map=classes)
    received.change("processor_config.json", processor_class="Evil", auto_map=classes)
    received.change("preprocessor_config.json", auto_map={"AutoImageProcessor": "evil.I"})
    received.settle(model={"path": "/nonexistent"})
    received.seal()


def code_for_generation(received: Received) -> None:
    (received.step / "custom_generate").mkdir()
    received.code("custom_generate/generate.py")
    received.seal()


def hooks(received: Received) -> None:
    received.settle(hooks={"on_event": f"touch {received.canary}"})


def places_outside(received: Received) -> None:
    """Name places outside, to which a run that goes on would write, and whom it would tell."""
    outside = received.canary.parent
    received.settle(
        data={"cache": str(outside / "cache")},
        logging={"report_json": str(received.canary)},
        tracking={"mlflow": {"uri": str(outside / "mlruns")}},
        push={"repo": "evil/stolen", "private": False},
    )
    received.settle_top("mirror", "s3://evil/stolen")


def data_from_outside(received: Received) -> None:
    """Name data that only the machine's owner may see, which a cluster would be sent."""
    link = received.run / "harmless.jsonl"
    link.symlink_to(received.secret)
    received.settle(data={"train": [{"path": str(received.secret)}, {"path": str(link)}]})


def metrics_of_its_own(received: Received) -> None:
    file = received.run / "mine.py"
    file.write_text(EVIL.format(canary=str(received.canary)))
    metrics_file = {"file": str(file), "functions": ["score"]}
    received.settle(evaluation={"metrics": metrics_file, "generate": {"rows": 2}})


def tasks_of_its_own(received: Received) -> None:
    folder = received.run / "tasks"
    folder.mkdir()
    (folder / "evil.yaml").write_text("task: evil\ndoc_to_text: !function evil.text\n")
    (folder / "evil.py").write_text(EVIL.format(canary=str(received.canary)))
    received.settle(evaluation={"benchmarks": {"tasks": ["evil"], "tasks_folder": str(folder)}})


class Bomb:
    """Pickled, it makes a file when it is read."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self._canary}",)


def pickles_for_weights(received: Received) -> None:
    (received.step / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin"):
        (received.step / name).write_bytes(pickle.dumps(Bomb(received.canary)))
    received.seal()


def a_pickle_by_another_name(received: Received) -> None:
    (received.step / "model.safetensors").write_bytes(pickle.dumps(Bomb(received.canary)))
    received.seal()


def an_index_that_leads_out(received: Received) -> None:
    weights = received.step / "model.safetensors"
    shutil.move(weights, received.canary.parent / "outside.safetensors")
    index = {"weight_map": {"lm_head.weight": str(received.canary.parent / "outside.safetensors")}}
    (received.step / "model.safetensors.index.json").write_text(json.dumps(index))
    received.seal()


def another_index_that_leads_out(received: Received) -> None:
    received.change("config.json", transformers_weights="x.safetensors.index.json")
    index = {"weight_map": {"lm_head.weight": "../../../outside.safetensors"}}
    (received.step / "x.safetensors.index.json").write_text(json.dumps(index))
    received.seal()


def names_that_lead_out_of_the_manifest(received: Received) -> None:
    received.seal()
    manifest = json.loads((received.step / checkpoints.MANIFEST).read_text())
    size = received.secret.stat().st_size
    known = {"sha256": files.sha256_file(received.secret), "bytes": size}
    manifest["files"] |= {"../../../outside/secret.json": known, str(received.secret): known}
    (received.step / checkpoints.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def a_pipe_for_a_manifest(received: Received) -> None:
    (received.step / checkpoints.MANIFEST).unlink()
    os.mkfifo(received.step / checkpoints.MANIFEST)


def an_endless_manifest(received: Received) -> None:
    (received.step / checkpoints.MANIFEST).unlink()
    (received.step / checkpoints.MANIFEST).symlink_to("/dev/zero")


def pipes_for_numbers(received: Received) -> None:
    for name in (metrics.METRICS, metrics.EVENTS, metrics.PLAN, metrics.REPORT, "exit.json"):
        (received.run / name).unlink(missing_ok=True)
        os.mkfifo(received.run / name)


def a_pipe_for_a_lock(received: Received) -> None:
    (received.run / "logs").mkdir(exist_ok=True)
    for name in ("node-0.lock", "rank-0.beat.json", "rank-0.exit.json", "export.lock"):
        (received.run / "logs" / name).unlink(missing_ok=True)
        os.mkfifo(received.run / "logs" / name)


def sockets(received: Received) -> None:
    here = os.getcwd()
    os.chdir(received.step)
    with socket.socket(socket.AF_UNIX) as listening:
        (received.step / "state.json").unlink()
        listening.bind("state.json")
    os.chdir(here)


def links_to_a_secret(received: Received) -> None:
    (received.run / "logs").mkdir(exist_ok=True)
    names = ("logs/rank-0.log", metrics.EVENTS, metrics.REPORT, metrics.METRICS, metrics.ANSWERS)
    for name in names:
        (received.run / name).unlink(missing_ok=True)
        (received.run / name).symlink_to(received.secret)


def links_in_a_checkpoint(received: Received) -> None:
    """Plant links that its manifest names, with the checksum of what they lead to."""
    (received.step / "custom").mkdir()
    for name in ("notes.txt", "custom/notes.txt"):
        (received.step / name).symlink_to(received.secret)
    received.seal()


def a_folder_that_leads_out(received: Received) -> None:
    elsewhere = received.canary.parent / "checkpoints"
    shutil.move(received.run / "checkpoints", elsewhere)
    (elsewhere / "step-000001" / "generation_config.json").write_text(SECRET)
    (received.run / "checkpoints").symlink_to(elsewhere)


def an_adapter_beside_the_weights(received: Received) -> None:
    """Plant the file by which transformers would load the model that the adapter names."""
    received.change("adapter_config.json", peft_type="LORA", base_model_name_or_path="/etc")
    received.seal()


def a_resolved_file_that_is_a_pipe(received: Received) -> None:
    (received.run / "resolved.json").unlink()
    os.mkfifo(received.run / "resolved.json")


Poison = Callable[[Received], None]

POISONS: list[Poison] = [
    code_in_the_checkpoint, code_of_a_known_architecture, code_of_another_repository, code_nobody_asked_for,
    code_of_tokenizer_and_processor, code_for_generation, hooks, metrics_of_its_own, tasks_of_its_own,
    places_outside, data_from_outside,
    pickles_for_weights, a_pickle_by_another_name, an_index_that_leads_out, another_index_that_leads_out,
    names_that_lead_out_of_the_manifest, a_pipe_for_a_manifest, an_endless_manifest, pipes_for_numbers,
    a_pipe_for_a_lock, sockets, links_to_a_secret, links_in_a_checkpoint, a_folder_that_leads_out,
    an_adapter_beside_the_weights, a_resolved_file_that_is_a_pipe,
]  # fmt: skip
