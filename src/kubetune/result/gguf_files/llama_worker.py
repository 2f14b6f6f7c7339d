"""A process that runs llama.cpp: `python -m kubetune.result.gguf_files.llama_worker REQUEST ANSWER`.

A process of its own, since llama.cpp ends the whole process when a check of it fails. `llama_cpp.py` starts it, and
says there what stands in a request.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def main() -> None:
    """Answer the request that the first argument names, in the file that the second names."""
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    model = _load(request)
    arrays: dict[str, Any] = {}
    for number, row in enumerate(request["rows"]):
        arrays[f"logits_{number}"] = _logits(model, row["ids"], row["positions"])
    answers = {
        "version": llama_cpp.__version__,
        "continuations": [_continue(model, ids, request["length"]) for ids in request["prompts"]],
        "tokens": [
            model.tokenize(text.encode(), add_bos=False, special=True) for text in request["texts"]
        ],
        "start": _start(model),
        "ends": _ends(model, request["vocabulary"]),
        "chats": [_render(request["template"], chat) for chat in request["chats"]],
    }
    arrays["answers"] = np.frombuffer(json.dumps(answers).encode(), np.uint8)
    np.savez(sys.argv[2], **arrays)


def _load(request: dict[str, Any]) -> Any:
    """Return the model, with keys and values of attention in fp32, and logits of all tokens."""
    rows = [len(row["ids"]) for row in request["rows"]]
    prompts = [len(ids) + request["length"] for ids in request["prompts"]]
    # The longest goes in as one batch, so that nothing depends on where a batch ends.
    longest = max([8, *rows, *prompts])
    return llama_cpp.Llama(
        request["model"],
        lora_path=request["adapter"],
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        logits_all=True,
        n_threads=request["threads"],
        n_threads_batch=request["threads"],
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        swa_full=True,
        verbose=False,
    )


def _logits(model: Any, ids: list[int], positions: list[int]) -> np.ndarray:
    """Return the logits at some positions of a row, `[positions, vocabulary]`."""
    model.reset()
    model.eval(ids)
    return np.array(model.scores[positions], np.float32)


def _continue(model: Any, ids: list[int], length: int) -> list[int]:
    """Return the tokens that follow when the likeliest is taken each time."""
    model.reset()
    model.eval(ids)
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(int(model.scores[model.n_tokens - 1].argmax()))
        model.eval(tokens[-1:])
    return tokens


def _start(model: Any) -> list[int]:
    """Return the tokens that are put before a text."""
    plain = model.tokenize(b"a", add_bos=False, special=False)
    full: list[int] = model.tokenize(b"a", add_bos=True, special=False)
    return full[: len(full) - len(plain)]


def _ends(model: Any, size: int) -> list[int]:
    """Return the tokens at which llama.cpp ends an answer."""
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    return [number for number in range(size) if llama_cpp.llama_vocab_is_eog(vocabulary, number)]


def _render(template: str, chat: list[list[str]]) -> str | None:
    """Return the prompt of a conversation by llama.cpp's own code; None if that knows no such template."""
    messages = (llama_cpp.llama_chat_message * len(chat))()
    for place, (role, text) in enumerate(chat):
        messages[place] = llama_cpp.llama_chat_message(role=role.encode(), content=text.encode())
    # Room for the template's own texts, which are short.
    size = 4096 + 4 * sum(len(text.encode()) for _, text in chat)
    buffer = ctypes.create_string_buffer(size)
    written = llama_cpp.llama_chat_apply_template(
        template.encode(), messages, len(chat), True, buffer, size
    )
    if written < 0:
        return None
    return buffer.raw[:written].decode()


if __name__ == "__main__":
    main()
