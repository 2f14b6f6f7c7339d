"""Report of a run that has reached its end: report.json, the last lines of its log, what later forecasts go by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.config.schema import Config
from kubetune.data.prepared.prepare import Prepared
from kubetune.distributed import process_group
from kubetune.distributed.process_group import World
from kubetune.plan import actuals
from kubetune.plan.plan import Plan
from kubetune.rundir import heartbeat, metrics
from kubetune.rundir.checkpoints import State
from kubetune.rundir.report import is_reported, read_report, write_report_json
from kubetune.rundir.throughput import throughput_line
from kubetune.rundir.totals import Totals, read_totals, runaway_line
from kubetune.training.run_log import peak_memory_bytes
from kubetune.training.start.preparation import planned_tokens


def report(
    config: Config, plan: Plan, run_dir: Path, world: World, data: Prepared, state: State
) -> str:
    """Write report.json and say where the result lies; returns what its owner should know of it, mostly nothing."""
    heartbeat.beat("report")
    peak = max(process_group.gather(peak_memory_bytes(world.device), world))
    if not world.is_main:
        return ""
    copy = config.logging.report_json
    if is_reported(run_dir, state.step) and (copy is None or Path(copy).exists()):
        # A start that found nothing left to train would only spoil the numbers of those that did.
        logs.DONE.info(
            "all %d steps were done before; %s tells of them", state.step, run_dir / metrics.REPORT
        )
        return _remark(read_report(run_dir).get("loss_runaway"))
    events = metrics.read_events(run_dir)
    totals = totals_of(run_dir, plan, state)
    found = actuals.compare(
        config,
        plan,
        tokens=planned_tokens(plan, data),
        longest=data.longest,
        peak_memory_bytes=peak,
        step_seconds=totals.seconds,
        events=events,
        until=metrics.now(),
    )
    numbers = write_report_json(
        run_dir,
        totals,
        world_size=world.size,
        data_fingerprint=data.fingerprint,
        peak_memory_bytes=peak,
        copy_to=Path(copy) if copy else None,
        best_step=state.best_step,
        preflight=next(
            (event for event in reversed(events) if event["event"] == "preflight"), None
        ),
        actuals=found,
    )
    best = "best" if state.best_step is not None else "last"
    if numbers["throughput"] is not None:
        logs.RESULT.info("%s", throughput_line(numbers["throughput"]))
        speed = numbers["throughput"]["tokens_per_second"]
        actuals.remember(
            config, plan, tokens_per_second=speed, seconds=totals.seconds, events=events
        )
    for line in actuals.tell(found):
        logs.RESULT.info("%s", line)
    if remark := _remark(numbers["loss_runaway"]):
        logs.RESULT.warning("%s", remark)
    logs.RESULT.info("%s", run_dir / "checkpoints" / best)
    logs.DONE.info(
        "%s, %s tokens, %.0f s",
        counted(state.step, "step"),
        f"{numbers['tokens']:,}",
        numbers["seconds"],
    )
    return remark


def _remark(runaway: Any) -> str:
    return runaway_line(runaway) if isinstance(runaway, dict) else ""


def totals_of(run_dir: Path, plan: Plan, state: State) -> Totals:
    """The sums of the whole run. Those of its checkpoint hold, where the disk has lost lines of the numbers."""
    found = read_totals(run_dir)
    if found.steps == state.step:
        return replace(found, seconds=state.seconds)
    return replace(
        found,
        samples=state.samples,
        tokens=state.tokens,
        trained_tokens=state.trained_tokens,
        seconds=state.seconds,
        first=found.first if found.first.get("step") == 1 else {},
        last=found.last
        if found.last.get("step") == state.step
        else {"step": state.step, "epoch": state.step / plan.steps_per_epoch},
    )
