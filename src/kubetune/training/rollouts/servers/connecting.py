"""Make the drawer whose answers come from servers, at the start of a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kubetune import errors
from kubetune.base import logs
from kubetune.data.text.tokenizer_files import read_json
from kubetune.plan.adapter_targets import UNKNOWN_TO_SERVERS
from kubetune.training.rollouts.drawer import Drawer
from kubetune.training.rollouts.servers.adapters import AdapterFiles
from kubetune.training.rollouts.servers.requests import Asking
from kubetune.training.rollouts.servers.served_drawer import ServedDrawer
from kubetune.training.rollouts.servers.vllm_client import Server

if TYPE_CHECKING:
    from kubetune.config.schema.grpo import ServersConfig
    from kubetune.data.text.tokenizer import Tokenizer
    from kubetune.models.learner import Learner

_DIGEST_CHARACTERS = 8

# The variable with the addresses of pods that draw (k8s/manifests/samplers.py).
SAMPLERS = "KUBETUNE_SAMPLERS"


def servers_at(urls: Sequence[str]) -> list[Server]:
    """Return the servers at these addresses, or else at those of pods; none without either."""
    addresses = urls or os.environ.get(SAMPLERS, "").split()
    return [Server(url.rstrip("/")) for url in addresses]


def served_by(drawer: Drawer, servers: ServersConfig) -> ServedDrawer:
    """Return a drawer that asks servers instead of the model. Raise ConfigError for adapters that they cannot load."""
    model = drawer.model
    learner = model.learner
    _require_known_to_servers(learner, model.tokenizer)
    addresses = servers_at(servers.urls)
    if not addresses:
        raise errors.ConfigError(
            "grpo.servers.urls: missing, and kubernetes.samplers are pods of a cluster; expected addresses"
        )

    # Two runs on the same servers do not touch each other's adapters.
    owner = f"{drawer.run_dir.absolute()}\0{drawer.made_by}"
    run = hashlib.sha256(owner.encode()).hexdigest()
    asking = Asking(
        servers=addresses,
        settings=model.settings,
        eos_ids=model.tokenizer.eos_ids,
        vocabulary=learner.lm.get_input_embeddings().num_embeddings,
        seed=model.seed,
        rank=drawer.world.rank,
        seconds=servers.timeout_seconds,
    )
    adapters = AdapterFiles(
        run_dir=drawer.run_dir,
        model=learner.model,
        servers=addresses,
        seconds=servers.timeout_seconds,
        run=run[:_DIGEST_CHARACTERS],
        is_stopping=drawer.is_stopping,
    )
    logs.DATA.info("answers are drawn by %s", ", ".join(server.url for server in addresses))

    # Everything that the model's own drawer has, and the servers.
    settings: dict[str, Any] = {}
    for field in fields(Drawer):
        settings[field.name] = getattr(drawer, field.name)
    return ServedDrawer(**settings, asking=asking, adapters=adapters, lag=servers.lag)


def _require_known_to_servers(learner: Learner, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for an adapter that vLLM accepts but silently ignores."""
    model: Any = learner.model
    adapter = model.peft_config[model.active_adapter]
    if getattr(adapter, "target_parameters", None):
        raise errors.ConfigError(UNKNOWN_TO_SERVERS)
    described = read_json(tokenizer.files.get("config.json"))
    names_language_model = any("language_model" in name for name, _ in model.named_parameters())
    if "text_config" in described and not names_language_model:
        raise errors.ConfigError(
            f"grpo.servers: the model is the text part of {described.get('model_type')}, whose layers have other names in "
            "vLLM; take a text-only model, or leave the servers out"
        )
