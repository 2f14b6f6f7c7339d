"""Files of the base that an export has besides weights and tokenizer: its licence, and chat templates with names.

Licences of bases ask for a copy with what is derived from them. Templates in `additional_chat_templates` are the
user's to ask for by name (`apply_chat_template(chat_template="rag")`); training reads only that for tools.
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
from kubetune.result.forms.draft import ExportDraft, ExportSource

# A word of the name: LICENSE, LICENSE.txt, USE_POLICY.md, third-party-notices.
_LICENCE: Final = re.compile(
    r"(^|[ _.-])(licen[cs]es?|copying|copyright|notices?|use_policy|usage_policy|terms|patents)($|[ _.-])",
    re.IGNORECASE,
)
# Endings of files that are no texts for people, whatever their names say.
_NO_TEXTS: Final = (
    ".py",
    ".json",
    ".jsonl",
    ".parquet",
    ".safetensors",
    ".bin",
    ".png",
    ".jpg",
)


def is_licence(name: str) -> bool:
    """True if a file of this path, at the top of a repository, has terms of its licence."""
    if "/" in name or name.lower().endswith(_NO_TEXTS):
        return False
    return _LICENCE.search(name) is not None


def is_named_template(name: str) -> bool:
    """True if a file of this path is a chat template that transformers loads by its name.

    The template for tools is not one of them: it is used in training.
    """
    path = PurePosixPath(name)
    is_template = path.parent == PurePosixPath(TOOL_TEMPLATE).parent and path.suffix == ".jinja"
    return is_template and name != TOOL_TEMPLATE


def copy(draft: ExportDraft) -> tuple[tuple[str, ...], list[str]]:
    """Copy the base's files on its licence, and its named chat templates. Return the names of both."""
    source = draft.source
    model = source.model
    licences = [name for name in _names(source, model.path) if is_licence(name)]

    # Templates belong to the tokenizer, which may come from elsewhere.
    of_tokenizer = model.tokenizer or model.path
    templates = [name for name in _names(source, of_tokenizer) if is_named_template(name)]

    # transformers reads a folder's named templates only if none of them is the one that was trained with.
    tokenizer = source.result.tokenizer
    if tokenizer.given_template is not None:
        templates = []  # the template of the run file stands for all
    elif templates and "chat_template.jinja" not in tokenizer.files:
        source.tell(
            f"left out: {', '.join(templates)}; beside them transformers would not see the template trained with"
        )
        templates = []

    _copy_files(model, model.path, licences, draft.folder)
    _copy_files(model, of_tokenizer, templates, draft.folder)
    return tuple(licences), templates


def _copy_files(
    model: ModelConfig,
    path: str,
    names: list[str],
    folder: Path,
) -> None:
    """Copy files of a model, which are on this machine or are fetched, into a folder."""
    if not names:
        return
    for name, file in hub.find_files(model, path, names).items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)


def _names(source: ExportSource, path: str) -> list[str]:
    """Return the paths of a model's files. If the hub cannot be asked, say so, and list its cache."""
    model = source.model
    try:
        return hub.list_files(model, path)
    except KubetuneError as error:
        # The model was loaded, so at least one of these is in the folder of the cache.
        files = hub.find_files(model, path, ("config.json", "tokenizer_config.json"))
        cached = next(iter(files.values())).parent
        source.tell(
            f"licence and chat templates of {path} are looked for only in the local cache: {error}"
        )
        return hub.list_files(model, str(cached))
