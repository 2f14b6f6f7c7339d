"""torchrun for the agent: the same launcher, but it reports how each rank ended.

    python -P -m kubetune.distributed.torchrun FD SECONDS [torchrun's own arguments]

At a stop, ranks have SECONDS to save and end. For each rank that failed, one JSON line `[rank, status, seconds since the
epoch]` is written to the file descriptor FD, in the order in which they were seen; or one text, if the nodes did not
meet. torchrun itself only returns 1, and prints tracebacks after every stop and many a success.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from signal import Signals
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import collector, faults, processes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

Report = Callable[..., None]


def main(argv: Sequence[str]) -> int:
    """Run torchrun and return an exit code of errors.py. 1 means that ranks failed, as the report says."""

    def report(*facts: object) -> None:
        # One write, so that the lines of a report stay together.
        os.write(int(argv[0]), "".join(json.dumps(fact) + "\n" for fact in facts).encode())

    try:
        processes.try_threads()
        return _run(int(argv[1]), argv[2:], report)
    except Exception as error:
        fault = faults.fault_of(error)
        if fault is None:
            raise
        report(str(fault))
        return fault.exit_code


def _run(patience: int, arguments: Sequence[str], report: Report) -> int:
    import logging

    with collector.paused():
        _quiet()
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.run import parse_args, run

    # torchrun logs signals that we have sent, and failures of ranks that have explained themselves.
    logging.disable(logging.ERROR)
    try:
        run(parse_args([*_patience(patience), *arguments]))
    except ChildFailedError as error:
        report(
            *(
                [rank, failure.exitcode, failure.timestamp]
                for rank, failure in error.failures.items()
            )
        )
        return errors.BUG
    except SignalException:
        return errors.PREEMPTED
    except (RendezvousError, DistError) as error:
        report(f"the nodes lost each other before training: {errors.first_line(error)}")
        return errors.LOST_PEER
    return errors.OK


def _quiet() -> None:
    """Silence torch's C++ code, which prints its own stacks if a peer is lost.

    This process prints nothing of it, and ranks print errors but no warnings. torch reads the variable once, when it is
    imported; ranks inherit the second value.
    """
    level = "TORCH_CPP_LOG_LEVEL"
    if level not in os.environ:
        os.environ[level] = "FATAL"
        import torch  # noqa: F401

        os.environ[level] = "ERROR"


def _patience(seconds: int) -> list[str]:
    """Return torchrun's argument for how long ranks may take to end.

    Older versions have no such argument and kill ranks after half a minute. There, the method that does so is replaced.
    """
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.run import get_args_parser

    if "--shutdown-timeout" in get_args_parser().format_help():
        return ["--shutdown-timeout", str(seconds)]
    close = PContext.close

    def close_patiently(
        self: PContext, death_sig: Signals | None = None, timeout: int = seconds
    ) -> None:
        close(self, death_sig, timeout)

    PContext.close = close_patiently  # type: ignore[method-assign]
    return []


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))
