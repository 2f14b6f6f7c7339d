"""A teacher that vLLM servers have: known to them at the start, and asked for each row.

Nothing is learnt from half an answer: a row counts when all its labels have their numbers, and the run ends with the name
of a server that does not answer in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from kubetune.batching.whole_rows import WholeRow, whole_rows
from kubetune.rundir import heartbeat
from kubetune.training.reference import teacher_wire
from kubetune.training.rollouts.servers.calls import Calls
from kubetune.training.rollouts.servers.vllm_client import Server

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kubetune.batching.batch import Batch

_LOOK_SECONDS: Final = 0.5

Item = TypeVar("Item", bound=Any)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RowQuestion:
    """What a server is asked about a row."""

    place: int  # of the row in its batch
    row: WholeRow
    ids: NDArray[Any] | None  # [labels, k] tokens that are asked for; None: the likeliest ones

    @property
    def number(self) -> int:
        """Return what decides the server: a row has the same one in each epoch, on any number of ranks."""
        return self.row.sample


@dataclass(frozen=True)
class TeacherOnServers:
    """The teacher as the loop asks it."""

    servers: Sequence[Server]
    model: str  # as the servers call it
    most_tokens: int  # of a row
    number: int  # of tokens at each label
    width: int  # of the vocabulary
    seconds: float
    rank: int
    of_student: bool  # True: it is asked for the student's likeliest tokens
    # A stop ends the waiting, and what did not come is NaN: the loop drops the step.
    is_stopping: Callable[[], bool] = lambda: False
    # What is under way for the micro-batches of a step: the samples of each, and what waits for their numbers.
    _ahead: deque[tuple[tuple[int, ...], Callable[[], Tensor]]] = field(default_factory=deque)

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Ask about all micro-batches of a step, if nothing that the student computes is needed for it."""
        self._ahead.clear()
        for batch in batches:
            if batch.teacher is None and not self.of_student:
                self._ahead.append(
                    (batch.samples, self._asked(batch.read_by_teacher or batch, None))
                )

    def ask(self, batch: Batch, ids: Tensor | None) -> Callable[[], Tensor]:
        """Ask about all rows of a batch at the same time: see ServedTeacher."""
        if self._ahead and self._ahead[0][0] == batch.samples:
            return self._ahead.popleft()[1]
        return self._asked(batch, ids)

    def _asked(self, batch: Batch, ids: Tensor | None) -> Callable[[], Tensor]:
        rows = whole_rows(batch)
        of_rows: list[Any] = [None] * len(rows)
        if ids is not None:
            counts = [len(row.places) for row in rows]
            of_rows = list(ids.cpu().split(counts))
        questions = []
        for place, (row, of_row) in enumerate(zip(rows, of_rows, strict=True)):
            if row.places:
                of_label = None if of_row is None else of_row.numpy()
                questions.append(RowQuestion(place, row, of_label))
        scores = RowScores(self, questions)

        def answered() -> Tensor:
            by_place = {}
            for question, numbers in collected(scores, self.is_stopping):
                by_place[question.place] = numbers
            parts = [np.empty((0, 2 * self.number + 1), np.float32)]
            for question in questions:
                missing = np.zeros((len(question.row.places), 2 * self.number + 1), np.float32)
                missing[:, self.number :] = np.nan
                parts.append(by_place.get(question.place, missing))
            return torch.from_numpy(np.concatenate(parts))

        return answered


class RowScores(Calls[RowQuestion, "NDArray[Any]"]):
    """What servers are asked about the rows of a batch."""

    def __init__(self, teacher: TeacherOnServers, questions: Sequence[RowQuestion]) -> None:
        """`questions`: about rows that have labels."""
        self._teacher = teacher
        super().__init__(teacher.servers, teacher.seconds, questions)

    def _ask(self, item: RowQuestion, server: Server, deadline: float) -> NDArray[Any]:
        teacher = self._teacher
        return asked(
            server, teacher.model, item.row, item.ids, teacher.number, teacher.width, deadline
        )

    def _missing(self, item: RowQuestion, server: Server) -> str:
        return f"teacher: rank {self._teacher.rank}: server {server.url} did not answer for row {item.row.sample}"


def collected(
    calls: Calls[Item, Answer], is_stopping: Callable[[], bool] = lambda: False
) -> list[tuple[Item, Answer]]:
    """Return all answers; those that have come if a stop was asked for meanwhile.

    Raise EnvironmentFault if a server does not answer in time.
    """
    answers: list[tuple[Item, Answer]] = []
    try:
        while not calls.is_done:
            heartbeat.beat("teacher")
            answers += calls.arrived(_LOOK_SECONDS)
            if is_stopping():
                break
    finally:
        # Those that have answered are not asked again.
        calls.cancel()
    return answers


def asked(
    server: Server,
    model: str,
    row: WholeRow,
    ids: NDArray[Any] | None,
    number: int,
    width: int,
    deadline: float,
) -> NDArray[Any]:
    """Return what a server says of tokens `[labels, k]` at the places of a row; without ids, of the likeliest ones."""
    if ids is not None:
        request = teacher_wire.scoring_request(model, row, ids)
        reply = server.ask(teacher_wire.GENERATE, request, deadline)
        return teacher_wire.scores_in(reply, row, ids)
    request = teacher_wire.likeliest_request(model, row, number)
    reply = server.ask(teacher_wire.COMPLETIONS, request, deadline)
    return teacher_wire.likeliest_in(reply, row, number, width)
