"""What the teacher of a distillation scores itself, by the run that it comes from."""

from __future__ import annotations

from pathlib import Path

from kubetune.reporting.reading import RunRecord
from kubetune.rundir import metrics
from kubetune.rundir.checkpoints import STEP_FOLDER


def of_teacher(run: RunRecord, name: str) -> float | None:
    """Return a metric of the teacher; None unless it is a checkpoint of a run here that was asked the same questions."""
    names = [event.get("name") for event in run.events if event["event"] == "teacher"]
    if not names:
        return None
    # RUN/checkpoints/step-40 is step 40 of another run.
    checkpoint = Path(str(names[-1]))
    step = STEP_FOLDER.fullmatch(checkpoint.name)
    if step is None:
        return None

    teacher_run = checkpoint.parent.parent
    asked = _questions(teacher_run)
    if not asked or asked != _questions(run.path):
        return None

    for line in metrics.evaluations(teacher_run):
        is_of_step = line["step"] == int(step[1])
        if is_of_step and metrics.is_number(line.get(name)):
            return float(line[name])
    return None


def _questions(run_dir: Path) -> list[tuple[str, str]]:
    """Return the held-out questions of a run with what is expected; none if none were kept."""
    lines = metrics.stream_lines(run_dir / metrics.ANSWERS / "questions.jsonl", [])
    return [(str(line.get("prompt")), str(line.get("reference"))) for line in lines]
