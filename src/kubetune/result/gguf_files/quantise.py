"""Quantised files: by the library `gguf`, or K-quants by llama.cpp's own code.

That code is the program `llama-quantize` or the Python package llama_cpp. It converts a plain file.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kubetune import errors
from kubetune.result.gguf_files import llama_cpp

# Types of weights that only llama.cpp makes, by their names on the command line.
TYPES: Final = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k",
    "iq4_nl", "iq4_xs", "iq3_m", "iq3_s",
)  # fmt: skip

PROGRAM = "llama-quantize"

# Run in a process of its own, since llama.cpp ends the process when a check of it fails.
_BY_PACKAGE = """
import sys, llama_cpp
parameters = llama_cpp.llama_model_quantize_default_params()
parameters.ftype = getattr(llama_cpp, "LLAMA_FTYPE_MOSTLY_" + sys.argv[3])
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), parameters))
"""


def require(kind: str) -> None:
    """Raise ConfigError for a type that nothing installed here can make."""
    if kind not in TYPES or shutil.which(PROGRAM):
        return
    reason = llama_cpp.missing()
    if reason is None:
        return
    raise errors.ConfigError(
        f"--gguf {kind} is made only by llama.cpp's own code; {PROGRAM} is not in the PATH, and {reason}. q8_0, q5_1, "
        "q5_0, q4_1 and q4_0 need neither. Nothing was written."
    )


def write(
    folder: Path,
    plain: Path,
    path: Path,
    kind: str,
    about: Mapping[str, str],
    end_ids: list[int],
) -> tuple[str, ...]:
    """Write the quantised file of a model's folder, whose plain file is there; return the tensors that keep 16 bits."""
    from kubetune.result.gguf_files.model_file import write_model

    if kind not in TYPES:
        return write_model(folder, path, kind, about, end_ids).wider
    _run_llama_cpp(plain, path, kind)
    return ()


def _run_llama_cpp(plain: Path, path: Path, kind: str) -> None:
    """Convert the plain file to one with weights of the type `kind`."""
    # As llama.cpp spells types: Q4_K_M, IQ4_XS.
    name = kind.upper()
    program = shutil.which(PROGRAM)
    if program:
        command = [program, str(plain), str(path), name]
    else:
        command = [sys.executable, "-P", "-c", _BY_PACKAGE, str(plain), str(path), name]
    done = llama_cpp.run_to_end(command)
    if done.returncode or not path.is_file():
        raise errors.ModelError(
            f"llama.cpp does not make {name} of this model (exit code {done.returncode}: "
            f"{llama_cpp.last_lines(done)}). Nothing was written."
        )
