"""A server that speaks as much of vLLM's HTTP API as rollouts need, for a tiny model, with our own sampler.

    with running(inputs / "model", tmp_path) as server:
        server.fault = "500"            # what it does wrong at the next calls, see FAULTS
        server.restart()                # killed with SIGKILL, and started on the same port without its adapters

It is a process of its own, so it can be killed and stopped. Requests and answers are those of vLLM's
entrypoints/openai/completion/protocol.py; the seed of answer k is `seed + k`, as in its v1/engine/parallel_sampling.py.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from tests import teacher_replies
from tests.ranks import _CONTEXT, free_port

FAULTS = (
    "500", "hang", "trickle", "half", "not json", "fewer", "more tokens", "fewer logps", "null logps", "nan logps",
    "positive logps", "other prompt", "abort", "short", "no ids", "bad token",
)  # fmt: skip
"""What it can do wrong with completions. `hang`: answers nothing. `trickle`: a byte now and then, for ever."""


class _Model:
    """The model, and adapters on it by name."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.folder = folder
        self.base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
        self.adapted: Any = None
        self.paths: dict[str, str] = {}
        self.lock = Lock()

    def load(self, name: str, path: str) -> None:
        from peft import PeftModel

        if self.adapted is None:
            self.adapted = PeftModel.from_pretrained(self.base, path, adapter_name=name).eval()
        else:
            self.adapted.load_adapter(path, adapter_name=name)
        self.paths[name] = path

    def tokens(self, text: str) -> list[int]:
        from transformers import AutoTokenizer

        ids: list[int] = AutoTokenizer.from_pretrained(self.folder).encode(
            text, add_special_tokens=False
        )
        return ids

    def unload(self, name: str) -> None:
        del self.paths[name]
        if self.paths:
            self.adapted.delete_adapter(name)
        else:
            # PEFT keeps its last adapter; nobody can name it any more.
            self.base = self.adapted.unload()
            self.adapted = None

    def answers(self, request: dict[str, Any]) -> list[Any]:
        from kubetune.config.schema import GrpoConfig
        from kubetune.scoring.counted_draws import uniforms
        from kubetune.training.rollouts.sampler import draw

        settings = GrpoConfig(
            max_completion_length=request["max_tokens"],
            temperature=request["temperature"] or 1e-6,
            top_p=request["top_p"],
            top_k=request["top_k"],
            min_p=request["min_p"] or None,
        ).model_copy(update={"num_generations": request["n"]})
        seeds = [request["seed"] + answer for answer in range(request["n"])]
        numbers = np.stack([uniforms(request["max_tokens"], seed) for seed in seeds])
        model = self.base
        if request["model"] != "base":
            self.adapted.set_adapter(request["model"])
            model = self.adapted
        ends = request["stop_token_ids"]
        return draw(model, [request["prompt"]], numbers, settings, ends, 0)


class _Handler(BaseHTTPRequestHandler):
    model: _Model
    folder: Path  # of the fault and of the calls

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._note(self.path, {})
        cards: list[dict[str, Any]] = [{"id": "base", "max_model_len": self._flags().max_model_len}]
        cards += [{"id": name, "parent": "base"} for name in self.model.paths]
        self._reply(200, {"object": "list", "data": cards})

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        request = json.loads(self.rfile.read(size))
        self._note(self.path, request)
        with self.model.lock, suppress(BrokenPipeError):
            if self.path == "/v1/load_lora_adapter":
                self._load(request)
            elif self.path == "/v1/unload_lora_adapter":
                self._unload(request)
            elif self.path == "/tokenize":
                self._reply(200, {"tokens": self.model.tokens(request["prompt"])})
            elif self.path == "/inference/v1/generate" or "prompt_logprobs" in request:
                self._score(request)
            elif self.path == "/v1/completions":
                self._complete(request)
            else:
                self._reply(404, {"detail": "Not Found"})

    def _note(self, path: str, request: dict[str, Any]) -> None:
        line = {"path": path, "request": request, "time": time.time()}
        with (self.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _fault(self) -> str:
        path = self.folder / "fault"
        return path.read_text() if path.exists() else ""

    def _flags(self) -> teacher_replies.Flags:
        path = self.folder / "flags"
        return teacher_replies.Flags.of(path.read_text() if path.exists() else "")

    def _score(self, request: dict[str, Any]) -> None:
        fault = self._fault()
        if fault == "hang":
            time.sleep(3600)
        if fault == "die":
            os._exit(1)
        if fault == "500":
            self._error(500, "EngineCore encountered an issue.")
            return
        reply = teacher_replies.scores
        if self.path == "/v1/completions":
            reply = teacher_replies.likeliest
        status, body = reply(self.model.base, request, self._flags())
        if status == 200:
            teacher_replies.spoil(body, fault)
        self._send(body, fault, status)

    def _load(self, request: dict[str, Any]) -> None:
        name = request["lora_name"]
        if self._fault() == "refuse adapters":
            self._error(500, "LoRA rank 4 is greater than max_lora_rank 2.")
        elif name in self.model.paths:
            self._error(400, f"The lora adapter '{name}' has already been loaded.")
        elif not Path(request["lora_path"]).is_dir():
            self._error(404, f"No adapter found for {request['lora_path']}")
        else:
            self.model.load(name, request["lora_path"])
            self._reply(200, f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, request: dict[str, Any]) -> None:
        name = request["lora_name"]
        if name not in self.model.paths:
            self._error(404, f"The lora adapter '{name}' cannot be found.")
        else:
            self.model.unload(name)
            self._reply(200, f"Success: LoRA adapter '{name}' removed successfully.")

    def _complete(self, request: dict[str, Any]) -> None:
        fault = self._fault()
        if fault == "hang":
            time.sleep(3600)
        if fault == "500":
            self._error(500, "EngineCore encountered an issue.")
            return
        if fault == "bad request":
            self._error(400, "max_tokens is too large: 8.")
            return
        if request["model"] not in ("base", *self.model.paths):
            self._error(404, f"The model `{request['model']}` does not exist.")
            return
        choices = []
        for index, answer in enumerate(self.model.answers(request)):
            choices.append(
                {
                    "index": index,
                    "text": "",
                    "logprobs": {"token_logprobs": answer.logps},
                    "finish_reason": "length" if answer.is_cut else "stop",
                    "token_ids": answer.ids,
                    "prompt_token_ids": request["prompt"],
                }
            )
        _spoil(choices, fault)
        self._send({"object": "text_completion", "choices": choices}, fault)

    def _error(self, status: int, message: str) -> None:
        self._reply(status, {"error": {"message": message, "code": status}})

    def _reply(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _send(self, body: Any, fault: str, status: int = 200) -> None:
        """Send an answer, by some faults not all of it."""
        if fault not in ("half", "trickle", "not json"):
            self._reply(status, body)
            return
        text = b"<html>" if fault == "not json" else json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if fault == "trickle":
            for place in range(len(text)):
                self.wfile.write(text[place : place + 1])
                self.wfile.flush()
                time.sleep(0.2)
        self.wfile.write(text[: len(text) // 2] if fault == "half" else text)


def _spoil(choices: list[dict[str, Any]], fault: str) -> None:
    """Make the choices of an answer wrong."""
    first = choices[0]
    logps = first["logprobs"]["token_logprobs"]
    if fault == "fewer":
        choices.pop()
    elif fault == "more tokens":
        first["token_ids"] = first["token_ids"] * 9
        first["logprobs"]["token_logprobs"] = logps * 9
    elif fault == "fewer logps":
        logps.pop()
    elif fault == "null logps":
        logps[0] = None
    elif fault == "nan logps":
        first["logprobs"]["token_logprobs"] = [float("nan")] * len(logps)
    elif fault == "positive logps":
        logps[0] = 0.5
    elif fault == "other prompt":
        first["prompt_token_ids"] = [1]
    elif fault == "abort":
        first["finish_reason"] = "abort"
    elif fault == "short":
        first["finish_reason"] = "length"
        first["token_ids"] = first["token_ids"][:1]
        first["logprobs"]["token_logprobs"] = logps[:1]
    elif fault == "no ids":
        first["token_ids"] = None
    elif fault == "bad token":
        first["token_ids"][0] = 10**9


def _serve(model: str, folder: str, port: int, host: str = "127.0.0.1") -> None:
    torch.set_num_threads(1)
    _Handler.model = _Model(model)
    _Handler.folder = Path(folder)
    ThreadingHTTPServer((host, port), _Handler).serve_forever()


@dataclass
class FakeServer:
    """A server that runs, seen from the test."""

    model: Path
    folder: Path
    port: int
    process: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        arguments = (str(self.model), str(self.folder), self.port)
        self.process = _CONTEXT.Process(target=_serve, args=arguments)
        self.process.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(OSError):
                self.adapters()
                return
            time.sleep(0.1)
        raise TimeoutError("the server did not start")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def restart(self) -> None:
        self.kill()
        self.start()

    def stop_process(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def set_fault(self, fault: str) -> None:
        temporary = self.folder / "fault.tmp"
        temporary.write_text(fault)
        temporary.rename(self.folder / "fault")

    @property
    def fault(self) -> str:
        path = self.folder / "fault"
        return path.read_text() if path.exists() else ""

    def set_flags(self, words: str) -> None:
        """Let it behave as a server that was started with these words."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "flags").write_text(words)

    def adapters(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as reply:
            return [model["id"] for model in json.load(reply)["data"]][1:]

    def calls(self, path: str) -> list[dict[str, Any]]:
        """Return the requests to a path, in order."""
        file = self.folder / "calls.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [call["request"] for call in map(json.loads, lines) if call["path"] == path]


@contextmanager
def running(model: Path, folder: Path, number: int = 1) -> Iterator[Sequence[FakeServer]]:
    """Run servers while the block runs."""
    folder.mkdir(exist_ok=True)
    servers = []
    try:
        for index in range(number):
            server = FakeServer(model, folder / f"server-{index}", free_port())
            servers.append(server)
            server.start()
        yield servers
    finally:
        for server in servers:
            if server.process is not None:
                server.kill()


if __name__ == "__main__":
    # In a pod: MODEL FOLDER PORT
    _serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), "0.0.0.0")
