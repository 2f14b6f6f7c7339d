"""A server that answers in vLLM's wire format with a real tiny model: what `kubetune serve --check` asks, and no more.

    with served(ServedModel(model, tokenizer, names=("bot",))) as url: …

Requests and answers are those of vLLM 0.32's entrypoints/serve/tokenize/protocol.py and openai/completion/protocol.py.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

# vLLM writes it for minus infinity.
LOWEST = -9999.0


@dataclass
class ServedModel:
    """A model, its tokenizer, and what is wrong with the server."""

    model: Any
    tokenizer: Any  # of transformers
    names: tuple[str, ...] = ("model",)
    template: str | None = None  # in place of the tokenizer's
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # defaults of the server
    adds_bos: bool = False
    context: int = 512
    key: str | None = None
    # Changes the log-probabilities of a prompt.
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    # Path -> status and body that are answered in place of the right ones.
    broken: dict[str, tuple[int, Any]] = field(default_factory=dict)
    # Called with each path, before it is answered.
    on_call: Callable[[str], None] = lambda path: None
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def answer(self, path: str, request: Any) -> tuple[int, Any]:
        """Return status and body."""
        self.calls.append((path, request))
        self.on_call(path)
        if path in self.broken:
            return self.broken[path]
        if path == "/v1/models":
            card = {"object": "model", "owned_by": "vllm", "max_model_len": self.context}
            return 200, {"object": "list", "data": [{"id": name, **card} for name in self.names]}
        if request and request.get("model") not in self.names:
            return 404, {"error": {"message": f"The model `{request['model']}` does not exist."}}
        if path == "/tokenize":
            return self._tokenized(request)
        if path == "/v1/completions":
            return self._completed(request)
        return 404, {"detail": "Not Found"}

    def _tokenized(self, request: Any) -> tuple[int, Any]:
        if "messages" not in request:
            special = request.get("add_special_tokens", True)
            ids = self.tokenizer(request["prompt"], add_special_tokens=special).input_ids
        else:
            messages = json.loads(json.dumps(request["messages"]))
            for message in messages:
                for call in message.get("tool_calls") or ():
                    if not isinstance(call["function"]["arguments"], str):
                        return 400, {"error": {"message": "arguments: str expected"}}
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            ids = self.tokenizer.apply_chat_template(
                messages,
                tools=request.get("tools"),
                chat_template=self.template,
                add_generation_prompt=request.get("add_generation_prompt", True),
                return_dict=False,
                **{**self.template_kwargs, **(request.get("chat_template_kwargs") or {})},
            )
            if self.adds_bos:
                ids = [self.tokenizer.bos_token_id, *ids]
        return 200, {"count": len(ids), "max_model_len": self.context, "tokens": ids}

    @torch.no_grad()
    def _completed(self, request: Any) -> tuple[int, Any]:
        ids = request["prompt"]
        if len(ids) >= self.context:
            message = f"This model's maximum context length is {self.context} tokens."
            return 400, {"error": {"message": message}}
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        if request.get("prompt_logprobs") is not None:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
            values = logits.log_softmax(1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            of_tokens: list[Any] = [None]
            for token, value in zip(ids[1:], self.spoil(values).tolist(), strict=True):
                number = None if math.isnan(value) else max(value, LOWEST)
                of_tokens.append({str(token): {"logprob": number, "rank": 1}})
            choice["prompt_logprobs"] = of_tokens
        return 200, {"object": "text_completion", "choices": [choice]}


@contextmanager
def served(model: ServedModel) -> Iterator[str]:
    """Serve while the block runs, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, request: Any) -> None:
            status, body = 401, {"error": "Unauthorized"}
            if model.key is None or self.headers.get("Authorization") == f"Bearer {model.key}":
                status, body = model.answer(self.path, request)
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
