"""Serving a result with vLLM on Kubernetes."""
