"""The result of a run, opened: its checkpoint, its config as trained, and base, tokenizer and facts as found here.

Every verb that asks, measures or publishes a model opens it by `open_result`; nothing else looks for checkpoints, bases
or tokenizers. What a run from elsewhere names by a path of that place is looked for where `--model` says. What is found
is compared with what the run was trained on (data/prepared/identity) while it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from kubetune.base.files import StrPath, require_plain
from kubetune.config.naming import OF_TRACKERS
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config, ModelConfig
from kubetune.data.prepared import data_facts, identity
from kubetune.data.prepared.data_facts import DataFacts
from kubetune.data.reading import hub
from kubetune.data.spec import DataSpec
from kubetune.data.text.tokenizer import Tokenizer, cache_folder, load_tokenizer
from kubetune.data.vision.image_processor import ImageProcessor, processor_of
from kubetune.models import loading
from kubetune.models.model_spec import ModelSpec
from kubetune.models.padding_free import unwrap
from kubetune.result.inference.base_here import (
    allowed_base,
    as_trained,
    model_here,
    require_room,
)
from kubetune.result.inference.requirements import not_here, require_undamaged
from kubetune.rundir import checkpoints
from kubetune.rundir.adapter_settings import choose_trained
from kubetune.tasks import task_of
from kubetune.tasks.task import Task


@dataclass(frozen=True)
class Result:
    """One checkpoint of a run. What depends on the base is looked up when it is first asked for."""

    run_dir: Path
    trained: Config  # as the run was trained
    checkpoint: Path
    base_by_option: str | None = None  # the base as `--model` names it
    trust_code: str | None = None  # digest of code that the user typed to have it run
    # The model before fine-tuning, once it has been loaded beside the one that was trained whole.
    _base: list[Any] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def model(self) -> ModelConfig:
        """The section `model`, which names base and tokenizer where they are here.

        Raise ModelError if an adapter's base is not here.
        """
        trained = self.trained
        return model_here(
            trained.model,
            self.run_dir,
            self.checkpoint,
            self.base_by_option,
            self.trust_code,
            is_adapter=trained.lora is not None,
        )

    @cached_property
    def config(self) -> Config:
        """The config with this `model`, by which data are prepared."""
        return self.trained.model_copy(update={"model": self.model})

    @cached_property
    def spec(self) -> ModelSpec:
        """All that the model is built from, as it is here."""
        return replace(ModelSpec.of(self.trained), model=self.model)

    @cached_property
    def task(self) -> Task:
        """The run's task."""
        return task_of(self.trained.task_name)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer as it is here. Raise ModelError if it cannot be had."""
        return load_tokenizer(self.model)

    @cached_property
    def image_processor(self) -> ImageProcessor | None:
        """The image processor of a model that sees."""
        return processor_of(DataSpec.of(self.config), self.tokenizer)

    @cached_property
    def facts(self) -> DataFacts:
        """The facts about its data that the run keeps, or those of the data themselves."""
        trained = self.trained
        return data_facts.known(self.run_dir, trained.data.train[0], trained.record_kind)

    @property
    def base_folder(self) -> Path:
        """The folder of the base on this machine; the checkpoint's if the base is not here."""
        model = self.model
        return hub.find_files(model, model.path, ("config.json",))["config.json"].parent

    @property
    def auto_class(self) -> Any:
        """The class of transformers that loads models of the run's task."""
        return getattr(transformers, self.task.auto_class)

    @contextmanager
    def as_base(self, model: Any) -> Iterator[Any]:
        """Yield the model before fine-tuning. `model`: this result's, which is loaded.

        It is the same one with its adapters off. A model that was trained whole gets its base loaded beside it, once.
        Raise EnvironmentFault if the memory does not hold both.
        """
        # A PEFT model.
        if unwrap(model) is not model:
            with model.disable_adapter():
                yield model
            return
        if not self._base:
            # It stays in memory, since whoever compares asks both by turns.
            require_room(model, default_device())
            with self.checked(base=True):
                allowed = allowed_base(self.model, self.run_dir, self.trust_code)
                spec = replace(self.spec, model=allowed)
                base: Any = loading.load_pretrained(self.auto_class, spec, default_device())

            self._base.append(base.eval())

        yield self._base[0]

    @contextmanager
    def checked(self, *, base: bool | None = None) -> Iterator[None]:
        """Load within it what the result needs. At its end, base and tokenizer are known to be those of training.

        `base`: True if the base is loaded; left out, it is for an adapter. Raise ConfigError if they are others, and
        EnvironmentFault if the checkpoint is damaged, before anything of it is loaded.
        """
        require_undamaged(self.checkpoint, self.damage)
        if base and self.model.path == str(self.checkpoint):
            raise not_here(self.run_dir, self.trained.model.path)

        # What lies outside of the checkpoint, whose own files have checksums.
        parts = []
        if base or (base is None and self.trained.lora is not None):
            parts.append("model")
        if not self._has_own_tokenizer:
            parts.append("tokenizer")

        # Messages name where the base was named, so that the user knows what to change.
        named_by = "its config"
        if self.base_by_option:
            named_by = f"--model {self.base_by_option}"
        check = identity.Check(self.model, self._cache, self.run_dir, named_by, tuple(parts))
        with identity.checked(check):
            yield

    @cached_property
    def damage(self) -> str | None:
        """What is wrong with the checkpoint, or None. The optimizer's state may be damaged: no result needs it.

        A file that was whole before and has not changed since is not read again.
        """
        return checkpoints.verify(
            self.checkpoint,
            but="optimizer*",
            digest=lambda path: identity.content_of(path, self._cache)[0].sha256,
        )

    @property
    def _cache(self) -> Path:
        return cache_folder(self.trained.data.cache)

    @property
    def _has_own_tokenizer(self) -> bool:
        """True if the tokenizer is the checkpoint's own copy, which has checksums of its own."""
        return str(self.checkpoint) in (self.model.tokenizer, self.model.path)


def open_result(
    run_dir: StrPath,
    which: str = "best",
    model: str | None = None,
    trust_code: str | None = None,
) -> Result:
    """Return the result of a run: `best`, `last` or a step. `model`: folder or hub id of its base, if elsewhere here.

    `trust_code`: digest of code of the run that the user allows. Raise ConfigError if there is no such run or
    checkpoint, EnvironmentFault for links that lead out of the run directory, and the like.
    """
    run_dir = Path(run_dir)
    config = read_config(run_dir)
    # A received run directory may hold links and pipes, which would lead out of it or never end.
    require_plain(run_dir, but=OF_TRACKERS)
    trained = as_trained(config, run_dir)
    return Result(
        run_dir,
        trained,
        choose_trained(run_dir, config.lora, which),
        model,
        trust_code,
    )


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
