"""Runs on a cluster: submitting, finding, following, stopping and fetching them. What `kubetune train` needs none of.

Not for manifests, which are pure (manifests), nor for the protocol (k8s/api). Read `cluster_runs` first, then `log_follow`.
"""
