"""Serve the state of a run to Prometheus: `/metrics`, on loopback or, in a pod, on its named port.

The run directory is read at each request. Labels are the run and the node, never a rank, so that there are few series.
Node 0 serves the numbers of the whole run.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.errors import ConfigError
from kubetune.plan.actuals import held_seconds
from kubetune.plan.plan import Plan
from kubetune.rundir import checkpoints, heartbeat, metrics
from kubetune.rundir.status import progress
from kubetune.rundir.throughput import last_start, utilization
from kubetune.supervisor.place import Place

if TYPE_CHECKING:
    from kubetune.supervisor.observers.observer_process import Observed

# Name -> (kind, meaning) of each metric. In Prometheus the name begins with `kubetune_`.
METRICS: dict[str, tuple[str, str]] = {
    "step": ("gauge", "Optimizer steps completed."),
    "steps": ("gauge", "Optimizer steps planned."),
    "loss": ("gauge", "Loss of the last step."),
    "learning_rate": ("gauge", "Learning rate of the last step."),
    "grad_norm": ("gauge", "Norm of the last step's gradient."),
    "eval_loss": ("gauge", "Loss of the last evaluation."),
    "reward": ("gauge", "Mean reward of the last step's answers, of a run by reward."),
    "eval_reward": ("gauge", "Mean reward in the last evaluation, of a run by reward."),
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
        "Time since the newest checkpoint, or since this start if there is none.",
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


def is_wanted(settings: Mapping[str, Any], environ: Mapping[str, str], node: int) -> bool:
    """True if the config asks for it, on any node: each serves its own numbers."""
    return bool((settings.get("tracking") or {}).get("prometheus"))


def observe(run: Observed) -> None:
    """Serve until the run has ended."""
    config = run.prometheus
    assert config is not None
    state = NodeNumbers(run.run_dir, run.node)
    labels = (run.name, str(run.node))
    stop = started(config.port, METRICS, ("run", "node"), lambda: {labels: state.read()})
    run.ended.wait()
    stop()


def started(
    port: int,
    kinds: Mapping[str, tuple[str, str]],
    labels: Sequence[str],
    read: Callable[[], Mapping[tuple[str, ...], Mapping[str, float]]],
) -> Callable[[], None]:
    """Serve the numbers that `read` returns by the values of their labels. Return what ends it."""
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    families = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}

    # Asked at each request, so that nothing has to be updated in between.
    class Collector:
        def collect(self) -> Iterator[Any]:
            by_labels = read()
            for name, (kind, text) in kinds.items():
                family = families[kind](f"kubetune_{name}", text, labels=list(labels))
                for values, numbers in by_labels.items():
                    if name in numbers:
                        family.add_metric(list(values), numbers[name])
                if family.samples:
                    yield family

    # Without numbers about this process itself.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())  # type: ignore[arg-type, unused-ignore]

    # Prometheus reaches a pod from outside of it. On a laptop nobody else needs the numbers.
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    address = "127.0.0.1"
    if in_pod:
        address = "0.0.0.0"
    try:
        server, _ = start_http_server(port, address, registry)
    except OSError:
        if in_pod:
            raise  # the manifest names this port
        # Another run on this machine has the port: take any.
        server, _ = start_http_server(0, address, registry)
    print(
        f"kubetune: metrics for Prometheus at http://{address}:{server.server_port}/metrics",
        file=sys.stderr,
    )

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


class NodeNumbers:
    """Reads a node's numbers: name in METRICS -> value, without those that are not known yet."""

    def __init__(self, run_dir: Path, node: int) -> None:
        self._run_dir = run_dir
        self._node = node
        self._began = time.time()
        self._seconds = 0.0  # within steps, as far as the timings were read
        self._timings = metrics.follower(run_dir / metrics.TIMINGS)

    def read(self) -> dict[str, float]:
        """Return the numbers as they are now."""
        try:
            plan = Plan.read(self._run_dir / metrics.PLAN)
        except (OSError, ConfigError):  # not written yet, or damaged
            plan = None

        # Node 0 has the whole run's numbers. Every node has its own ranks' silence.
        values: dict[str, float | None] = {}
        if self._node == 0:
            values = self._of_run(plan)
        if plan is not None:
            values["heartbeat_age_seconds"] = self._silence(plan)
        return {name: float(value) for name, value in values.items() if value is not None}

    def _silence(self, plan: Plan) -> float | None:
        """Return the longest time that a rank of this node has made no progress, in seconds."""
        ranks = Place(plan.nodes, plan.processes_per_node, self._node).ranks
        now = time.time()
        silences = []
        for beat in heartbeat.read_beats(self._run_dir):
            if beat["rank"] in ranks:
                silences.append(now - beat["since"])
        return max(silences, default=None)

    def _of_run(self, plan: Plan | None) -> dict[str, float | None]:
        """Return the numbers of the whole run; None for those not known."""
        events = metrics.read_events(self._run_dir)
        known = progress(self._run_dir)
        # Lines of evaluations have other numbers, so the last line of a step is looked for.
        last: Mapping[str, Any] = {}
        for line in metrics.last_lines(self._run_dir / metrics.METRICS):
            if "loss" in line:
                last = line

        timings = metrics.last_lines(self._run_dir / metrics.TIMINGS)
        timing: Mapping[str, Any] = {}
        if timings:
            timing = timings[-1]

        # Only steps that were not repeated later were useful.
        held = held_seconds(events, metrics.now())
        useful = self._step_seconds()
        goodput = None
        if held:
            goodput = min(1.0, useful / held)

        evaluation = known["evaluation"] or {}
        speed = known["tokens_per_second"]
        mfu = None
        if plan is not None:
            _, mfu = utilization(last_start(events), speed, plan.world_size)

        return {
            "step": known["step"] or 0,
            "steps": known["steps"],
            "loss": last.get("loss"),
            "learning_rate": last.get("learning_rate"),
            "grad_norm": last.get("grad_norm"),
            "eval_loss": evaluation.get("eval_loss"),
            "reward": last.get("reward"),
            "eval_reward": evaluation.get("eval_reward"),
            "tokens_per_second": speed,
            "mfu_ratio": mfu,
            "peak_memory_bytes": timing.get("peak_memory_bytes"),
            "slowest_rank_ratio": _slowest_ratio(timing.get("rank_seconds") or []),
            "seconds_left": known["seconds_left"],
            "checkpoint_step": known["saved_step"],
            "checkpoint_age_seconds": self._checkpoint_age(known["saved_step"]),
            "restarts": known["restarts"],
            "held_seconds": held,
            "step_seconds": useful,
            "lost_seconds": max(0.0, held - useful),
            "goodput_ratio": goodput,
        }

    def _checkpoint_age(self, step: int | None) -> float | None:
        """Return the seconds since the newest checkpoint or, if there is none, since this start."""
        # A run that never saves grows old too, so that an alert on the age fires.
        since: float | None = self._began
        if step is not None:
            since = _written(self._run_dir, step)
        if since is None:
            return None
        return max(0.0, time.time() - since)

    def _step_seconds(self) -> float:
        """Return the seconds within steps.

        Only new lines are read, or all lines after a start that has cut off the steps that it repeats.
        """
        lines = self._timings.read()
        if self._timings.has_begun_anew:
            self._seconds = 0.0
        self._seconds += sum(line["seconds"] for line in lines)
        return self._seconds


def _slowest_ratio(rank_seconds: Sequence[float]) -> float | None:
    """Return the time of the slowest rank as a multiple of the median."""
    if not rank_seconds or min(rank_seconds) <= 0:
        return None
    return max(rank_seconds) / statistics.median(rank_seconds)


def _written(run_dir: Path, step: int) -> float | None:
    """Return when the checkpoint of a step was completed, None if it was removed meanwhile."""
    try:
        return (checkpoints.folder_of(run_dir, step) / "manifest.json").stat().st_mtime
    except OSError:
        return None
