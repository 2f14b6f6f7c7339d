"""A process that runs llama.cpp: `python -m kubetune.result.gguf_files.llama_worker REQUEST ANSWER`.

A process of its own, since llama.cpp ends the whole process when a check of it fails. `llama_cpp.py` starts it, and
says there what is in a request.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from kubetune.base.processes import die_with_parent


def main() -> None:
    """Answer the request that the first argument names, in the file that the second names."""
    # Else it would go on for minutes after an export that was killed.
    die_with_parent()
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    model = _load(request)
    arrays: dict[str, Any] = {}
    for number, row in enumerate(request["rows"]):
        arrays[f"logits_{number}"] = _logits(model, row["ids"], row["positions"])

    answers: dict[str, Any] = {
        "version": llama_cpp.__version__,
        "continuations": [],
        "tokens": [],
        "start": _start(model),
        "ends": _ends(model, request["vocabulary"]),
        "chats": [],
    }
    for ids in request["prompts"]:
        answers["continuations"].append(_continue(model, ids, request["length"]))
    for text in request["texts"]:
        answers["tokens"].append(model.tokenize(text.encode(), add_bos=False, special=True))
    for chat in request["chats"]:
        answers["chats"].append(_render(request["template"], chat))
    # All in one file: text as bytes, beside the logits.
    arrays["answers"] = np.frombuffer(json.dumps(answers).encode(), np.uint8)
    np.savez(sys.argv[2], **arrays)


def _load(request: dict[str, Any]) -> Any:
    """Return the model, with keys and values of attention in fp32, and logits of all tokens."""
    # The longest goes in as one batch, so that nothing depends on where a batch ends.
    longest = 8
    for row in request["rows"]:
        longest = max(longest, len(row["ids"]))
    for ids in request["prompts"]:
        longest = max(longest, len(ids) + request["length"])
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
        likeliest = int(model.scores[model.n_tokens - 1].argmax())
        tokens.append(likeliest)
        model.eval([likeliest])
    return tokens


def _start(model: Any) -> list[int]:
    """Return the tokens that are put before a text."""
    # [1, 97] and [97] → [1]
    plain = model.tokenize(b"a", add_bos=False, special=False)
    full: list[int] = model.tokenize(b"a", add_bos=True, special=False)
    added = len(full) - len(plain)
    return full[:added]


def _ends(model: Any, size: int) -> list[int]:
    """Return the tokens at which llama.cpp ends an answer."""
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    ends = []
    for number in range(size):
        if llama_cpp.llama_vocab_is_eog(vocabulary, number):
            ends.append(number)
    return ends


def _render(template: str, chat: list[list[str]]) -> str | None:
    """Return the prompt of a conversation by llama.cpp's own code; None if that knows no such template."""
    messages = (llama_cpp.llama_chat_message * len(chat))()
    # Room for the template's own texts, which are short.
    size = 4096
    for place, (role, text) in enumerate(chat):
        content = text.encode()
        messages[place] = llama_cpp.llama_chat_message(role=role.encode(), content=content)
        size += 4 * len(content)
    buffer = ctypes.create_string_buffer(size)
    written = llama_cpp.llama_chat_apply_template(
        template.encode(),
        messages,
        len(chat),
        True,
        buffer,
        size,
    )
    if written < 0:
        return None
    return buffer.raw[:written].decode()


if __name__ == "__main__":
    main()
