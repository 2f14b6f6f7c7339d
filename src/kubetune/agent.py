"""`python -m kubetune.agent`, the first process of a run and of a pod: a name that manifests keep."""

if __name__ == "__main__":
    import signal

    # Before imports, which take a while: the kernel drops what process 1 neither blocks nor handles (`Relay` does).
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    from kubetune.__main__ import open_missing_streams

    open_missing_streams()
    from kubetune.supervisor.agent import run

    run()
