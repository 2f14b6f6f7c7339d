"""Report on a run that has reached its end: report.json, the last log lines, and measurements for later forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kubetune.base import logs
from kubetune.base.humanize import counted
from kubetune.distributed import process_group
from kubetune.plan import actuals
from kubetune.plan.costs import read_kept
from kubetune.plan.plan import Plan
from kubetune.rundir import heartbeat, metrics
from kubetune.rundir.checkpoints import State
from kubetune.rundir.report import is_reported, read_report, write_report_json
from kubetune.rundir.throughput import throughput_line
from kubetune.rundir.totals import (
    Totals,
    ends_line,
    nothing_learnt,
    nothing_learnt_line,
    read_totals,
    runaway_line,
)
from kubetune.training.peak_memory import peak_memory_bytes
from kubetune.training.start.rank_start import RankStart


def report(start: RankStart, state: State) -> str:
    """Write report.json and log where the result is. Return a remark on the run, mostly empty."""
    heartbeat.beat("report")
    world = start.world
    # Before ranks part ways: this takes all of them.
    peak = max(process_group.gather(peak_memory_bytes(world.device), world))
    if not world.is_main:
        return ""
    # The other ranks may leave from here on, or be lost.
    with heartbeat.busy_alone():
        return _write_report(start, state, peak)


def _write_report(start: RankStart, state: State, peak: int) -> str:
    """Write report.json on rank 0, where it is missing. Return the remark on the run. `peak`: bytes of memory."""
    config = start.config
    plan = start.plan
    run_dir = start.run_dir
    data = start.data
    copy = config.logging.report_json
    if is_reported(run_dir, state.step) and (copy is None or Path(copy).exists()):
        # This start had nothing left to train, and would only spoil the numbers of those that trained.
        logs.DONE.log(
            logs.NOTICE,
            "all %d steps were done before; %s tells of them",
            state.step,
            run_dir / metrics.REPORT,
        )
        return _remark(read_report(run_dir), run_dir)

    events = metrics.read_events(run_dir)
    totals = totals_of(run_dir, plan, state)
    # What was forecast at the start beside what was measured.
    forecast = read_kept(events)
    compared = actuals.compare(
        forecast,
        peak_memory_bytes=peak,
        step_seconds=totals.seconds,
        events=events,
        until=metrics.now(),
        world_size=plan.world_size,
        price_per_gpu_hour=config.compute.price_per_gpu_hour,
    )
    learnt_nothing = None
    if config.task == "grpo":
        learnt_nothing = nothing_learnt(totals, config.grpo.num_generations)
    copy_to = None
    if copy:
        copy_to = Path(copy)
    numbers = write_report_json(
        run_dir,
        totals,
        world_size=plan.world_size,
        data_fingerprint=data.fingerprint,
        peak_memory_bytes=peak,
        copy_to=copy_to,
        best_step=state.best_step,
        preflight=_newest_preflight(events),
        actuals=compared,
        nothing_learnt=learnt_nothing,
    )
    if numbers["throughput"] is not None and forecast is not None:
        # Forecasts of later runs on this machine go by what this one measured.
        actuals.remember(
            forecast.shape,
            tokens_per_second=numbers["throughput"]["tokens_per_second"],
            seconds=totals.seconds,
            events=events,
            waiting_share=totals.waiting_share,
        )
    return _log_result(run_dir, state, numbers, compared)


def _newest_preflight(events: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    preflight = None
    for event in events:
        if event["event"] == "preflight":
            preflight = event
    return preflight


def _log_result(
    run_dir: Path, state: State, numbers: Mapping[str, Any], compared: Mapping[str, Any]
) -> str:
    """Log a summary of report.json. Return the remark on the run. `compared`: its numbers beside the forecast."""
    if numbers["throughput"] is not None:
        logs.RESULT.info("%s", throughput_line(numbers["throughput"]))
    logs.RESULT.info("%s", actuals.line(compared))
    ends = ends_line(numbers["measures"])
    if ends:
        logs.RESULT.log(logs.NOTICE, "%s", ends)
    # The link to the checkpoint that a user will want.
    best = "best" if state.best_step is not None else "last"
    logs.RESULT.info("%s", run_dir / "checkpoints" / best)
    logs.DONE.log(
        logs.NOTICE,
        "%s, %s tokens, %.0f s",
        counted(state.step, "step"),
        f"{numbers['tokens']:,}",
        numbers["seconds"],
    )
    return _remark(numbers, run_dir)


def _remark(numbers: Mapping[str, Any], run_dir: Path) -> str:
    """Return the remark on a run that came to its end but went wrong, by its report.json; "" for any other run."""
    runaway = numbers.get("loss_runaway")
    if isinstance(runaway, dict):
        return runaway_line(runaway)
    nothing = numbers.get("nothing_learnt")
    if isinstance(nothing, dict):
        return nothing_learnt_line(nothing, run_dir)
    return ""


def totals_of(run_dir: Path, plan: Plan, state: State) -> Totals:
    """Return the sums of the whole run: of its metrics, or of its checkpoint if the disk has lost lines of metrics."""
    # Lines and state agree, unless the disk has lost some lines.
    of_lines = read_totals(run_dir)
    if of_lines.steps == state.step:
        return replace(of_lines, seconds=state.seconds)

    # The first and the last line, if they survived.
    first = of_lines.first
    if first.get("step") != 1:
        first = {}
    last = of_lines.last
    if last.get("step") != state.step:
        last = {"step": state.step, "epoch": state.step / plan.steps_per_epoch}
    return replace(
        of_lines,
        samples=state.samples,
        tokens=state.tokens,
        trained_tokens=state.trained_tokens,
        seconds=state.seconds,
        first=first,
        last=last,
    )
