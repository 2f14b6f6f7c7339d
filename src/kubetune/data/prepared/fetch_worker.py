"""Download the model of a run before its pods need it: `python -m kubetune.data.prepared.fetch_worker CONFIG`.

One of the processes that share HF_HOME downloads, and the others wait. Then they find the model there and do not ask
the hub again. The exit code is one of errors.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kubetune.base import files, locks
from kubetune.base.pod_worker import exit_code_of
from kubetune.config.load import load_config
from kubetune.config.schema import ModelConfig
from kubetune.data.reading.hub import (
    explained_hub_errors,
    hub_token,
    image_folder,
    is_image,
    is_local,
)

# Other forms of the same weights, which training never reads.
NOT_NEEDED = ("*.pth", "*.gguf", "*.onnx", "original/*")
TOKENIZER_FILES = ("*token*", "*.json", "*.jinja")


def fetch(model: ModelConfig) -> None:
    """Download the model, and the tokenizer if it is another model's. Raise ModelError, EnvironmentFault."""
    if is_image(model.path):
        image_folder(model, model.path)
    elif not is_local(model.path):
        _fetch(model.path, model.revision, ignore=NOT_NEEDED)
    if model.tokenizer and model.tokenizer != model.path and not is_local(model.tokenizer):
        _fetch(model.tokenizer, None, allow=TOKENIZER_FILES)


def _fetch(
    repo: str,
    revision: str | None,
    *,
    allow: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> None:
    from huggingface_hub import constants, snapshot_download

    name = repo.replace("/", "--")
    if revision:
        name += f"--{revision}"
    if allow:
        name += "--tokenizer"
    # A file that says that all was downloaded. It is written last, so that half a model is never taken for a whole one,
    # and lies in the cache, so that whoever removes the cache removes it too.
    done = Path(constants.HF_HOME) / "fetched" / name
    done.parent.mkdir(parents=True, exist_ok=True)
    with locks.lock(done.with_name(f"{name}.lock"), wait=True):
        if done.exists():
            print(f"kubetune: {repo} is there already", flush=True)
            return
        print(f"kubetune: fetching {repo}", flush=True)
        with explained_hub_errors(repo, revision):
            folder = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(allow) or None,
                ignore_patterns=list(ignore) or None,
                token=hub_token(),
            )

        files.write_atomic(done, folder)
        print(f"kubetune: {repo} is in {folder}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Fetch what the config names. Return the exit code."""
    config = Path(argv[0])
    return exit_code_of(lambda: fetch(load_config(config, environ=os.environ).model))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
