"""Draw tokens by numbers that are counted, not by a generator's state: the same place gives the same number.

So a rank that draws an answer again, at whatever time and however many ranks there are, draws the same tokens, and no
random state of the training is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kubetune.data.order import hash_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray


def uniforms(number: int, *place: int | str) -> NDArray[np.float64]:
    """Return numbers from 0 to below 1 for the tokens of an answer, `[number]`, the same for the same place."""
    hashes = hash_ids(np.arange(number, dtype=np.int64), "rollout", *place)
    # 53 bits are what a double holds of a number below 1.
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Return the token at which the sum of the probabilities passes each number's share of their total, `[rows]`.

    A token without a probability is never chosen, as the sum does not grow at it.
    """
    sums = probabilities.double().cumsum(1)
    places = numbers[:, None] * sums[:, -1:]
    tokens = torch.searchsorted(sums, places, right=True)[:, 0]
    return tokens.clamp(max=probabilities.shape[1] - 1)


class Draws:
    """Makes greedy generation draw: of each row's tokens only the one that its number chooses stays possible.

    A logits processor of transformers, which needs to be callable and no more.
    """

    def __init__(self, numbers: Sequence[NDArray[np.float64]], temperature: float) -> None:
        """`numbers`: of each row, one for each token of its answer."""
        self._numbers = torch.from_numpy(np.stack(numbers))
        self._temperature = temperature
        self._place = 0  # of the next token in its answer

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return 0 for the chosen token of each row and -inf for all others, `[rows, vocabulary]`."""
        numbers = self._numbers[:, self._place].to(scores.device)
        self._place += 1
        probabilities = torch.softmax(scores.float() / self._temperature, 1)
        tokens = choose(probabilities, numbers)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)
