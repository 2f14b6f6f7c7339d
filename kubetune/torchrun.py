"""torchrun as the agent needs it: the same launcher, which leaves a note of what became of each rank.

    python -m kubetune.torchrun NOTE SECONDS [torchrun's own arguments]

At a stop ranks have SECONDS to save and end. NOTE receives one JSON line `[rank, status, seconds since the epoch]` for
each rank that failed, the first one seen first. torchrun itself would only return 1, and end with tracebacks of its own
after every stop and many a success.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from signal import Signals

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser, parse_args, run

from kubetune import errors, processes


def main(argv: Sequence[str]) -> int:
    """Run torchrun and return an exit code of errors.py; 1 means: see the note."""
    note, patience, arguments = Path(argv[0]), _patience(int(argv[1])), argv[2:]
    # Its warnings and errors tell of signals we sent and of ranks that explain themselves.
    logging.disable(logging.ERROR)
    try:
        run(parse_args([*patience, *arguments]))
    except ChildFailedError as error:
        lines = [json.dumps([rank, one.exitcode, one.timestamp]) + "\n" for rank, one in error.failures.items()]
        note.write_text("".join(lines))
        return errors.BUG
    except SignalException:
        return errors.PREEMPTED
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        print(f"kubetune: the nodes did not find each other: {error}", file=sys.stderr, flush=True)
        return errors.LOST_PEER
    return errors.OK


def _patience(seconds: int) -> list[str]:
    """torchrun's argument for how long ranks may take to end; older ones have none, and kill after half a minute."""
    if "--shutdown-timeout" in get_args_parser().format_help():
        return ["--shutdown-timeout", str(seconds)]
    close = PContext.close

    def close_patiently(self: PContext, death_sig: Signals | None = None, timeout: int = seconds) -> None:
        close(self, death_sig, timeout)

    PContext.close = close_patiently  # type: ignore[method-assign]
    return []


if __name__ == "__main__":
    processes.leave(main(sys.argv[1:]))
