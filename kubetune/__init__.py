"""Fine-tune language models from one YAML file: on a laptop, on one GPU, and on a Kubernetes cluster.

The functions below are the Python interface; each is imported when it is first used, so that `import kubetune` stays
light.
"""

import sys

_IS_PROGRAM = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").split(".")[0] == "kubetune"
if _IS_PROGRAM and not sys.flags.safe_path:
    # `python -m kubetune…`: Python would look for whatever is imported from here on, the standard library included, in
    # the current folder first, where files may be anybody's.
    del sys.path[0]

from importlib import import_module  # noqa: E402
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from kubetune.config.load import load_config
    from kubetune.data.prepared.prepare import prepare
    from kubetune.inference.generate import answer, load_run
    from kubetune.manifests import render
    from kubetune.planning.plan import make_plan
    from kubetune.publishing.export import export_run
    from kubetune.supervisor.local import launch_run

__version__ = "0.1.0"

ROOMS = (
    ("base", "files, locks, logs, processes, signals, and values as people read them"),
    ("config", "the run file: its schema, how it is read, and everything that can be wrong with one"),
    ("rundir", "the run directory: checkpoints, metrics, exit status, trackers, its copy elsewhere"),
    ("planning", "arithmetic before anything is held: batches, steps, memory, hours, price"),
    ("manifests", "Kubernetes manifests, as a pure function of config and plan"),
    ("kube_api", "the API server: credentials, objects in and out, watches, refusals in words"),
    ("cluster", "runs on a cluster: submitted, followed, stopped, fetched"),
    ("reporting", "pages made from run directories"),
    ("supervisor", "the first process of a run: starts the ranks, says how the run ended"),
    ("data", "files and hub data sets to prepared rows, in an order that only the seed decides"),
    ("distributed", "several processes that train one model: who is who, and how they meet"),
    ("batching", "prepared rows to packed batches"),
    ("models", "Hugging Face models made ready to train: loaded, adapted, sharded, padding-free"),
    ("tasks", "what can be learnt, a file each"),
    ("training", "one rank of a run: the loop, its optimizer, checkpoints, evaluation"),
    ("inference", "the result of a run, opened and asked"),
    ("publishing", "the result of a run, exported, proved the same, uploaded"),
    ("diagnostics", "runs that test: machines (smoke), and exact resume"),
    ("plugins", "clusters on Nebius, other tools' configs, data sets' recipes, serving, dev pods"),
    ("cli", "the verbs, a file each"),
)
"""The rooms from the ground up, with what each is for: a room imports only itself and rooms above it in this list.

tests/unit/test_rooms.py holds that. `errors`, which every room may import, is no room.
"""
NUMPY_BEGINS, TORCH_BEGINS = "data", "distributed"
"""Rooms above the first import no numpy, tokenizers or torch, so that their verbs start at once and pods stay small;
those above the second import torch only inside functions."""

__all__ = [
    "__version__",
    "answer",
    "export_run",
    "launch_run",
    "load_config",
    "load_run",
    "make_plan",
    "prepare",
    "render",
]

_HOMES = {
    "answer": "kubetune.inference.generate",
    "export_run": "kubetune.publishing.export",
    "launch_run": "kubetune.supervisor.local",
    "load_config": "kubetune.config.load",
    "load_run": "kubetune.inference.generate",
    "make_plan": "kubetune.planning.plan",
    "prepare": "kubetune.data.prepared.prepare",
    "render": "kubetune.manifests",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kubetune' has no attribute {name!r}")
    # No name here is that of a module of ours: importing that module would put it in the function's place.
    return getattr(import_module(_HOMES[name]), name)
