"""State of a run for Prometheus: `/metrics`, on loopback or, in a pod, on its named port; read when it is asked for.

Labels are the run and the node, never a rank: series stay few. What is told of the whole run is told by node 0.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.errors import ConfigError
from kubetune.plan.actuals import held_seconds
from kubetune.plan.plan import Plan
from kubetune.rundir import checkpoints, heartbeat, metrics
from kubetune.rundir.status import progress
from kubetune.rundir.throughput import last_start, utilization

if TYPE_CHECKING:
    from kubetune.supervisor.observers.beside import Observed

METRICS: dict[str, tuple[str, str]] = {
    "step": ("gauge", "Optimizer steps completed."),
    "steps": ("gauge", "Optimizer steps planned."),
    "loss": ("gauge", "Loss of the last step."),
    "learning_rate": ("gauge", "Learning rate of the last step."),
    "grad_norm": ("gauge", "Norm of the last step's gradient."),
    "eval_loss": ("gauge", "Loss of the last evaluation."),
    "tokens_per_second": ("gauge", "Tokens a second in the last step, all ranks together."),
    "mfu_ratio": ("gauge", "Share of the devices' peak that the last step reached."),
    "peak_memory_bytes": ("gauge", "Highest memory of rank 0 so far."),
    "slowest_rank_ratio": (
        "gauge",
        "Computing time of the slowest rank in the last step, by the median's.",
    ),
    "seconds_left": ("gauge", "Seconds that the steps to come will take."),
    "checkpoint_step": ("gauge", "Step of the newest checkpoint."),
    "checkpoint_age_seconds": (
        "gauge",
        "Time since the newest checkpoint, or since this start where there is none.",
    ),
    "heartbeat_age_seconds": (
        "gauge",
        "Time since the rank of this node that is longest without progress made some.",
    ),
    "restarts": ("counter", "Starts after the first."),
    "held_seconds": ("counter", "Time that devices were held, all starts together."),
    "step_seconds": ("counter", "Time within steps that moved the run on."),
    "lost_seconds": ("counter", "Time held but not within steps that moved the run on."),
    "goodput_ratio": ("gauge", "Share of the time held that moved the run on."),
}
"""Kind and meaning of each, whose name in Prometheus begins with `kubetune_`."""


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """The config asks for it; every node has its own."""
    return bool((settings.get("tracking") or {}).get("prometheus"))


def observe(run: Observed) -> None:
    """Serve until the run has ended."""
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    labels = {"run": run.config.name or run.run_dir.name, "node": str(run.node)}
    state = State(run.run_dir, run.node)

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, value in state.read().items():
                kind, text = METRICS[name]
                family = families[kind](f"kubetune_{name}", text, labels=list(labels))
                family.add_metric(list(labels.values()), value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())  # type: ignore[arg-type, unused-ignore]
    wanted = run.config.tracking.prometheus
    assert wanted is not None
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    address = "0.0.0.0" if in_pod else "127.0.0.1"
    try:
        server, _ = start_http_server(wanted.port, address, registry)
    except OSError:
        if in_pod:
            raise
        server, _ = start_http_server(0, address, registry)  # another run has it
    print(
        f"kubetune: metrics for Prometheus at http://{address}:{server.server_port}/metrics",
        file=sys.stderr,
    )
    run.ended.wait()
    server.shutdown()
    server.server_close()


class State:
    """The numbers of a node's part of a run, by the names of METRICS; what is not known yet is left out."""

    def __init__(self, run_dir: Path, node: int) -> None:
        self._run_dir, self._node = run_dir, node
        self._began, self._seconds = time.time(), 0.0
        self._timings = metrics.follower(run_dir / metrics.TIMINGS)

    def read(self) -> dict[str, float]:
        """The numbers of this moment."""
        try:
            plan = Plan.read(self._run_dir / metrics.PLAN)
        except (OSError, ConfigError):  # not written yet, or damaged
            plan = None
        found = self._of_run(plan) if self._node == 0 else {}
        if plan is not None:
            found["heartbeat_age_seconds"] = self._silence(plan)
        return {name: float(value) for name, value in found.items() if value is not None}

    def _silence(self, plan: Plan) -> float | None:
        ranks = range(
            self._node * plan.processes_per_node, (self._node + 1) * plan.processes_per_node
        )
        now = time.time()
        return max(
            (now - b["since"] for b in heartbeat.read_beats(self._run_dir) if b["rank"] in ranks),
            default=None,
        )

    def _of_run(self, plan: Plan | None) -> dict[str, float | None]:
        events, known = metrics.read_events(self._run_dir), progress(self._run_dir)
        lines = metrics.last_lines(self._run_dir / metrics.METRICS)
        last: Mapping[str, Any] = next((line for line in reversed(lines) if "loss" in line), {})
        timing: Mapping[str, Any] = next(
            iter(reversed(metrics.last_lines(self._run_dir / metrics.TIMINGS))), {}
        )
        ranks = timing.get("rank_seconds") or []
        held, useful = held_seconds(events, metrics.now()), self._step_seconds()
        saved = known["saved_step"]
        speed = known["tokens_per_second"]
        mfu = utilization(last_start(events), speed, plan.world_size)[1] if plan else None
        since = self._began if saved is None else _written(self._run_dir, saved)
        return {
            "step": known["step"] or 0,
            "steps": known["steps"],
            "loss": last.get("loss"),
            "learning_rate": last.get("learning_rate"),
            "grad_norm": last.get("grad_norm"),
            "eval_loss": (known["evaluation"] or {}).get("eval_loss"),
            "tokens_per_second": speed,
            "mfu_ratio": mfu,
            "peak_memory_bytes": timing.get("peak_memory_bytes"),
            "slowest_rank_ratio": max(ranks) / statistics.median(ranks)
            if ranks and min(ranks) > 0
            else None,
            "seconds_left": known["seconds_left"],
            "checkpoint_step": saved,
            "checkpoint_age_seconds": None if since is None else max(0.0, time.time() - since),
            "restarts": known["restarts"],
            "held_seconds": held,
            "step_seconds": useful,
            "lost_seconds": max(0.0, held - useful),
            "goodput_ratio": min(1.0, useful / held) if held else None,
        }

    def _step_seconds(self) -> float:
        """Seconds within steps; only new lines are read, or all where a start has cut off what it repeats."""
        lines = self._timings.read()
        if self._timings.has_begun_anew:
            self._seconds = 0.0
        self._seconds += sum(line["seconds"] for line in lines)
        return self._seconds


def _written(run_dir: Path, step: int) -> float | None:
    """Time at which the checkpoint of a step became whole; None where it is gone by now."""
    try:
        return (checkpoints.folder_of(run_dir, step) / "manifest.json").stat().st_mtime
    except OSError:
        return None
