"""What a node does: kubelet, container runtime, volumes, environment, addresses and names."""
