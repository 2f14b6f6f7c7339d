"""What a run, or an export of it, knows of its model without data, base and GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kubetune import errors
from kubetune.base.files import require_plain
from kubetune.config.naming import OF_TRACKERS, RESOLVED, model_short_name
from kubetune.config.resolved import load_resolved, read_config
from kubetune.config.schema import Config, ModelConfig
from kubetune.data.findings import kept_conversations
from kubetune.data.findings.kept_conversations import Conversation
from kubetune.data.text.tokenizer import Tokenizer, load_tokenizer
from kubetune.data.text.tokenizer_files import read_json
from kubetune.result.forms.wanted import PROVENANCE
from kubetune.result.inference import proof_answers
from kubetune.result.inference.proof_answers import ProofAnswers
from kubetune.rundir import checkpoints

_GENERATION: Final = "generation_config.json"


@dataclass(frozen=True)
class KnownModel:
    """A trained model, and what a server's answers are compared with."""

    name: str  # that requests ask for, if nothing else is said
    tokenizer: Tokenizer
    rank: int | None  # of its adapter
    max_length: int  # tokens of a row in training
    # Sampling of the export, which a server takes for its defaults.
    generation: Mapping[str, Any]
    lacking: str  # why there are no answers
    answers: ProofAnswers | None = None
    run_dir: Path | None = None  # None: an export that lies elsewhere
    conversations: tuple[Conversation, ...] = ()
    sees: bool = False  # images

    @property
    def prompt_ids(self) -> list[int]:
        """Ids that the server can be asked to go on from."""
        if self.answers is not None:
            return list(self.answers.ids[0][:16])
        return self.tokenizer.encode_text("Ping?")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return self.answers.eos_ids if self.answers is not None else self.tokenizer.eos_ids


def known_model(folder: Path) -> KnownModel:
    """Return what is known of the model of a run directory, or of a folder that `kubetune export` wrote.

    Raise ConfigError for other folders, ModelError for a run that serves no next tokens.
    """
    if (folder / RESOLVED).is_file():
        newest = proof_answers.newest(folder)
        if newest is not None:
            return _of_run(folder, newest.name.split(".")[0])
        return _of_run(folder, checkpoints.choose(folder).resolve().name)
    if not (folder / PROVENANCE).is_file():
        raise errors.ConfigError(
            f"{folder}: expected a run directory, or a folder that kubetune export wrote; it is neither"
        )
    facts: dict[str, Any] = read_json(folder / PROVENANCE)
    # RUN/exports/step-000120-adapter
    run_dir = folder.absolute().parent.parent
    if (run_dir / RESOLVED).is_file():
        return _of_run(run_dir, str(facts["checkpoint"]["name"]))
    lacking = "its run directory keeps log-probabilities, and it is not here; name the run instead"
    config = load_resolved(facts["run"]["config"], str(folder / PROVENANCE))
    return _of(config, folder, read_json(folder / _GENERATION), lacking)


def _of_run(run_dir: Path, checkpoint: str) -> KnownModel:
    """Return what a run knows of a checkpoint, such as `step-000120`."""
    require_plain(run_dir, but=OF_TRACKERS)
    record = proof_answers.path_of(run_dir, checkpoint)
    generations = sorted((run_dir / "exports").glob(f"{checkpoint}-*/{_GENERATION}"))
    known = _of(
        read_config(run_dir),
        checkpoints.choose(run_dir, checkpoint),
        read_json(generations[-1]) if generations else {},
        f"{run_dir} keeps no log-probabilities of {checkpoint}; `kubetune export {run_dir}` records them, where its base is",
    )
    answers = proof_answers.read(record) if record.is_file() else None
    kept = kept_conversations.read(run_dir)
    return replace(known, answers=answers, run_dir=run_dir, conversations=kept)


def _of(config: Config, folder: Path, generation: Mapping[str, Any], lacking: str) -> KnownModel:
    """Return what a config, and a folder with the tokenizer, say of a model."""
    if config.classifies:
        raise errors.ModelError(
            f"{folder} is of task {config.task}, whose model has no next tokens to compare; --check takes models that "
            "write texts"
        )
    return KnownModel(
        name=config.name or model_short_name(config.model.path),
        tokenizer=load_tokenizer(ModelConfig(path=str(folder), local_files_only=True)),
        rank=config.lora.r if config.lora else None,
        max_length=config.data.max_length,
        generation=generation,
        lacking=lacking,
        sees=config.sees,
    )
