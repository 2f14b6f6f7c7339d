"""Ask servers again and again; tell hooks and Prometheus when one becomes another model, or the model again."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kubetune.base import logs
from kubetune.config import consent
from kubetune.config.resolved import read_config
from kubetune.config.schema.tracking import HooksConfig, PrometheusConfig
from kubetune.errors import KubetuneError
from kubetune.extras import is_installed
from kubetune.result.served.check import reason_against
from kubetune.result.served.finding import WEIGHTS, Report
from kubetune.rundir import events, metrics
from kubetune.supervisor.observers import hooks, prometheus

# Name -> kind and meaning; in Prometheus the name begins with `kubetune_`.
METRICS: Final = {
    "served_is_model": (
        "gauge",
        "1 if the last check proved that the server is the model, else 0.",
    ),
    "served_answers": ("gauge", "1 if the server answered the last check, else 0."),
    "served_effect_ratio": (
        "gauge",
        "How many times the effect of training the server has: 1 is right.",
    ),
    "served_distance": ("gauge", "Root mean square of log-probabilities from the trained model's."),
    "served_checked_seconds": ("gauge", "When the last check ended, in seconds since 1970."),
}
EVENT: Final = "served"


@dataclass
class Watched:
    """A model that is asked for again and again."""

    name: str
    ask: Callable[[], Report]
    run_dir: Path | None  # whose hooks are called
    hooks: HooksConfig = field(default_factory=HooksConfig)
    # What the last check has found: right, wrong, or no answer. None before the first.
    state: str | None = None
    reason: str = ""  # why it is not right
    is_news: bool = False  # another state than before
    numbers: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_run(
        cls, name: str, ask: Callable[[], Report], run_dir: Path | None, trust_code: str | None
    ) -> Watched:
        """Return it with the hooks of its run. Raise ConfigError for a command that nobody allowed on this machine."""
        settings = HooksConfig()
        if run_dir is not None:
            config = read_config(run_dir)
            consent.require(consent.effects_of(config, ["hooks"]), run_dir, trust_code)
            settings = config.hooks
        return cls(name, ask, run_dir, settings)

    def look(self) -> None:
        """Ask once. Tell the hook if the state is another one than before; to be right from the start is no news."""
        before = self.state
        self.reason = ""
        try:
            report = self.ask()
        except KubetuneError as error:
            self.state = "no answer"
            self.reason = str(error)
            self.numbers = {"served_is_model": 0.0, "served_answers": 0.0}
        else:
            self.reason = reason_against(report) or ""
            self.state = "wrong" if self.reason else "right"
            self.numbers = _numbers(report)
        self.numbers["served_checked_seconds"] = time.time()
        self.is_news = self.state != before
        if self.is_news and not (before is None and self.state == "right"):
            self._tell()

    def _tell(self) -> None:
        command = self.hooks.on_event
        if command is None or self.run_dir is None:
            return
        if self.hooks.events and EVENT not in self.hooks.events:
            return
        event: dict[str, Any] = {
            "schema_version": events.VERSION,
            "time": metrics.now(),
            "event": EVENT,
            "model": self.name,
            "ok": self.state == "right",
            "reason": logs.scrub(self.reason),
        }
        variables = {"KUBETUNE_RUN_DIR": str(self.run_dir.absolute()), "KUBETUNE_EVENT": EVENT}
        failure = hooks.call(
            shlex.split(command), event, variables, self.run_dir, self.hooks.timeout_seconds
        )
        if failure is not None:
            logs.RESULT.warning("hooks.on_event failed for %s: %s", EVENT, failure)


def watch(models: list[Watched], seconds: float) -> Iterator[None]:
    """Look at all of them for ever, with so many seconds between. Yield after each round."""
    stop = None
    if is_installed("prometheus_client"):
        stop = prometheus.started(
            PrometheusConfig().port,
            METRICS,
            ("model",),
            lambda: {(m.name,): m.numbers for m in models},
        )
    try:
        while True:
            for model in models:
                model.look()
            yield
            time.sleep(seconds)
    finally:
        if stop is not None:
            stop()


def _numbers(report: Report) -> dict[str, float]:
    """Return the numbers of a check for Prometheus."""
    numbers = {"served_is_model": float(report.is_proved), "served_answers": 1.0}
    for finding in report.findings:
        if finding.point == WEIGHTS and finding.numbers:
            for name, key in (("effect_ratio", "share"), ("distance", "to_trained")):
                if key in finding.numbers:
                    numbers[f"served_{name}"] = float(finding.numbers[key])
    return numbers
