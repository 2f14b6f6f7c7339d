"""Have vLLM answer prompts greedily; run by vLLM's own Python.

    PYTHON_OF_VLLM vllm_answers.py REQUEST.json

The request names `model`, `prompts` (lists of ids), `tokens`, `dtype`, and perhaps an `adapter`. The last line printed is
JSON: vLLM's `version`, and for each prompt the `ids` and `logps` of its answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import vllm
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    """Answer the request whose file is named."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    adapter = request.get("adapter")
    settings: dict[str, Any] = {}
    if adapter:
        settings = {"enable_lora": True, "max_lora_rank": 8}
    llm = LLM(
        model=request["model"],
        dtype=request["dtype"],
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        **settings,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["tokens"], logprobs=0, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    loaded = LoRARequest("tuned", 1, adapter) if adapter else None
    answers = []
    for output in llm.generate(prompts, sampling, use_tqdm=False, lora_request=loaded):
        (completion,) = output.outputs
        ids = list(completion.token_ids)
        logps = [step[token].logprob for step, token in zip(completion.logprobs, ids, strict=True)]
        answers.append({"ids": ids, "logps": logps})
    print(json.dumps({"version": vllm.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
