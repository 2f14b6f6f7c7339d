"""A stand-in for a Kubernetes cluster: a control plane for tests whose pods are real processes on this machine.

kubectl and lightkube talk to it over HTTP. Containers run in namespaces of their own, with addresses, DNS names,
volumes, users, grace periods and exit codes; so that submitting, training, failing and cleaning up is really run.

Faithful: discovery, create/read/update/delete, resource versions, label and field selectors, watch with bookmarks and
410, the three patch formats, server-side apply with ownership and conflicts, dry run, finalizers, garbage collection,
strict schemas, error wording, Tables, RBAC for service accounts, Pod Security "restricted", eviction, logs, exec, cp,
port-forward. Controllers: Job, StatefulSet, Deployment, JobSet, PyTorchJob, TrainJob, scheduler, kubelet, DNS.

Simplified: an image is a name for this machine's root file system plus a few folders (settings.py). No cgroups: limits
count for scheduling only. No probes: running is ready. A ClusterIP Service resolves to pod addresses. No quota, CEL,
webhooks other than the rules in rules.py, protobuf bodies, ClusterRoles, admission of Kueue. One process reconciles
everything at once, so a real cluster's delays and races do not appear, and back-offs are seconds, not minutes.
A green run means that manifests and client logic work against this model; it does not replace a real cluster.

Needs Linux with iproute2 and util-linux, as root or with unprivileged user namespaces; in the latter case every pod
runs as the one user there is. Where neither is permitted, `--loopback` runs pods at loopback addresses, with the
simplifications that loopback.py names. It leaves nothing behind, even after SIGKILL: network and mounts are private to
the server, and every process dies with it.
"""
