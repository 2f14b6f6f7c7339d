"""Files of the base that an export has besides weights and tokenizer: its licence, and chat templates with names.

Licences of bases ask for a copy with what is derived from them. Templates in `additional_chat_templates` are the
user's to ask for by name (`apply_chat_template(chat_template="rag")`); training reads that for tools alone.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path, PurePosixPath
from typing import Final

from kubetune.config.schema import ModelConfig
from kubetune.data.reading import hub
from kubetune.data.text.tokenizer_files import TOOL_TEMPLATE
from kubetune.errors import KubetuneError
from kubetune.result.publishing.writers import Job

_LICENCE: Final = re.compile(
    r"(^|[ _.-])(licen[cs]es?|copying|copyright|notices?|use_policy|usage_policy|terms|patents)($|[ _.-])",
    re.IGNORECASE,
)
_NO_TEXTS: Final = (".py", ".json", ".jsonl", ".parquet", ".safetensors", ".bin", ".png", ".jpg")


def is_licence(name: str) -> bool:
    """A file of this path, at the top of a repository, has terms of its licence."""
    return "/" not in name and bool(_LICENCE.search(name)) and not name.lower().endswith(_NO_TEXTS)


def is_named_template(name: str) -> bool:
    """A file of this path is a chat template that transformers loads by its name; the one for tools is trained with."""
    path = PurePosixPath(name)
    return (
        path.parent == PurePosixPath(TOOL_TEMPLATE).parent
        and path.suffix == ".jinja"
        and name != TOOL_TEMPLATE
    )


def copy(job: Job, folder: Path) -> tuple[list[str], list[str]]:
    """Copy the base's files on its licence, and its named chat templates; returns the names of both."""
    model = job.config.model
    licences = [name for name in _names(job, model, model.path) if is_licence(name)]
    source = model.tokenizer or model.path
    templates = [name for name in _names(job, model, source) if is_named_template(name)]
    tokenizer = job.result.tokenizer
    if tokenizer.given_template is not None:
        templates = []  # the run's own stands for all
    elif templates and "chat_template.jinja" not in tokenizer.files:
        job.tell(
            f"left out: {', '.join(templates)}; beside them transformers would not see the template trained with"
        )
        templates = []
    for path, names in ((model.path, licences), (source, templates)):
        for name, file in hub.find_files(model, path, names).items() if names else ():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)
    return licences, templates


def _names(job: Job, model: ModelConfig, path: str) -> list[str]:
    """Paths of the model's files; of those in the hub's cache where the hub cannot be asked, which is said."""
    try:
        return hub.list_files(model, path)
    except KubetuneError as error:
        cached = next(
            iter(hub.find_files(model, path, ("config.json", "tokenizer_config.json")).values())
        ).parent
        job.tell(
            f"licence and chat templates of {path} are looked for in the local cache alone: {error}"
        )
        return hub.list_files(model, str(cached))
