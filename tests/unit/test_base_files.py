"""Files of a base that go with an export, told by their names; and where the hub cannot be asked for those."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kubetune.config.schema import ModelConfig
from kubetune.data.reading import hub
from kubetune.errors import EnvironmentFault
from kubetune.result.publishing import base_files

LICENCES = (
    "LICENSE", "LICENSE.txt", "MODEL_LICENSE", "Notice", "USE_POLICY.md", "LICENCE-MODEL", "Qwen LICENSE AGREEMENT",
    "COPYING", "Gemma_Terms_of_Use.pdf", "LICENSE.llama3.1",
)  # fmt: skip
OTHERS = (
    "README.md",
    "config.json",
    "license.py",
    "docs/LICENSE",
    "noticeable.txt",
    "license_plates.jsonl",
)


@pytest.mark.parametrize(
    ("name", "is_licence"), [*((n, True) for n in LICENCES), *((n, False) for n in OTHERS)]
)
def test_names_of_licences(name: str, is_licence: bool) -> None:
    assert base_files.is_licence(name) is is_licence


def test_a_hub_that_cannot_be_asked_leaves_what_its_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    folder = tmp_path / "export"
    messages = list[str]()
    for name in ("config.json", "NOTICE", "additional_chat_templates/rag.jinja"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(name)
    folder.mkdir()

    def cached(repo: str, name: str, *_: object) -> Path | None:
        return snapshot / name if (snapshot / name).is_file() else None

    monkeypatch.setattr(hub, "_download", cached)
    model = ModelConfig(path="org/model", local_files_only=True)
    tokenizer = SimpleNamespace(given_template=None, files={"chat_template.jinja": tmp_path})
    source = SimpleNamespace(
        model=model, result=SimpleNamespace(tokenizer=tokenizer), tell=messages.append
    )
    draft = SimpleNamespace(source=source, folder=folder)
    licences, templates = base_files.copy(cast(Any, draft))
    assert (licences, templates) == (("NOTICE",), ["additional_chat_templates/rag.jinja"])
    assert (folder / templates[0]).read_text() == templates[0]
    assert "org/model are looked for only in the local cache" in messages[0]
    tokenizer.files = {}
    assert base_files.copy(cast(Any, draft))[1] == []
    assert (
        "left out: additional_chat_templates/rag.jinja; beside them transformers would not see"
        in messages[-1]
    )
    tokenizer.given_template = "{{ messages }}"
    assert base_files.copy(cast(Any, draft))[1] == []
    with pytest.raises(EnvironmentFault, match="or is not to be asked"):
        hub.list_files(model, "org/model")
