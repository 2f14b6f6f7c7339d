"""A server that answers in vLLM's wire format with a real tiny model: what `kubetune serve --check` asks, and no more.

    with served(ServedModel(model, tokenizer, names=("bot",))) as url: …

Requests and answers are those of vLLM 0.32's entrypoints/serve/tokenize/protocol.py and openai/completion/protocol.py.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
    drops_thoughts: bool = False
    reverses_tools: bool = False
    sorts_calls: bool = False  # as vLLM's types do: arguments before the name
    stops_at: tuple[int, ...] | None = None  # None: at the tokenizer's EOS
    sampling: dict[str, float] = field(default_factory=dict)  # in place of what requests leave out
    # What it can tell: `echo` (vLLM and the older API), or `next` alone, in llama.cpp's form. `llama.cpp`: that, and its
    # own addresses, as its server of commit 7e4c0a9 answered. `ollama`: what Ollama's docs/api.md and openai/openai.go
    # say, with texts in place of ids, and no /tokenize.
    tells: str = "echo"
    context: int = 512
    key: str | None = None
    # Changes the log-probabilities of a prompt.
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    # Path -> status and body that are answered in place of the right ones; status 0: none, the connection ends.
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
            if self.tells == "ollama":
                card = {"object": "model", "created": 0, "owned_by": "library"}
                cards = [{"id": f"{name}:latest", **card} for name in self.names]
                return 200, {"object": "list", "data": cards}
            if self.tells == "llama.cpp":
                meta = {"n_ctx": self.context, "n_ctx_train": 4096}
                cards = [{"id": name, "owned_by": "llamacpp", "meta": meta} for name in self.names]
                return 200, {"object": "list", "data": cards}
            card = {"object": "model", "owned_by": "vllm"}
            base, *adapters = self.names
            cards = [{"id": base, **card, "parent": None, "max_model_len": self.context}]
            for name in adapters:
                cards.append({"id": name, **card, "parent": base, "max_model_len": None})
            return 200, {"object": "list", "data": cards}
        if self.tells == "ollama":
            return self._as_ollama(path, request)
        if self.tells == "llama.cpp" and path != "/v1/completions":
            return self._as_llama_cpp(path, request)
        if request and request.get("model") not in self.names:
            return 404, {"error": {"message": f"The model `{request['model']}` does not exist."}}
        if path == "/tokenize":
            return self._tokenized(request)
        if path == "/v1/completions":
            return self._completed(request)
        return 404, {"detail": "Not Found"}

    def _as_llama_cpp(self, path: str, request: Any) -> tuple[int, Any]:
        if path == "/apply-template":
            _, body = self._tokenized(request)
            return 200, {"prompt": self.tokenizer.decode(body["tokens"])}
        if path == "/tokenize":
            assert request["parse_special"]
            ids = self.tokenizer(request["content"], add_special_tokens=False).input_ids
            return 200, {"tokens": ids}
        if path == "/props":
            return 200, {
                "default_generation_settings": {"params": {"repeat_penalty": 1.0, **self.sampling}}
            }
        return 404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}

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
                    if self.sorts_calls:
                        call["function"] = dict(sorted(call["function"].items()))
                # vLLM's /tokenize takes thoughts under this name alone, and templates get them under both.
                thoughts = message.pop("reasoning", None)
                message.pop("reasoning_content", None)
                if thoughts is not None and not self.drops_thoughts:
                    message |= {"reasoning": thoughts, "reasoning_content": thoughts}
            tools = request.get("tools")
            if tools and self.reverses_tools:
                tools = tools[::-1]
            ids = self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
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
        choice: dict[str, Any] = {"index": 0, **self._drawn(ids, request)}
        # The first of several names is the base.
        is_base = len(self.names) > 1 and request["model"] == self.names[0]
        disabled = (
            self.model.disable_adapter()
            if is_base and isinstance(self.model, PeftModel)
            else nullcontext()
        )
        with disabled:
            logits = self.model(input_ids=torch.tensor([ids])).logits[0].float()
        every = logits.log_softmax(1)
        values = every[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        numbers: list[Any] = [None]
        for value in self.spoil(values).tolist():
            numbers.append(None if math.isnan(value) else max(value, LOWEST))
        if self.tells == "echo" and request.get("echo"):
            choice["logprobs"] = {"token_logprobs": [*numbers, -1.0]}
        elif self.tells in ("next", "llama.cpp") and request.get("logprobs"):
            best = every[-1].topk(min(request["logprobs"], every.shape[1]))
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            likeliest = []
            for token, value in pairs:
                likeliest.append({"id": token, "logprob": None if math.isnan(value) else value})
            choice["logprobs"] = {"content": [{"top_logprobs": likeliest}]}
        return 200, {"object": "text_completion", "choices": [choice]}

    @torch.no_grad()
    def _as_ollama(self, path: str, request: Any) -> tuple[int, Any]:
        if path == "/v1/completions" and not isinstance(request["prompt"], str):
            problem = "json: cannot unmarshal array into Go struct field CompletionRequest.prompt of type string"
            return 400, {"error": {"message": problem, "type": "invalid_request_error"}}
        if path != "/api/generate":
            return 404, b"404 page not found"
        # What the client of Ollama sends with a raw prompt.
        assert request["raw"]
        assert request["stream"] is False
        assert request["top_logprobs"] <= 20
        assert request["options"]["num_predict"] == 1
        ids = self.tokenizer(request["prompt"], add_special_tokens=True).input_ids
        if self.adds_bos:
            ids = [self.tokenizer.bos_token_id, *ids]
        logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        best = logits.log_softmax(0).topk(request["top_logprobs"])
        byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        likeliest = []
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            text = self.tokenizer.decode([token])
            # Also those of a part of a character.
            raw = [byte_of[char] for char in self.tokenizer.convert_ids_to_tokens(token) or ""]
            likeliest.append({"token": text, "logprob": value, "bytes": raw})
        logprobs = [{**likeliest[0], "top_logprobs": likeliest}]
        answer = {"model": request["model"], "response": likeliest[0]["token"], "done": True}
        return 200, {**answer, "done_reason": "length", "logprobs": logprobs}

    def _drawn(self, ids: list[int], request: Any) -> dict[str, Any]:
        """Return text and end of an answer, drawn token by token with the seed of the request."""
        stops = self.stops_at
        if stops is None:
            stops = (self.tokenizer.eos_token_id,)
        settings = {"temperature": 1.0, "top_k": 0, **self.sampling, **request}
        generator = torch.Generator().manual_seed(request.get("seed") or 0)
        drawn: list[int] = []
        for _ in range(request["max_tokens"]):
            logits = self.model(input_ids=torch.tensor([ids + drawn])).logits[0, -1].float()
            for token, bias in (request.get("logit_bias") or {}).items():
                logits[int(token)] += bias
            if settings["temperature"] == 0:
                token = int(logits.argmax())
            else:
                if settings["top_k"]:
                    logits[logits < logits.topk(int(settings["top_k"])).values[-1]] = -torch.inf
                chances = (logits / settings["temperature"]).softmax(0)
                token = int(torch.multinomial(chances, 1, generator=generator))
            if token in stops:
                return {"text": self.tokenizer.decode(drawn), "finish_reason": "stop"}
            drawn.append(token)
        return {"text": self.tokenizer.decode(drawn), "finish_reason": "length"}


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
            # It dies before it answers.
            if not status:
                return
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            # Who asks may have gone.
            with suppress(OSError):
                self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # `server_close` waits for what is being answered
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
