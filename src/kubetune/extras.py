"""Libraries that an extra of kubetune installs, and the error that names the extra of a missing one.

If an optional import fails, `missing_extra` says what to install. Code that works for long before that import calls
`require` first. Both read the same table.
"""

from __future__ import annotations

from importlib.util import find_spec

from kubetune.errors import MissingExtra

# The extra that brings a module, by the module's first name.
EXTRA_OF = {
    "lightkube": "k8s",
    "httpx2": "k8s",
    "tensorboard": "tracking",
    "mlflow": "tracking",
    "wandb": "wandb",
    "trackio": "trackio",
    "prometheus_client": "prometheus",
    "opentelemetry": "otel",
    "mcp": "mcp",
    "starlette": "ui",
    "uvicorn": "ui",
    "bitsandbytes": "quantization",
    "PIL": "vision",
    "datasets": "hub",
    "pyarrow": "hub",
    "s3fs": "s3",
    "gcsfs": "gs",
    "adlfs": "az",
    "py3langid": "languages",
    "rouge_score": "evaluation",
    "sacrebleu": "evaluation",
    "jsonschema": "evaluation",
    "math_verify": "math",
    "lm_eval": "benchmarks",
    "optuna": "sweep",
    "gguf": "gguf",
    "compressed_tensors": "fp8",
}


def is_installed(module: str) -> bool:
    """True if a module can be found, without importing it; one inside a package imports the package."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def require(what: str, *modules: str, after: str = "") -> None:
    """Raise MissingExtra where one of the modules that `what` needs is not installed. Imports none of them."""
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        raise MissingExtra(sentence(what, *missing) + after)


def sentence(what: str, *missing: str) -> str:
    """Say that `what` needs the extra of these modules, which are all of one extra, and how to install it."""
    extra = EXTRA_OF[missing[0].partition(".")[0]]
    are = "is" if len(missing) == 1 else "are"
    return (
        f"{what} needs kubetune[{extra}] ({' and '.join(missing)} {are} not installed): "
        f"pip install 'kubetune[{extra}]'"
    )


def missing_extra(error: BaseException) -> MissingExtra | None:
    """Return what to install where an import failed for a module of an extra; None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    if error.name.partition(".")[0] not in EXTRA_OF:
        return None
    return MissingExtra(sentence("this", error.name))
