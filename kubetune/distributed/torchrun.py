"""torchrun as the agent needs it: the same launcher, which tells what became of each rank, and which node never came.

    python -P -m kubetune.distributed.torchrun FD SECONDS [torchrun's own arguments]

At a stop ranks have SECONDS to save and end. To the file descriptor FD goes one JSON line `[rank, status, seconds since
the epoch]` for each rank that failed, the first one seen first, or one text where the nodes did not meet. torchrun
itself would only return 1, and end with tracebacks of its own after every stop and many a success.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from signal import Signals
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import collector, files, processes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext
    from torch.distributed.elastic.rendezvous import RendezvousInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

Tell = Callable[..., None]


def main(argv: Sequence[str]) -> int:
    """Run torchrun and return an exit code of errors.py; 1 means: see what was told."""

    def tell(*facts: object) -> None:
        os.write(int(argv[0]), "".join(json.dumps(fact) + "\n" for fact in facts).encode())

    try:
        processes.try_threads()
        return _run(int(argv[1]), argv[2:], tell)
    except Exception as error:
        if (fault := files.fault_of(error)) is None:
            raise
        tell(str(fault))
        return fault.exit_code


def _run(patience: int, arguments: Sequence[str], tell: Tell) -> int:
    import logging

    with collector.paused():
        _quiet()
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
        from torch.distributed.run import parse_args, run

    from kubetune.distributed import rendezvous

    # Its warnings and errors tell of signals we sent and of ranks that explain themselves.
    logging.disable(logging.ERROR)
    StaticTCPRendezvous.next_rendezvous = _roll_called(StaticTCPRendezvous.next_rendezvous)  # type: ignore[method-assign]
    try:
        run(parse_args([*_patience(patience), *arguments]))
    except ChildFailedError as error:
        tell(*([rank, one.exitcode, one.timestamp] for rank, one in error.failures.items()))
        return errors.BUG
    except SignalException:
        return errors.PREEMPTED
    except errors.EnvironmentFault as fault:
        tell(str(fault))
        return errors.LOST_PEER if isinstance(fault, rendezvous.Absent) else fault.exit_code
    except (RendezvousError, DistError) as error:
        tell(f"the nodes lost each other before training: {errors.first_line(error)}")
        return errors.LOST_PEER
    return errors.OK


def _quiet() -> None:
    """Silence torch's C++, which shows a lost peer as stacks of itself: warnings in ranks, all of it here."""
    level = "TORCH_CPP_LOG_LEVEL"
    if level not in os.environ:
        os.environ[level] = "FATAL"
        import torch  # noqa: F401  # which reads it, once

        os.environ[level] = "ERROR"


def _roll_called(next_rendezvous: Any) -> Any:
    """The same rendezvous of nodes, but it ends naming those that did not come in time."""

    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from kubetune.distributed import rendezvous

    def meet(handler: StaticTCPRendezvous) -> RendezvousInfo:
        if handler._store is None:
            host, port, node, nodes = (
                handler.master_addr,
                handler.master_port,
                handler.rank,
                handler.world_size,
            )
            seconds, address = handler.timeout.total_seconds(), f"{host}:{port}"
            handler._store = rendezvous.open_store(
                "node", node, nodes, host, port, seconds, serves=node == 0
            )
            board = PrefixStore("kubetune.nodes", handler._store)
            rendezvous.Rendezvous(node, nodes, nodes, seconds, address, board, "node").call_roll()
        info: RendezvousInfo = next_rendezvous(handler)
        return info

    return meet


def _patience(seconds: int) -> list[str]:
    """torchrun's argument for how long ranks may take to end; older ones have none, and kill after half a minute."""
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
