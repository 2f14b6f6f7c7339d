"""Ask servers again and again; tell hooks and Prometheus when one becomes another model, or the model again."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from kubetune.base import logs
from kubetune.config import consent
from kubetune.config.resolved import read_config
from kubetune.config.schema.tracking import HooksConfig, PrometheusConfig
from kubetune.errors import KubetuneError
from kubetune.extras import is_installed
from kubetune.result.served.known_model import KnownModel
from kubetune.result.served.server_check import check_served
from kubetune.rundir import events, metrics
from kubetune.supervisor.observers import hooks, prometheus

# Name -> kind and meaning; in Prometheus the name begins with `kubetune_`.
METRICS: Final = {
    "served_is_model": ("gauge", "1 if the last check proved that it is the model, else 0."),
    "served_effect_ratio": ("gauge", "Times the effect of training that it has: 1 is right."),
}
Event = dict[str, Any]


@dataclass
class Watched:
    """A model that is asked for again and again."""

    known: KnownModel
    url: str
    name: str | None  # that requests ask for; None: the run's
    timeout: float  # of a check, in seconds
    hooks: HooksConfig
    # Of the last check: right, not proved, no answer, or the names of the points that are wrong. To begin right is no news.
    state: str = "right"
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def called(self) -> str:
        """What people call it."""
        return self.name or self.known.name

    def look(self) -> Event | None:
        """Ask once. Return, and tell the hook, if the state is another one than before."""
        before = self.state
        numbers = {}
        try:
            check = check_served(self.known, self.url, self.name, self.timeout)
        except KubetuneError as error:
            reason: str | None = str(error)
            self.state = "no answer"
        else:
            reason = check.reason_against
            wrong = [name for name, point in check.points.items() if point.state == "wrong"]
            self.state = ", ".join(wrong) or ("not proved" if reason else "right")
            for point in check.points.values():
                if "share" in point.numbers:
                    numbers["served_effect_ratio"] = float(point.numbers["share"])
        self.numbers = {"served_is_model": float(reason is None), **numbers}
        if self.state == before:
            return None
        event = {
            "schema_version": events.VERSION,
            "time": metrics.now(),
            "event": "served",
            "model": self.called,
            "ok": reason is None,
            "reason": logs.scrub(reason or ""),
        }
        run_dir = self.known.run_dir
        if run_dir is not None and hooks.wants(self.hooks, event):
            seconds = self.hooks.timeout_seconds
            failure = hooks.call(self.hooks, event, run_dir, self.known.name, seconds)
            if failure is not None:
                logs.RESULT.warning("hooks.on_event failed: %s", failure)
        return event


def allowed_hooks(known: KnownModel, trust_code: str | None) -> HooksConfig:
    """Return the hooks of a run. Raise ConfigError for a command that nobody allowed on this machine."""
    if known.run_dir is None:
        return HooksConfig()
    config = read_config(known.run_dir)
    consent.require(consent.effects_of(config, ["hooks"]), known.run_dir, trust_code)
    return config.hooks


def watch(models: Sequence[Watched], seconds: float) -> Iterator[Event]:
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
