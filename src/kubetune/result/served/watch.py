"""Ask servers again and again; tell hooks and Prometheus when one becomes another model, or the model again."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from kubetune.base import logs
from kubetune.config import consent
from kubetune.config.resolved import read_config
from kubetune.config.schema.tracking import HooksConfig, PrometheusConfig
from kubetune.errors import KubetuneError
from kubetune.extras import is_installed
from kubetune.result.served.check import check_served
from kubetune.result.served.known_model import KnownModel
from kubetune.result.served.points import WEIGHTS, ServerCheck
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
}
EVENT: Final = "served"
Event = dict[str, Any]


@dataclass
class Watched:
    """A model that is asked for again and again."""

    known: KnownModel
    url: str
    name: str | None  # that requests ask for; None: the run's
    timeout: float  # of a check, in seconds
    hooks: HooksConfig
    # Of the last check: right, wrong, or no answer. None before the first.
    state: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def called(self) -> str:
        """What people call it."""
        return self.name or self.known.name

    def look(self) -> Event | None:
        """Ask once. Return, and tell the hook, if the state is another one than before. To begin right is no news."""
        before = self.state or "right"
        reason = None
        try:
            check = check_served(self.known, self.url, self.name, self.timeout)
            reason = check.reason_against
            self.state = "wrong" if reason else "right"
            self.numbers = _numbers(check)
        except KubetuneError as error:
            reason = str(error)
            self.state = "no answer"
            self.numbers = {"served_is_model": 0.0, "served_answers": 0.0}
        if self.state == before:
            return None
        event = {
            "schema_version": events.VERSION,
            "time": metrics.now(),
            "event": EVENT,
            "model": self.called,
            "ok": reason is None,
            "reason": logs.scrub(reason or ""),
        }
        self._tell(event)
        return event

    def _tell(self, event: Event) -> None:
        command = self.hooks.on_event
        run_dir = self.known.run_dir
        is_wanted = not self.hooks.events or EVENT in self.hooks.events
        if command is None or run_dir is None or not is_wanted:
            return
        variables = {"KUBETUNE_RUN_DIR": str(run_dir.absolute()), "KUBETUNE_EVENT": EVENT}
        seconds = self.hooks.timeout_seconds
        failure = hooks.call(shlex.split(command), event, variables, run_dir, seconds)
        if failure is not None:
            logs.RESULT.warning("hooks.on_event failed for %s: %s", EVENT, failure)


def allowed_hooks(known: KnownModel, trust_code: str | None) -> HooksConfig:
    """Return the hooks of a run. Raise ConfigError for a command that nobody allowed on this machine."""
    if known.run_dir is None:
        return HooksConfig()
    config = read_config(known.run_dir)
    consent.require(consent.effects_of(config, ["hooks"]), known.run_dir, trust_code)
    return config.hooks


def watch(models: list[Watched], seconds: float) -> Iterator[Event]:
    """Look at all of them for ever, with so many seconds between. Yield what has changed."""
    with ExitStack() as at_end:
        if is_installed("prometheus_client"):

            def numbers() -> dict[tuple[str, ...], dict[str, float]]:
                return {(model.called,): model.numbers for model in models}

            port = PrometheusConfig().port
            at_end.callback(prometheus.started(port, METRICS, ("model",), numbers))
        while True:
            for model in models:
                event = model.look()
                if event is not None:
                    yield event
            time.sleep(seconds)


def _numbers(check: ServerCheck) -> dict[str, float]:
    """Return the numbers of a check for Prometheus."""
    numbers = {"served_is_model": float(check.is_proved), "served_answers": 1.0}
    for point in check.points:
        if point.name == WEIGHTS and point.numbers and "share" in point.numbers:
            numbers["served_effect_ratio"] = float(point.numbers["share"])
    return numbers
