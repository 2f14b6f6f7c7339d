"""ms-swift's divergence over the teacher's likeliest tokens, recorded for tests/unit/test_distill_kernel.py.

PYTHON -m tests.peers.swift_distill tests/peers/swift_distill.json  # PYTHON: of an environment that has ms-swift 4.6.0

The package itself is not imported, which would take all of its requirements: only the file of its loss is run.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch

from tests.peers.trl_distill import BETAS, TEMPERATURES, TOKENS, logits

TOP_K = 6


def their_loss() -> Any:
    """Return the module of ms-swift's loss."""
    package = importlib.util.find_spec("swift")
    assert package is not None
    assert package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "rlhf_trainers" / "gkd_loss.py"
    spec = importlib.util.spec_from_file_location("gkd_loss", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def record() -> dict[str, Any]:
    """Return the loss, summed over tokens, and the gradient of the student's logits, for each case."""
    theirs = their_loss()
    labels = torch.zeros(1, TOKENS, dtype=torch.int64)
    cases = []
    for beta, temperature in product(BETAS, TEMPERATURES):
        student = logits(0).requires_grad_()
        of_teacher = theirs.TeacherOutput(full_logits=logits(1), labels=labels).to_topk(TOP_K)
        loss, tokens = theirs.gkd_loss(student, of_teacher, labels, beta, temperature)
        assert tokens == TOKENS
        loss.backward()
        assert student.grad is not None
        gradient = [round(number, 9) for number in student.grad.flatten().tolist()]
        cases.append(
            {"beta": beta, "temperature": temperature, "loss": loss.item(), "gradient": gradient}
        )
    return {"ms-swift": metadata.version("ms-swift"), "cases": cases}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=None) + "\n")
