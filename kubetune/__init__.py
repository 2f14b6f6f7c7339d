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
    from kubetune.data.prepare import prepare
    from kubetune.export import export_run
    from kubetune.generate import answer, load_run
    from kubetune.launch.local import launch_run
    from kubetune.manifests import render
    from kubetune.plan import make_plan

__version__ = "0.1.0"
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
    "answer": "kubetune.generate",
    "export_run": "kubetune.export",
    "launch_run": "kubetune.launch.local",
    "load_config": "kubetune.config.load",
    "load_run": "kubetune.generate",
    "make_plan": "kubetune.plan",
    "prepare": "kubetune.data.prepare",
    "render": "kubetune.manifests",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kubetune' has no attribute {name!r}")
    # No name here is that of a module of ours: importing that module would put it in the function's place.
    return getattr(import_module(_HOMES[name]), name)
