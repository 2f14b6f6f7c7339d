"""The golden serving manifests: what `kubetune serve --render` makes, byte for byte.

python -m tests.golden.serving      writes them anew, after a change that is meant to change them
"""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path

from kubetune.cli import main
from kubetune.config.load import load_config
from kubetune.config.resolved import resolved
from tests.golden.differences import difference

FOLDER = Path(__file__).parent
# Stands for the run directory of full.yaml, with an adapter that was exported.
RUN = "RUN"

CASES: dict[str, list[str]] = {
    "whole": [
        "acme/support-bot-merged",
        "--max-model-len=8192",
        "--gpus=2",
        "--storage-class=shared-fs",
    ],
    "adapters": [
        *(
            "friendly=acme/support-friendly",
            "terse=/outputs/terse/exports/step-000100-adapter",
            "--rank=24",
        ),
        *("--base=Qwen/Qwen3-8B", "--max-replicas=3", "--api-key-secret=vllm-key", "-n=serving"),
    ],
    "run": [RUN, "tuned=acme/other", "--base=Qwen/Qwen3-8B"],
    "merged": [RUN, "--merged", "--name=bot"],
}


def write_run(folder: Path, *overrides: str) -> Path:
    """Return a run directory as far as serving looks at it."""
    config = load_config(FOLDER / "full.yaml", overrides=overrides)
    for kind in ("adapter", "merged"):
        export = folder / "exports" / f"step-000120-{kind}"
        export.mkdir(parents=True)
        (export / "provenance.json").write_text("{}")
    (folder / "resolved.json").write_text(json.dumps(resolved(config)))
    return folder


@cache
def rendered(case: str) -> str:
    """Return what the command line prints for a case."""
    out = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(out),
        redirect_stderr(io.StringIO()),
    ):
        run_dir = str(write_run(Path(folder) / "run"))
        words = [run_dir if word == RUN else word for word in CASES[case]]
        code = main(["serve", "--render", *words])
    assert code == 0, f"{case}: exit code {code}"
    return out.getvalue()


def kept(case: str) -> str:
    """Return what the file of a case has to hold: "whole" as it is rendered, another as its difference from that."""
    if case == "whole":
        return rendered(case)
    return difference("whole", rendered("whole"), rendered(case))


def golden(case: str) -> Path:
    """Return the path of that file."""
    ending = "yaml" if case == "whole" else "diff"
    return FOLDER / "serving" / f"{case}.{ending}"


if __name__ == "__main__":
    for name in CASES:
        golden(name).parent.mkdir(exist_ok=True)
        golden(name).write_text(kept(name))
