"""Fine-tune language models from one YAML file: on a laptop, on one GPU, and on a Kubernetes cluster.

The names of `__all__` are the Python interface (docs/python.md); each is imported when it is first used, so that
`import kubetune` stays light.
"""

import sys

_IS_PROGRAM = (
    sys.argv[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").split(".")[0] == "kubetune"
)
if _IS_PROGRAM and not sys.flags.safe_path:
    # `python -m kubetune…`: Python would look for whatever is imported from here on, the standard library included, in
    # the current folder first, where files may be anybody's.
    del sys.path[0]

from importlib import import_module  # noqa: E402

# Typing takes longer to import than all else here, and until then nobody hears Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from kubetune import errors as errors
    from kubetune.config.schema import Config as Config
    from kubetune.library.clusters import render as render
    from kubetune.library.clusters import submit as submit
    from kubetune.library.configs import load_config as load_config
    from kubetune.library.plans import make_plan as make_plan
    from kubetune.library.plans import prepare as prepare
    from kubetune.library.results import check_server as check_server
    from kubetune.library.results import classify as classify
    from kubetune.library.results import evaluate as evaluate
    from kubetune.library.results import export as export
    from kubetune.library.results import generate as generate
    from kubetune.library.results import report as report
    from kubetune.library.run_handle import Run as Run
    from kubetune.library.training import train as train

__version__ = "0.1.0"

# The rooms from the ground up, with what each is for: a room imports only itself and rooms above it in this list.
#
# tests/unit/test_rooms.py holds that. `errors`, which every room may import, is no room.
ROOMS = (
    ("base", "files, locks, logs, processes, signals, and values as people read them"),
    (
        "config",
        "the run file: its schema, how it is read, and everything that can be wrong with one",
    ),
    (
        "rundir",
        "the run directory: checkpoints, metrics, exit status, trackers, its mirror in an object store",
    ),
    ("plan", "arithmetic before anything is held: batches, steps, memory, hours, price"),
    (
        "k8s",
        "runs on a cluster: manifests, what is wrong with them, the API server, submit to fetch",
    ),
    ("reporting", "pages made from run directories"),
    (
        "supervisor",
        "the first process of a run: starts the ranks, tells observers, says how the run ended",
    ),
    ("data", "files and hub data sets to prepared rows, in an order that only the seed decides"),
    ("distributed", "several processes that train one model: who is who, and how they meet"),
    ("kernels", "operations on tensors with their backward written out; they know no model"),
    ("batching", "prepared rows to packed batches"),
    ("models", "Hugging Face models made ready to train: loaded, adapted, sharded, padding-free"),
    ("tasks", "what can be trained, a file each"),
    ("scoring", "answers of a model, generated in batches and judged"),
    ("training", "one rank of a run: the loop, the optimizer, checkpoints, evaluation"),
    ("result", "the result of a run: opened and asked, exported, proved the same, uploaded"),
    (
        "plugins",
        "Nebius, other tools' configs, recipes of data sets, serving, dev pods, tests of machines",
    ),
    (
        "library",
        "what `import kubetune` gives: the verbs as functions, which cli shares, and sweeps",
    ),
    ("ui", "a page to work in: runs, live curves, data, new runs and chat, in a browser"),
    ("cli", "the verbs, a file each"),
)
# Rooms above the first import no numpy, tokenizers or torch, so that their verbs start at once and pods stay small;
# those above the second import torch only inside functions.
NUMPY_BEGINS, TORCH_BEGINS = "data", "distributed"

_HOMES = {
    "Config": "config.schema",
    "Run": "library.run_handle",
    "check_server": "library.results",
    "classify": "library.results",
    "errors": "errors",
    "evaluate": "library.results",
    "export": "library.results",
    "generate": "library.results",
    "load_config": "library.configs",
    "make_plan": "library.plans",
    "prepare": "library.plans",
    "render": "library.clusters",
    "report": "library.results",
    "submit": "library.clusters",
    "train": "library.training",
}

__all__ = [
    "Config",
    "Run",
    "__version__",
    "check_server",
    "classify",
    "errors",
    "evaluate",
    "export",
    "generate",
    "load_config",
    "make_plan",
    "prepare",
    "render",
    "report",
    "submit",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'kubetune' has no attribute {name!r}")
    home = import_module(f"kubetune.{_HOMES[name]}")
    # `errors` is the only module among these names: importing another would put it in the function's place.
    return home if name == "errors" else getattr(home, name)


def __dir__() -> list[str]:
    return list(__all__)  # what completion in a notebook shows
