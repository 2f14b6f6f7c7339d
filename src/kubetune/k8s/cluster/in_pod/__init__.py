"""Questions that kubetune puts to a pod: run there by exec, with the pod's Python, answered in JSON on standard output.

    python -m kubetune.k8s.cluster.in_pod progress RUN_DIR       step, loss, speed, time left, how it ended
    python -m kubetune.k8s.cluster.in_pod status RUN_DIR         what `kubetune watch` shows
    python -m kubetune.k8s.cluster.in_pod list RUN_DIR [GLOB …]  each file with its size and SHA-256, each link
    python -m kubetune.k8s.cluster.in_pod usage                  CPU, memory, /dev/shm and the volumes of this pod
    python -m kubetune.k8s.cluster.in_pod unpack FOLDER          a tar archive from standard input
    python -m kubetune.k8s.cluster.in_pod idle                   nothing, until it is asked to stop
    python -m kubetune.k8s.cluster.in_pod start FOLDER COMMAND…  a command in the background, with the code in FOLDER/tree
    python -m kubetune.k8s.cluster.in_pod follow FOLDER OFFSET   what it prints, to its end; its exit code
    python -m kubetune.k8s.cluster.in_pod stop FOLDER            SIGTERM for it; its exit code

Progress comes this way, not by the API server: pods have no token for it and need none, every kind of workload works
alike, and what is shown is what the run directory says, not what a log line happened to look like.
"""
