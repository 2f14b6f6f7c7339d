"""Serving a result with vLLM on Kubernetes: what can be served, on which server, and the objects that do it.

Not for running a model on this machine (result/inference). Read `served_targets` first, then `manifests`.
"""
