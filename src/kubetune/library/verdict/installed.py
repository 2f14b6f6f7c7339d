"""What a run needs of this machine beside its model: extras, commands, keys of services."""

from __future__ import annotations

from collections.abc import Mapping

from kubetune.config.schema import Config
from kubetune.config.schema.tracking import PushConfig
from kubetune.data.reading.hub import hub_token
from kubetune.errors import ConfigError
from kubetune.extras import is_installed, require
from kubetune.supervisor.services import require_services


def needs_bitsandbytes(quantization: str, optim: str) -> str:
    """Return the setting that needs bitsandbytes, as it is written; empty where none does."""
    if quantization not in ("none", "auto"):
        return f"quantization: {quantization}"
    if optim == "adamw_8bit":
        return f"training.optim: {optim}"
    return ""


def require_extras(config: Config) -> None:
    """Raise MissingExtra for a library that the run needs here, ConfigError for a key or command that it lacks."""
    setting = needs_bitsandbytes(config.quantization, config.training.optim)
    if setting:
        require(setting, "bitsandbytes", after=" Nothing was written.")
    if config.evaluation.benchmarks is not None:
        require("evaluation.benchmarks", "lm_eval", after=" Nothing was written.")
    require_services(config.tracking, config.hooks, config.mirror)


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
