"""An export on its way: the one value that flows from the checkpoint to the files, their proof and their card.

    ExportDraft(source, folder, …)         what it is made from, where, and the rows of its proof
    form.write(draft)                      + notes on the files, the outputs of the models that were in memory
    form.prove(draft)                      + comparisons
    publishing/exporting                   + tokenizer, licences → provenance.json → README.md

Each step returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from kubetune import errors
from kubetune.config.resolved import read_config
from kubetune.config.schema import ModelConfig
from kubetune.config.schema.model import DTYPE_NAMES
from kubetune.models import loading
from kubetune.models.load_faults import explained_model
from kubetune.models.model_spec import ModelSpec
from kubetune.result.forms import equivalence, merge
from kubetune.result.forms.equivalence import Comparison, Sample
from kubetune.result.forms.wanted import Kind
from kubetune.result.inference.result import Result

# Called with a line for the user.
Tell = Callable[[str], None]


@dataclass(frozen=True)
class ExportSource:
    """The result that is exported, the weights that are written of it, and where the work is done."""

    result: Result
    kind: Kind
    dtype: torch.dtype  # of the weights that are written
    device: torch.device
    tell: Tell  # called before each long part
    max_shard_bytes: int
    gguf: str | None = None  # type of the weights of a GGUF file, or `adapter`

    @property
    def model(self) -> ModelConfig:
        """The model as it is here, which is loaded in the dtype of the export."""
        return self.spec_in(self.dtype).model

    @property
    def dtype_name(self) -> str:
        """The dtype of what is written, as configs name it."""
        return name_of(self.dtype)

    def spec_in(self, dtype: torch.dtype) -> ModelSpec:
        """Return the run's model, to be loaded in this dtype."""
        spec = self.result.spec
        return replace(spec, model=spec.model.model_copy(update={"dtype": name_of(dtype)}))

    def load(self, folder: Path, *, quantized: bool = True) -> Any:
        """Load the model of a checkpoint, or of an exported adapter, with training's code.

        `quantized`: the base has as few bits as it had in training.
        """
        spec = self.spec_in(self.dtype)
        if not quantized:
            spec = replace(spec, quantization="none")
        settings = self.result.task.load_settings(spec, folder)
        with merge.quiet():
            return loading.load_trained(
                self.result.auto_class,
                spec,
                folder,
                self.device,
                **settings,
            )

    def load_plain(self, folder: Path, dtype: torch.dtype) -> Any:
        """Load a whole model with plain transformers, in main memory. No code of the folder is run."""
        return self.result.auto_class.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )

    def require_base(self) -> Path:
        """Return the folder of the base. Raise ModelError if it is not on this machine."""
        if self.result.base_folder == self.result.checkpoint:
            raise errors.ModelError("it is not on this machine")
        return self.result.base_folder

    def ask(self, model: Any, sample: Sample) -> list[Tensor]:
        """Return the logits of a model on the rows of the proof."""
        return equivalence.ask(self.result.task, model, sample)


@dataclass(frozen=True)
class ExportDraft:
    """An export that is not whole yet."""

    source: ExportSource
    folder: Path  # which the files are written into
    # The weights as transformers loads them: `folder` itself, or one that is deleted when what is made of it is proved.
    staging: Path
    sample: Sample  # the rows of its proof
    # Logits on the sample, by the model that was asked while it was in memory.
    logits: Mapping[str, list[Tensor]] = field(default_factory=dict)
    dtype: str = ""  # of the written weights
    effect: float | None = None  # how far the adapter moves logits
    # Facts on an adapter's base that decide which programs serve it (`programs.served_by`).
    base: Mapping[str, Any] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()
    tokenizer_files: tuple[str, ...] = ()  # proved equal
    licences: tuple[str, ...] = ()  # files copied from the base
    # What provenance.json has under the form's key.
    notes: Mapping[str, Any] = field(default_factory=dict)
    gguf_file: str | None = None  # its name

    def proved_by(self, *comparisons: Comparison) -> ExportDraft:
        """Return the draft with more comparisons, and without the logits that they were made of."""
        return replace(self, comparisons=(*self.comparisons, *comparisons), logits={})


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype as configs name it."""
    return str(dtype).removeprefix("torch.")


def dtype_to_write(result: Result, wanted: str | None) -> torch.dtype:
    """Return the dtype of written weights: the wanted one, the run file's, or that of the model's own weights."""
    model = result.model
    # Read from the run file itself: the result may have the dtype that a CPU computes with best.
    name = DTYPE_NAMES.get(wanted or "", wanted) or read_config(result.run_dir).model.dtype
    if name == "auto":
        path = model.path
        revision = model.revision
        if result.spec.lora is None:
            path = str(result.checkpoint)
            revision = None
        # config.json says in what dtype the weights lie, without reading them.
        with explained_model(model):
            facts = transformers.AutoConfig.from_pretrained(
                path, revision=revision, trust_remote_code=model.trust_remote_code
            )

        name = name_of(facts.dtype or torch.float32)

    if name not in loading.DTYPES:
        raise errors.ConfigError(
            f"--dtype is {name}; expected one of {', '.join(loading.DTYPES)}. Nothing was written."
        )

    return loading.DTYPES[name]
