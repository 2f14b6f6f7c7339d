"""The errors that a user can meet, each with the exit code that the process ends with.

Exit codes are part of the interface: Kubernetes' podFailurePolicy and the launcher read them. docs/design.md says what
each one means. Codes of 128 and above mean "start me again".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

OK = 0
BUG = 1  # ours
USER = 2  # the user's config or data
ENVIRONMENT = 3  # disk, device, network, cluster
DIVERGED = 4
GATE = 5  # done, but not good enough
OUT_OF_MEMORY = 6  # twice after the same step
PREEMPTED = 143  # stopped early with a good checkpoint
LOST_PEER = 145

# Failures that another start would only repeat.
FINAL = (USER, DIVERGED, GATE, OUT_OF_MEMORY)

# How a message ends where that is true.
NOTHING_WRITTEN = "Nothing was written."


class KubetuneError(Exception):
    """Any error that is explained to the user instead of shown as a traceback."""

    exit_code = BUG

    @property
    def problem(self) -> str:
        """Return the message as part of another sentence: without its full stop, and without what was written."""
        return str(self).removesuffix(NOTHING_WRITTEN).rstrip(" .")


class _Problems(KubetuneError):
    """An error with several problems, one on each line of its message."""

    exit_code = USER

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class ConfigError(_Problems):
    """The YAML file, a flag, an override or an environment variable is wrong. Holds every problem found."""


class MissingExtra(ConfigError):
    """A library is missing that one of kubetune's extras installs."""


class DataError(_Problems):
    """A data file or record is wrong. Holds every problem found, each starting with `file:line`."""


class ModelError(KubetuneError):
    """The model or tokenizer cannot be found, is not permitted, or does not fit the task."""

    exit_code = USER


class EnvironmentFault(KubetuneError):
    """Disk, device, network or cluster: nothing that a change of the config or the data could fix."""

    exit_code = ENVIRONMENT


class OutOfMemory(EnvironmentFault):
    """The memory of a GPU or of the machine ran out. A smaller run may fit."""


class OutOfMemoryAgain(OutOfMemory):
    """A rank was killed for memory in two starts after the same step. A third start would end in the same way."""

    exit_code = OUT_OF_MEMORY


class Diverged(KubetuneError):
    """Loss or gradient are not finite, or the loss stayed too high. The step that shows it has not changed the weights."""

    exit_code = DIVERGED


class GateFailed(KubetuneError):
    """The run is done and saved, but its best checkpoint misses a condition of `evaluation.gate`."""

    exit_code = GATE


class Preempted(KubetuneError):
    """The run was asked to stop (SIGTERM, Ctrl-C). Its last step is in a checkpoint, unless there was no step."""

    exit_code = PREEMPTED
    # The error's name in exit.json, where the exit code alone does not tell.
    kind: str | None = None

    def __init__(self, step: int) -> None:
        self.step = step
        # In a pod there is no command to run again: Kubernetes does it after a drain, a person after `kubetune stop`.
        again = "run the same command again to"
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            again = "the next start, after `kubetune stop` that of `kubetune resume`, will"
        if step:
            message = f"stopped after step {step:,}; {again} continue from there"
        else:
            message = f"stopped before the first step; {again} start"
        super().__init__(message)


class Paused(Preempted):
    """The run reached `training.pause_at_step`, and the checkpoint of that step is committed."""

    exit_code = OK
    kind = "Paused"

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.args = (
            f"paused after step {step} (training.pause_at_step); a higher one, or none, goes on from there",
        )


class LostPeer(KubetuneError):
    """Another rank died or hung, so this one cannot go on."""

    exit_code = LOST_PEER


class RankDied(LostPeer):
    """A rank was killed or hung. The other ranks end with LostPeer."""


def only_followed(code: int, error: str | None) -> bool:
    """True if a process only ended because another one had, judged by its exit code and the name of its error."""
    return code in (LOST_PEER, PREEMPTED) and error != RankDied.__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    # torch's messages go on with the stack of its C++ code.
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def causes(error: BaseException, *, hidden: bool = False) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on. `hidden`: causes that `raise … from None` hides too."""
    current: BaseException | None = error
    while current is not None:
        yield current
        following = current.__cause__
        if following is None and hidden:
            following = current.__context__
        current = following
