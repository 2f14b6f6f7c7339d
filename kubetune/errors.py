"""The errors a user can meet, each with the exit code the process ends with.

Exit codes are part of the interface: Kubernetes' podFailurePolicy and the launcher read them.
0 done · 1 our bug · 2 the user's config or data · 3 the environment · 4 diverged · 5 done, but not good enough ·
6 out of memory twice at the same place · 143 stopped early with a good checkpoint · 145 lost a peer. Codes of 128 and
above mean "start me again".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

OK = 0
BUG = 1
USER = 2
ENVIRONMENT = 3
DIVERGED = 4
GATE = 5
OUT_OF_MEMORY = 6
PREEMPTED = 143
LOST_PEER = 145

FINAL = (USER, DIVERGED, GATE, OUT_OF_MEMORY)
"""A failure that another start would only repeat."""


class KubetuneError(Exception):
    """Any error that is explained to the user instead of shown as a traceback."""

    exit_code = BUG


class _Problems(KubetuneError):
    """All that is wrong, each a line."""

    exit_code = USER

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(_Problems):
    """The YAML file, a flag, an override or an environment variable is wrong. Holds every problem found."""


class MissingExtra(ConfigError):
    """What was asked for needs a library that an extra of kubetune brings, and that is not installed."""


class DataError(_Problems):
    """A data file or record is wrong. Holds every problem found, each starting with `file:line`."""


class ModelError(KubetuneError):
    """The model or tokenizer cannot be found, is not permitted, or does not fit the task."""

    exit_code = USER


class EnvironmentFault(KubetuneError):
    """Disk, device, network or cluster: nothing the config or the data could mend."""

    exit_code = ENVIRONMENT


class OutOfMemory(EnvironmentFault):
    """Memory ran out, of a GPU or of the machine, so that a smaller run may do."""


class OutOfMemoryAgain(OutOfMemory):
    """A rank was killed for memory in two starts after the same step, so that a third could only end so too."""

    exit_code = OUT_OF_MEMORY


class Diverged(KubetuneError):
    """Loss or gradient stopped being finite, or the loss stayed too high; the last of them touched no weights."""

    exit_code = DIVERGED


class GateFailed(KubetuneError):
    """The run is done and saved, and metrics of its best checkpoint miss what `evaluation.gate` asks for."""

    exit_code = GATE


class Preempted(KubetuneError):
    """Asked to stop (SIGTERM, Ctrl-C); a checkpoint of this step was committed, unless it is 0."""

    exit_code = PREEMPTED
    kind: str | None = None
    """Its name in exit.json, where the code alone does not tell."""

    def __init__(self, step: int) -> None:
        self.step = step
        # In a pod there is no command to run again: Kubernetes does it after a drain, a person after `kubetune stop`.
        again = "run the same command again to"
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            again = "the next start, after `kubetune stop` that of `kubetune resume`, will"
        where = (
            (f"after step {step}", "continue from there")
            if step
            else ("before the first step", "start")
        )
        super().__init__(f"stopped {where[0]}; {again} {where[1]}")


class Paused(Preempted):
    """Came to `training.pause_at_step`, as it was meant to: the checkpoint of that step was committed."""

    exit_code = OK
    kind = "Paused"

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.args = (
            f"paused after step {step} (training.pause_at_step); a higher one, or none, goes on from there",
        )


class LostPeer(KubetuneError):
    """Another rank died or hung; this one could do no more."""

    exit_code = LOST_PEER


class RankDied(LostPeer):
    """A rank was killed or stood still: the others lost their peer by it."""


def only_followed(code: int, error: str | None) -> bool:
    """True if an end was brought about by that of another: by its exit code and the name of its error."""
    return code in (LOST_PEER, PREEMPTED) and error != RankDied.__name__


def first_line(error: BaseException) -> str:
    """First line of an error, without the stack of torch's C++ below, say; its kind where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def causes(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """An error, what caused it, and so on; `hidden`: also where the raiser would not have it shown."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (seen.__context__ if hidden else None)
