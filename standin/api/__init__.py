"""The API server: requests in, admission, patches, watches, logs, exec and port-forward."""
