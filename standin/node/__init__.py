"""A node: kubelet, container runtime, volumes, environment, addresses and names."""
