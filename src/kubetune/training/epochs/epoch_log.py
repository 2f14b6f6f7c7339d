"""The line of the log that sums up an epoch, when it is done and its last step is evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubetune.base import logs
from kubetune.config.metric_names import main_metric
from kubetune.rundir import metrics
from kubetune.training.epochs.step_means import StepMeans


class EpochLog:
    """Sums up the epoch that is under way."""

    def __init__(self, steps_per_epoch: int, best_by: str) -> None:
        """`best_by`: the metric that chooses the best checkpoint."""
        self._steps_per_epoch = steps_per_epoch
        self._best_by = best_by
        self._means = StepMeans()
        # The last evaluation of that epoch: its step, and its main metrics in words.
        self._evaluation = (0, "")
        # The line of an epoch that is done, and waits for the evaluation of its last step.
        self._line = ""
        self._step = 0

    def step(self, step: int, values: Mapping[str, Any], *, is_evaluated: bool) -> None:
        """Note a step. At the end of an epoch write its line, or if the step `is_evaluated`, let it wait for that."""
        self._means.add(values)
        if step % self._steps_per_epoch == 0:
            self._end(step)
            if not is_evaluated:
                self.write()

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Note an evaluation. Write the line that waits for it."""
        if step % self._steps_per_epoch or self._line:
            # A resumed run may evaluate the last step of an epoch whose line an earlier start wrote.
            self._note_evaluation(step, values)
        self.write()

    def _end(self, step: int) -> None:
        """Note the mean loss of an epoch, over its labels, and the means of what tells how it went, over its steps."""
        mean = self._means.loss() or 0.0
        # A disk may have lost lines that earlier starts wrote.
        num_logged = self._means.steps
        lost = ""
        if num_logged < self._steps_per_epoch:
            lost = f" of {num_logged} of its {self._steps_per_epoch} steps, as metrics.jsonl lacks the others"
        means = ""
        for name, value in self._means.measures().items():
            means += f", {name} {value:.3g}"
        self._means.clear()
        number = round(step / self._steps_per_epoch)
        self._line = f"epoch {number} done: mean loss {mean:.4f}{means}{lost}, step {step}"
        self._step = step

    def write(self) -> None:
        """Log the line of an epoch that is done, with what its last evaluation says of it, if it had any."""
        if not self._line:
            return
        step, evaluated = self._evaluation
        if evaluated:
            where = "" if step == self._step else f" at step {step}"
            evaluated = f"; {evaluated}{where}"
        logs.EPOCH.info("%s%s", self._line, evaluated)
        self._line = ""
        self._evaluation = (0, "")

    def _note_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep what an evaluation says of the epoch: the metric of its task; accuracy and F1 beside each other."""
        texts = []
        about = main_metric(values, self._best_by) or ""
        # Accuracy says little where one class is rare.
        for name in (about, "eval_f1_macro" if about == "eval_accuracy" else "eval_accuracy"):
            if name in values:
                texts.append(f"{name} {values[name]:.4f}")
        if texts:
            self._evaluation = (step, ", ".join(texts))

    def remember(self, run_dir: Path, step: int) -> None:
        """Read the numbers of earlier starts in the epoch that is under way after `step` steps."""
        # Steps 7 and 8 of epochs of 3 steps are in the third epoch, which began after step 6.
        begun = step - step % self._steps_per_epoch
        for line in metrics.stream_lines(run_dir / metrics.METRICS):
            if not begun < line["step"] <= step:
                continue
            self._note_evaluation(line["step"], line)
            if "loss" in line:
                self._means.add(line)
