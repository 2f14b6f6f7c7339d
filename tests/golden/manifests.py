"""The golden manifests: what `kubetune render` makes of the run files beside this module, byte for byte.

Some are kept whole, and the others as their difference from another case (differences.py).

python -m tests.golden.manifests      writes them anew, after a change that is meant to change them
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

from kubetune.cli import main
from tests.golden.differences import difference

FOLDER = Path(__file__).parent
CASES: dict[str, list[str]] = {
    "minimal": ["minimal.yaml"],
    "job": ["full.yaml"],
    "statefulset": ["full.yaml", "--kind=statefulset", "kubernetes.max_runtime_seconds=null"],
    "jobset": ["full.yaml", "--kind=jobset"],
    "pytorchjob": ["full.yaml", "--kind=pytorchjob"],
    "trainjob": ["full.yaml", "--kind=trainjob"],
    "rdma": [
        "minimal.yaml",
        "kubernetes.profile=rdma",
        "compute.gpus_per_node=8",
        "kubernetes.rdma.resource=rdma/hca",
    ],
    "rdma-host": [
        *("minimal.yaml", "kubernetes.profile=rdma", "compute.gpus_per_node=8"),
        "kubernetes.rdma.privileged=true",
    ],
    "existing": [
        "minimal.yaml",
        "kubernetes.storage={cache: {host_path: /mnt/nvme}, outputs: {csi: {driver: fs.example}}}",
        "kubernetes.service_account=trainer",
        "kubernetes.spread=preferred",
        "compute.nodes=2",
    ],
    **{
        case: ["minimal.yaml", "compute.nodes=2", f"kubernetes.scheduling={{{scheduling}}}", *words]
        for case, scheduling, *words in (
            ("volcano-job", "gang: volcano, queue: research", "kubernetes.priority_class=training"),
            ("volcano-pytorchjob", "gang: volcano, queue: research", "--kind=pytorchjob"),
            ("volcano-trainjob", "gang: volcano, queue: research", "--kind=trainjob"),
        )
    },
    "placed": [
        *(
            "minimal.yaml",
            "compute.nodes=2",
            "compute.gpus_per_node=8",
            "compute.cpu=32",
            "kubernetes.queue=gpu",
        ),
        *(
            "kubernetes.runtime_class=nvidia",
            "kubernetes.cpu_limits=true",
            "kubernetes.ephemeral_storage=50Gi",
        ),
        "kubernetes.resource_claims=[{name: gpus, template: eight-gpus, gpus: true}, {name: nic, claim: fabric}]",
        "kubernetes.node_affinity=[{key: example.com/gpu, values: [h100, h200]}, {key: zone, values: [a], weight: 5}]",
    ],
    "near-jobset": [
        *(
            "minimal.yaml",
            "--kind=jobset",
            "compute.nodes=4",
            "kubernetes.queue=gpu",
            "kubernetes.initialisers=[model]",
        ),
        "kubernetes.scheduling.topology={required: example.com/block, slice: example.com/rack, slice_nodes: 2}",
        "kubernetes.jobset={restart: trainer, exclusive: example.com/block, cache_with_run: true}",
        "kubernetes.storage.cache={size: 1Ti, access: ReadWriteMany}",
    ],
    "samplers-job": [
        *("minimal.yaml", "task=grpo", "lora={r: 16}", "rewards=[exact_match]"),
        *("grpo={servers: {lag: 1}}", "kubernetes.samplers={replicas: 2}"),
        "kubernetes.scheduling={gang: volcano}",
    ],
    "shared-cache": [
        "minimal.yaml",
        "kubernetes.storage.cache={size: 1Ti, access: ReadWriteMany}",
        "compute.nodes=2",
    ],
}


# Cases that are kept as their difference from another, which may be one itself; the others are kept whole.
BESIDE = {
    "statefulset": "job",
    "jobset": "job",
    "pytorchjob": "job",
    "trainjob": "jobset",
    "rdma": "minimal",
    "rdma-host": "rdma",
    "existing": "minimal",
    "placed": "minimal",
    "samplers-job": "minimal",
    "shared-cache": "minimal",
    "volcano-job": "minimal",
}


@cache
def rendered(case: str) -> str:
    """Return what the command line prints for a case."""
    file, *words = CASES[case]
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(["render", str(FOLDER / file), *words])
    assert code == 0, f"{case}: exit code {code}"
    return out.getvalue()


def kept(case: str) -> str:
    """Return what the file of a case has to hold: all that is rendered, or its difference from another case."""
    if case not in BESIDE:
        return rendered(case)
    base = BESIDE[case]
    return difference(base, rendered(base), rendered(case))


def golden(case: str) -> Path:
    """Return the path of that file."""
    ending = "diff" if case in BESIDE else "yaml"
    return FOLDER / "manifests" / f"{case}.{ending}"


if __name__ == "__main__":
    for name in CASES:
        golden(name).write_text(kept(name))
