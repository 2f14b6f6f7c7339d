"""Runs on a cluster: manifests and their mistakes, the API server, and runs from submit to fetch.

`manifests` is a pure function of config and plan, `lint` knows mistakes that schemas cannot see, `api` speaks with the
API server, `cluster` submits, follows, stops and fetches. Not for anything that runs in a rank. Read `manifests/run_spec`
first.
"""
