"""What a run needs of this machine besides its model: extras, credentials of a store, a token."""

from __future__ import annotations

from collections.abc import Mapping

from kubetune.config.schema.evaluation import EvaluationConfig
from kubetune.config.schema.tracking import PushConfig
from kubetune.data.reading.hub import hub_token
from kubetune.errors import ConfigError
from kubetune.extras import is_installed, require


def needs_bitsandbytes(quantization: str, optim: str) -> str:
    """Return the setting that needs bitsandbytes, as it is written; empty where none does."""
    if quantization not in ("none", "auto"):
        return f"quantization: {quantization}"
    if optim == "adamw_8bit":
        return f"training.optim: {optim}"
    return ""


def require_extras(quantization: str, optim: str, evaluation: EvaluationConfig) -> None:
    """Raise MissingExtra for a library that the run needs here."""
    setting = needs_bitsandbytes(quantization, optim)
    if setting:
        require(setting, "bitsandbytes", after=" Nothing was written.")
    if evaluation.benchmarks is not None:
        require("evaluation.benchmarks", "lm_eval", after=" Nothing was written.")


def require_store(address: str | None, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a copy of the run in a store for which this machine has no credentials."""
    if address is None:
        return
    from kubetune.rundir.mirror import credentials, stored_run

    # Its library would look for them. If that is missing, `require_extras` says so.
    library = stored_run.LIBRARIES.get(address.partition("://")[0])
    if library is None or not is_installed(library):
        return

    credentials.require_credentials(address, environ)


def require_token(push: PushConfig | None) -> None:
    """Raise ConfigError for an upload at the end of a run that has no token for the hub."""
    if push is None or hub_token() is not None:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(
            f"push: there is no token for the hub, so {push.repo} would get nothing; set HF_TOKEN to one that may write, "
            "or run `hf auth login`"
        )
