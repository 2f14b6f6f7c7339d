"""`kubetune cluster`: a Kubernetes cluster with GPUs on Nebius, made, looked at, deleted. Read `cluster_file` first."""
