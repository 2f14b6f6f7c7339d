"""TRL's own divergences with their gradients, recorded for tests/unit/test_distill_kernel.py.

PYTHON -m tests.peers.trl_distill tests/peers/trl_distill.json      # PYTHON: of an environment that has trl 1.16.0
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

BETAS = (0.0, 0.1, 0.5, 1.0)
TEMPERATURES = (0.7, 1.0, 2.0)
TOKENS, VOCABULARY = 7, 23


def logits(seed: int) -> torch.Tensor:
    """Return logits `[1, tokens, vocabulary]`, rounded so that they are the same on any machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3000, 3000, (1, TOKENS, VOCABULARY), generator=generator) / 1000


def record() -> dict[str, Any]:
    """Return the loss, summed over tokens, and the gradient of the student's logits, for each case."""
    import trl
    from trl.experimental.gkd import GKDTrainer

    cases = []
    for beta, temperature in product(BETAS, TEMPERATURES):
        student = logits(0).requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(
            student, logits(1), beta=beta, temperature=temperature, reduction="sum"
        )
        loss.backward()
        assert student.grad is not None
        gradient = [round(number, 9) for number in student.grad.flatten().tolist()]
        cases.append(
            {"beta": beta, "temperature": temperature, "loss": loss.item(), "gradient": gradient}
        )
    return {"trl": trl.__version__, "cases": cases}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=None) + "\n")
