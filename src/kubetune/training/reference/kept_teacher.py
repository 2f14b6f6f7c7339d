"""What a teacher says of given rows: asked once, and kept beside the prepared data as the reference of preferences is.

With `lmbda: 0` and `support: teacher_k` the rows are given and few numbers of each label are needed, so later starts do
not load the teacher. A label's line:

    ids of the k likeliest tokens, as bits of fp32    their k log-probabilities    that of all others
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kubetune.base import logs
from kubetune.base.humanize import size
from kubetune.config.schema.distill import MOST_KEPT_BYTES
from kubetune.kernels.divergence import kept_numbers
from kubetune.models.learner import Learner
from kubetune.tasks import distill
from kubetune.training.reference.attached import KeptNumbers, tables_of
from kubetune.training.reference.scores import Asked, scores
from kubetune.training.reference.served_teacher import TeacherOnServers
from kubetune.training.start.rank_start import RankStart

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kubetune.batching.batch import Batch
    from kubetune.config.schema import DistillConfig
    from kubetune.data.order import Ids
    from kubetune.data.prepared.rows import Rows

# Raise it when the same rows would give other numbers, or when the form of the files changes.
FORMAT: Final = 1


class AskedForLabels(Asked):
    """The likeliest tokens at each label under a teacher in memory."""

    dtype = np.float32
    phase = "teacher"

    def __init__(self, name: str, student: Learner, number: int) -> None:
        """`number`: of tokens at each label."""
        self.whose = f"the teacher {name}"
        self._student = student
        self._number = number

    def of_batch(self, learner: Learner, batch: Batch) -> NDArray[Any] | Callable[[], NDArray[Any]]:
        """Return what is kept of each label of a batch, `[labels, 2 k + 1]`."""
        if not batch.num_labels:
            return np.empty((0, _width(self._number)), np.float32)
        with torch.no_grad():
            teacher = distill.teacher_of(replace(self._student, teacher=learner), batch)
            numbers = kept_numbers(teacher, batch.num_labels, self._number)
        return numbers.cpu().numpy()

    def lines(self, rows: Rows, ids: Ids) -> Ids:
        """Return the labels of some rows."""
        return rows.label_places(ids)

    def shape(self, rows: Rows) -> tuple[int, int]:
        """Return the shape of the table."""
        return (int(rows.trained_counts.sum()), _width(self._number))


class AskedOnServers(AskedForLabels):
    """The same under a teacher on servers. The model that learns is only there to be asked in units of its batches."""

    def __init__(self, teacher: TeacherOnServers, student: Learner) -> None:
        super().__init__(teacher.model, student, teacher.number)
        self._teacher = teacher

    def of_batch(self, learner: Learner, batch: Batch) -> Callable[[], NDArray[Any]]:
        """Return what waits for the servers."""
        wait = self._teacher.ask(batch, None)
        return lambda: wait().numpy()


def keep(
    start: RankStart, asked: AskedForLabels, facts: dict[str, Any], load: Callable[[], Learner]
) -> None:
    """Give the rows what a teacher says of them. All ranks call it.

    `facts`: what decides it besides the rows. `load`: returns the model that is asked, if the numbers are missing.
    """
    key = None
    if start.world.is_main:
        key = _fingerprint(start, facts)
    splits = {"train": start.data.train}
    if start.data.eval is not None:
        splits["eval"] = start.data.eval
    place = KeptNumbers(start, "teacher_numbers", key, asked.whose)
    tables = tables_of(place, splits, asked, lambda *rest: scores(asked, load(), *rest))
    for split, rows in splits.items():
        rows.teacher = tables[split]


def is_kept(settings: DistillConfig, number: int, rows: Rows) -> bool:
    """True if the teacher is asked once, and what it says of `number` tokens at each label of training is kept."""
    if not settings.keeps_teacher:
        return False
    num_bytes = 4 * _width(number) * int(rows.trained_counts.sum())
    if num_bytes > MOST_KEPT_BYTES:
        logs.MODEL.info(
            "the teacher is asked at each step, since its numbers would take %s, more than %s; a smaller top_k takes less",
            size(num_bytes),
            size(MOST_KEPT_BYTES),
        )
        return False
    return True


def _width(number: int) -> int:
    """Return how many numbers are kept of a label with so many tokens."""
    return 2 * number + 1


def _fingerprint(start: RankStart, facts: dict[str, Any]) -> str:
    """Return the SHA-256 of all that decides the numbers."""
    facts = {
        **facts,
        "format": FORMAT,
        "data": start.data.fingerprint,
        "top_k": start.model.distill.top_k,
        # A model of other outputs is compared with the teacher anew.
        "outputs": start.model.model.path,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
