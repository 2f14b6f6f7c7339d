"""Have MLX answer prompts greedily; run by a Python that has mlx-lm (on Linux with `mlx[cpu]`).

    PYTHON_OF_MLX mlx_answers.py REQUEST.json

The request names `model`, `prompts` (lists of ids) and `tokens`. The last line printed is JSON: the `version` of mlx-lm,
and for each prompt the `ids` and `logps` of its answer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generate_step


def main() -> None:
    """Answer the request whose file is named."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    model, _ = mlx_lm.load(request["model"])
    answers = []
    for prompt in request["prompts"]:
        ids: list[int] = []
        logps: list[float] = []
        for token, of_all in generate_step(mx.array(prompt), model, max_tokens=request["tokens"]):
            ids.append(int(token))
            logps.append(float(of_all[int(token)]))
        answers.append({"ids": ids, "logps": logps})
    print(json.dumps({"version": mlx_lm.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
