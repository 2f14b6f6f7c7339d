"""The result of a run, found: its config as trained, its checkpoint, and where its base and tokenizer lie here.

What a run from elsewhere names by a path of that place is looked for where `--model` says. What is found is compared
with what the run was trained on (identity.py) while it is loaded. Loading itself is loading.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubetune import errors
from kubetune.base.files import StrPath
from kubetune.config.load import read_config
from kubetune.config.schema import Config, ModelConfig
from kubetune.data.prepared import identity
from kubetune.data.reading.hub import is_local
from kubetune.models import quantization
from kubetune.rundir import checkpoints as checkpoint
from kubetune.training import cpu_dtype


@dataclass(frozen=True)
class Result:
    """One checkpoint of a run. `config.model` names base and tokenizer as found here; `given`: by `--model`."""

    run_dir: Path
    config: Config
    checkpoint: Path
    given: str | None = None

    @contextmanager
    def checked(self, *, base: bool | None = None) -> Iterator[None]:
        """Within, what the result needs is loaded; at the end it is known to be what the run was trained with.

        `base`: whether the base is loaded; left out, whether the checkpoint is an adapter. Raises ConfigError.
        """
        if base and self.config.model.path == str(self.checkpoint):
            raise _not_here(self.run_dir, read_config(self.run_dir).model.path)
        needs_base = self.config.lora is not None if base is None else base
        parts = [*(["model"] if needs_base else []), *(["tokenizer"] if not self._has_own_tokenizer else [])]
        said = f"--model {self.given}" if self.given else "its config"
        with identity.checked(identity.Check(self.config, self.run_dir, said, tuple(parts))):
            yield

    @property
    def _has_own_tokenizer(self) -> bool:
        """Whether the tokenizer is the checkpoint's own copy, which has checksums of its own."""
        model = self.config.model
        return str(self.checkpoint) in (model.tokenizer, model.path)


def open_result(run_dir: StrPath, which: str = "best", model: str | None = None) -> Result:
    """The result of a run: `best`, `last` or a step. `model`: folder or hub id of its base, if elsewhere here.

    Raises ConfigError where there is no such run or checkpoint, ModelError where an adapter's base is not here.
    """
    run_dir = Path(run_dir)
    config = cpu_dtype.as_trained(run_dir, quantization.as_trained(run_dir, read_config(run_dir)))
    folder = checkpoint.choose(run_dir, which)
    settings = config.model
    if model is not None:
        place = str(Path(model).expanduser().absolute()) if is_local(model) else model
        settings = settings.model_copy(update={"path": place, "revision": _commit(run_dir, place)})
    if not is_here(settings) and config.lora is None:
        settings = settings.model_copy(update={"path": str(folder), "revision": None})
    if not is_here(settings):
        raise _not_here(run_dir, settings.path)
    settings = _with_tokenizer(settings, folder)
    return Result(run_dir, identity.pinned(config.model_copy(update={"model": settings}), run_dir), folder, model)


def _not_here(run_dir: Path, path: str) -> errors.ModelError:
    return errors.ModelError(
        f"{run_dir} was made from the model {path}, a folder that is not on this machine; say where the model lies "
        "here, or its name on the hub: --model PATH|ID. Nothing was written."
    )


def is_here(model: ModelConfig) -> bool:
    """Whether a model can be looked for: on the hub, or in a folder that exists."""
    return not is_local(model.path) or Path(model.path).expanduser().is_dir()


def _commit(run_dir: Path, place: str) -> str | None:
    """The commit of the hub that the run was trained on, where its base is asked for by the same name."""
    known = identity.read(run_dir).get("model")
    return known.commit if known is not None and known.path == place else None


def _with_tokenizer(model: ModelConfig, folder: Path) -> ModelConfig:
    """The model with the checkpoint's copy of its tokenizer and template where those it names are not here."""
    own = model.tokenizer is not None and is_local(model.tokenizer) and not Path(model.tokenizer).expanduser().is_dir()
    template = model.chat_template
    lost = template not in (None, "chatml") and not Path(template).expanduser().is_file()
    return model.model_copy(update={"tokenizer": str(folder), "chat_template": None}) if own or lost else model
