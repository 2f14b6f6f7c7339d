"""An export made known to Ollama, by its own program: `ollama create NAME -f Modelfile` in the export's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from kubetune import errors
from kubetune.base import whole_folder
from kubetune.result.forms.wanted import PROVENANCE
from kubetune.result.gguf_files.llama_cpp import last_lines, run_to_end
from kubetune.result.publishing.modelfile import MODELFILE

PROGRAM: Final = "ollama"


def require() -> None:
    """Raise ConfigError if Ollama is not installed."""
    if shutil.which(PROGRAM) is None:
        raise errors.ConfigError(
            f"--ollama runs {PROGRAM}, which is not in the PATH (ollama.com has it). Nothing was created."
        )


def find_export(target: Path) -> Path:
    """Return the folder of an export with a Modelfile: `target` itself, or the newest whole GGUF model of a run.

    Raise ConfigError if there is none.
    """
    if (target / MODELFILE).is_file():
        return target
    folders = []
    for folder in (target / "exports").glob("*-gguf-*"):
        is_model = not folder.name.endswith("-gguf-adapter")
        if is_model and whole_folder.is_whole(folder, PROVENANCE):
            folders.append(folder)
    if not folders:
        raise errors.ConfigError(
            f"{target} has no export as GGUF; make one with `kubetune export {target} --gguf q8_0`. Nothing was created."
        )
    return max(folders, key=lambda folder: (folder / PROVENANCE).stat().st_mtime_ns)


def create(folder: Path, name: str) -> None:
    """Make the model of an export known to Ollama under a name. Raise EnvironmentFault if Ollama does not take it."""
    require()
    done = run_to_end([PROGRAM, "create", name, "-f", MODELFILE], cwd=folder)
    if done.returncode:
        raise errors.EnvironmentFault(
            f"ollama create ends with exit code {done.returncode}: {last_lines(done)}"
        )
