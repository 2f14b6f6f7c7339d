"""A stand-in for a Kubernetes cluster: a control plane whose pods are real processes on this machine.

README.md says what of the real API it speaks and what it refuses. Inside, from the ground up: `schemas` (the strict
schemas of each kind), `state` (objects and where they are kept), `node` (kubelet, containers, volumes, names),
`controllers` (what makes pods of workloads), `api` (HTTP), and `server`, which puts them together in one event loop.

It knows nothing of kubetune, and kubetune nothing of it.
"""
