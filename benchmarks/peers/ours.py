"""kubetune itself: one rank of a prepared run directory, by the function that `python -m kubetune.worker` calls.

Only the log that the training loop writes its numbers to also takes the time. Nothing of the loop is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.job import Order, drive
from benchmarks.recorder import STEP, Recorder
from kubetune.rundir import metrics
from kubetune.training import worker


def measure(order: Order) -> dict[str, Any]:
    """Train the run in `order.run_dir`. Raise RuntimeError with the reason if it fails."""
    recorder = Recorder(order.started)
    run_dir = Path(order.run_dir)
    # The run log takes the class from the module when torch is imported, which is after this.
    metrics.MetricsLog = _timed_log(recorder, steps_per_epoch(run_dir))  # type: ignore[misc]
    code = worker.main([order.run_dir])
    if code:
        reason = f"exit code {code}"
        for ending in sorted((run_dir / "logs").glob("rank-*.exit.json"))[:1]:
            reason = json.loads(ending.read_text())["reason"]
        raise RuntimeError(reason)
    plan = json.loads((run_dir / "plan.json").read_text())
    steps = [line for line in metrics.read_metrics(run_dir) if "loss" in line]
    tokens = sum(line["tokens"] for line in steps if line["step"] <= plan["steps_per_epoch"])
    facts = {"steps": len(steps), "micro_batch_tokens": plan["micro_batch_tokens"]}
    return recorder.result(tokens, effective=facts)


def steps_per_epoch(run_dir: Path) -> int:
    """Return the steps of an epoch, from the plan that the launcher wrote."""
    return int(json.loads((run_dir / "plan.json").read_text())["steps_per_epoch"])


def _timed_log(recorder: Recorder, epoch_steps: int) -> type[metrics.MetricsLog]:
    class TimedLog(metrics.MetricsLog):
        """The log of a run, which is opened when the first step begins, and written to when a step ends."""

        def __init__(self, run_dir: Path, resume_step: int = 0, evaluated_step: int = 0) -> None:
            super().__init__(run_dir, resume_step, evaluated_step)
            recorder.begin()

        def write(self, step: int, values: Mapping[str, Any]) -> None:
            super().write(step, values)
            if "loss" in values:
                recorder.losses.append(values["loss"])

        def write_timing(self, step: int, values: Mapping[str, Any]) -> None:
            super().write_timing(step, values)
            recorder.step()
            print(f"{STEP}{step}", flush=True)  # files are written later
            if step % epoch_steps == 0:
                recorder.epoch()

    return TimedLog


if __name__ == "__main__":
    drive(measure)
