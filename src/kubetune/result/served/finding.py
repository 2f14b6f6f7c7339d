"""What a check has found out about a server, point by point."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

# `differs`: another setting, which requests may set. `unknown`: the server could not be asked, or nothing is known that
# its answer could be compared with.
State = Literal["right", "wrong", "differs", "unknown"]

# The point without which nothing is proved of the weights.
WEIGHTS = "log-probabilities"


@dataclass(frozen=True)
class Place:
    """The first place at which the ids of a conversation differ, as texts of a few tokens."""

    before: str
    expected: str
    served: str


@dataclass(frozen=True)
class Finding:
    """One point of a check."""

    point: str  # such as `ids`
    state: State
    text: str  # one sentence, without the point
    # More lines for people, and numbers for programs.
    lines: tuple[str, ...] = ()
    numbers: dict[str, Any] | None = None
    places: tuple[Place, ...] = ()  # of ids


@dataclass(frozen=True)
class Report:
    """All points of a check of one model at one address."""

    url: str
    model: str
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> list[Finding]:
        """The points at which the server is not the model."""
        return [finding for finding in self.findings if finding.state == "wrong"]

    @property
    def is_proved(self) -> bool:
        """True if nothing is wrong, and the weights are known to be right."""
        states = {finding.state for finding in self.findings if finding.point == WEIGHTS}
        return not self.wrong and states == {"right"}

    def to_json(self) -> dict[str, Any]:
        """Return it as programs read it."""
        return asdict(self) | {"is_proved": self.is_proved}
