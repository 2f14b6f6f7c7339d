"""`torchrun … -m kubetune.worker`, one rank of a run: a name that scripts keep."""

if __name__ == "__main__":
    from kubetune.__main__ import open_missing_streams

    open_missing_streams()
    from kubetune.base import processes
    from kubetune.training.worker import main

    processes.leave(main())
