"""Sources of the model of a reward, or of a teacher: the best checkpoint of a run, a folder, or the hub.

Its weights have a digest, so that a run that continues knows whether they are still the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kubetune import errors
from kubetune.base import files
from kubetune.base.files import require_plain
from kubetune.config.naming import OF_TRACKERS, RESOLVED
from kubetune.config.resolved import read_config
from kubetune.config.schema import DataConfig, ModelConfig
from kubetune.data.prepared import identity
from kubetune.data.reading.hub import find_files, is_local
from kubetune.data.text.tokenizer import cache_folder
from kubetune.models import quantization
from kubetune.models.learner import Learner
from kubetune.models.model_spec import ModelSpec
from kubetune.rundir import checkpoints
from kubetune.rundir.adapter_settings import choose_trained
from kubetune.scoring.rewards.named_models import NamedModel, require_task


@dataclass(frozen=True)
class ModelSource:
    """A model as a run file names it."""

    spec: ModelSpec
    data: DataConfig | None  # of the run that trained it; None for a folder and a name on the hub
    run_dir: Path
    folder: Path  # of the checkpoint, or of the model
    digest: str  # of its weights
    key: str  # of the run file that names it, for messages

    @property
    def name(self) -> str:
        """Return what messages call it."""
        if self.data is None:
            return self.spec.model.path
        return str(self.folder)

    def checked(self, load: Callable[[], Learner]) -> Learner:
        """Return what is loaded of a run. Raise ConfigError if its base is not the one that it was trained on."""
        # A model that was trained whole has its checksums in the manifest.
        if self.data is None or self.spec.lora is None:
            return load()
        cache = cache_folder(self.data.cache)
        check = identity.Check(self.spec.model, cache, self.run_dir, self.key, ("model",))
        with identity.checked(check):
            return load()


def source_of(named: NamedModel, *, local_files_only: bool) -> ModelSource:
    """Return a model that a run file names. Raise ConfigError, ModelError or EnvironmentFault if it cannot be used."""
    path = named.path
    # A run directory, which has its config.
    place = Path(path).expanduser()
    if (place / RESOLVED).is_file():
        return _of_run(place, named)

    # A folder or a name on the hub.
    model = ModelConfig(path=path, revision=named.revision, local_files_only=local_files_only)
    spec = ModelSpec(model)
    paths = find_files(model, path, ("config.json",))
    if "config.json" not in paths:
        raise errors.ModelError(
            f"{named.key}: {path} has no config.json; expected a run directory, or a model in Hugging Face form"
        )
    folder = paths["config.json"].parent
    return ModelSource(spec, None, place, folder, _digest_of(path, folder), named.key)


def _of_run(run_dir: Path, named: NamedModel) -> ModelSource:
    """Return the best checkpoint of a run, with the model that it was trained on."""
    config = read_config(run_dir)
    require_task(run_dir, config.task_name, named)
    require_plain(run_dir, but=OF_TRACKERS)
    if config.model.trust_remote_code:
        raise errors.ConfigError(
            f"{named.key}: {run_dir}: its model brings Python code, which is not run here; take another model"
        )

    # Checked against its manifest, but for the optimizer's files, which no reward reads.
    folder = choose_trained(run_dir, config.lora)
    cache = cache_folder()
    damage = checkpoints.verify(
        folder,
        but="optimizer*",
        digest=lambda path: identity.content_of(path, cache)[0].sha256,
    )
    if damage:
        raise errors.EnvironmentFault(f"{named.key}: {folder} {damage}")

    model = identity.pinned(config.model, run_dir)
    chosen = quantization.as_trained(run_dir, config.quantization, config.lora)
    spec = replace(ModelSpec.of(config), model=model, quantization=chosen)
    # The manifest has the checksums of all files.
    digest = files.sha256_file(folder / checkpoints.MANIFEST)
    return ModelSource(spec, config.data, run_dir, folder, digest, named.key)


def _digest_of(path: str, folder: Path) -> str:
    """Return what tells the weights of a model from others: the commit of the hub, or checksums."""
    if not is_local(path):
        return folder.name
    digest = hashlib.sha256()
    weights_and_settings = [*folder.glob("*.safetensors"), *folder.glob("*.json")]
    for file in sorted(weights_and_settings):
        content, _ = identity.content_of(file, cache_folder())
        digest.update(f"{file.name} {content.sha256}\n".encode())
    return digest.hexdigest()
