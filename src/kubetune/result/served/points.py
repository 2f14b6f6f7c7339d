"""What a check says about a server, point by point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

# `differs`: another setting, which requests may set. `unknown`: the server could not be asked, or nothing is known that
# its answer could be compared with.
State = Literal["right", "wrong", "differs", "unknown"]

# The point without which nothing is proved of the weights.
WEIGHTS = "log-probabilities"


@dataclass(frozen=True)
class IdsDifference:
    """The first place at which the ids of a conversation differ, as texts of a few tokens."""

    before: str
    expected: str
    served: str


@dataclass(frozen=True)
class ServedPoint:
    """What is said of one point."""

    state: State
    text: str  # one sentence
    # More lines for people, and numbers for programs.
    lines: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    differences: tuple[IdsDifference, ...] = ()


@dataclass(frozen=True)
class ServerCheck:
    """All points of a check of one model at one address, by their names, such as `ids`."""

    url: str
    model: str
    points: Mapping[str, ServedPoint]

    @property
    def reason_against(self) -> str | None:
        """Why the server does not pass for the model, None if it does."""
        wrong = [f"{name}: {it.text}" for name, it in self.points.items() if it.state == "wrong"]
        if wrong:
            return "\n".join([f"{self.url} does not serve the model that was trained:", *wrong])
        if self.points[WEIGHTS].state != "right":
            return (
                f"{self.url}: nothing is wrong with {self.model}, but its weights could not be compared; so it is not "
                "proved"
            )
        return None

    @property
    def is_proved(self) -> bool:
        """True if nothing is wrong, and the weights are known to be right."""
        return self.reason_against is None

    def to_json(self) -> dict[str, Any]:
        """Return it as programs read it."""
        return asdict(self) | {"is_proved": self.is_proved}
