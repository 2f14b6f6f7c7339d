"""Modelfiles: Ollama's template gives the prompts of the model's own, or none is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from kubetune import errors
from kubetune.cli import main
from kubetune.config.schema import ModelConfig
from kubetune.data.text.tokenizer import load_tokenizer
from kubetune.data.text.turns.template import CHATML, ChatTemplate
from kubetune.result.publishing import modelfile as modelfiles
from kubetune.result.publishing.modelfile import Base, Turn, modelfile, pieces_of
from tests.tiny import train_tokenizer

TOKENIZERS = Path(__file__).parents[2].parent / "shared" / "data" / "tokenizers"
HEADERS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
INST = (
    "{% if messages[0].role == 'system' %}{% set s = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ s if loop.last and s is defined else '' }}"
    "{{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


class Renderer:
    """Turns to prompts by a chat template."""

    def __init__(self, source: str) -> None:
        self.template = ChatTemplate(source, {})

    def __call__(self, turns: Sequence[Turn]) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        return self.template.render(messages, generation_prompt=True)


def as_ollama(template: str, turns: Sequence[Turn]) -> str:
    """Return what Go's template language makes of our few actions, here by translating them to Jinja's."""
    known = {
        "{{ if .System }}": "{% if system %}", "{{ .System }}": "{{ system }}", "{{ else }}": "{% else %}",
        "{{ range .Messages }}": "{% for m in messages %}", '{{ if eq .Role "user" }}': "{% if m[0] == 'user' %}",
        '{{ else if eq .Role "assistant" }}': "{% elif m[0] == 'assistant' %}", "{{ .Content }}": "{{ m[1] }}",
    }  # fmt: skip
    for action, jinja in known.items():
        template = template.replace(action, jinja)
    ends = iter(["{% endif %}", "{% endif %}", "{% endfor %}"])
    while "{{ end }}" in template:
        template = template.replace("{{ end }}", next(ends), 1)
    system = "".join(text for role, text in turns if role == "system")
    compiled = jinja2.Environment(keep_trailing_newline=True).from_string(template)
    return compiled.render(system=system, messages=turns)


TALKS: list[list[Turn]] = [
    [("user", "Hi")],
    [("user", "Hi"), ("assistant", "Hello."), ("user", "Who?")],
    [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Who?")],
]


@pytest.mark.parametrize("source", [CHATML, HEADERS], ids=["chatml", "headers"])
def test_prompts_are_those_of_the_chat_template(source: str) -> None:
    render = Renderer(source)
    pieces = pieces_of(render)
    assert pieces is not None
    for turns in TALKS:
        assert as_ollama(pieces.template(), turns) == render(turns)
    text = modelfile(render, stop=["<|eot|>"], base=None)
    assert "FROM .\n" in text
    assert 'PARAMETER stop "<|eot|>"' in text
    assert "FROM ./a.gguf\n" in modelfile(render, stop=[], base=None, gguf="a.gguf")


def test_the_base_of_an_adapter_is_a_folder_or_a_file_that_is_to_be_made() -> None:
    here = Base("/models/llama", Path("/models/llama"))
    text = modelfile(None, stop=[], base=here, gguf="a.gguf")
    assert "\nFROM /models/llama\nADAPTER ./a.gguf\n" in text
    text = modelfile(None, stop=[], base=Base("org/base"), gguf="a.gguf")
    assert "\nFROM ./base.gguf\nADAPTER ./a.gguf\n" in text
    assert "# base.gguf is to be the base, org/base, as GGUF" in text


def test_names_of_bases_write_no_lines_of_their_own() -> None:
    evil = "m\nADAPTER ./evil\rSYSTEM pwn\u2028FROM x"
    for base in (Base(evil), Base(evil, Path(f"/models/{evil}"))):
        text = modelfile(None, stop=[], base=base, gguf="a.gguf")
        commands = [line for line in text.splitlines() if not line.startswith("#")]
        assert commands == ["FROM ./base.gguf", "ADAPTER ./a.gguf"]


# What Ollama's parser would leave out, and a brace that would be read with the action behind it.
NO_BREAK_SPACE = CHATML.replace("<|im_end|>", "<|im_end|>\u00a0")


@pytest.mark.parametrize(
    "source",
    [
        INST,
        "{{ 'x' }}",
        "{{ messages[0].content }}{{ messages[0].content }}",
        NO_BREAK_SPACE,
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '{' }}{% endfor %}",
    ],
)
def test_a_template_that_is_not_so_simple_is_left_out_with_a_word(source: str) -> None:
    assert pieces_of(Renderer(source)) is None
    text = modelfile(Renderer(source), stop=[], base=None)
    assert 'TEMPLATE """' not in text
    assert "# TEMPLATE: the model's chat template has no form" in text
    assert "# Ollama 0.30 and newer runs it as it is" in text


def test_ends_of_answers_are_quoted_as_ollama_reads_them() -> None:
    text = modelfile(None, stop=['<"end" it>', "\n", "<\u200bend>"], base=None)
    # Read by Ollama's parser (0.30): three quotes may hold single ones, and line ends stand as they are.
    assert 'PARAMETER stop """<"end" it>"""\nPARAMETER stop "\n"\n' in text
    assert "# PARAMETER stop: a Modelfile cannot hold '<\\u200bend>'" in text


@pytest.mark.parametrize("adds_bos", [False, True])
def test_bos_is_left_to_ollama_only_where_the_tokenizer_adds_it(
    adds_bos: bool, tmp_path: Path
) -> None:
    """As with SmolLM2, whose BOS is `<|im_start|>`: a prompt without its first one is another prompt."""
    folder = train_tokenizer(tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["bos_token"] = "<|im_start|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if adds_bos:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = TemplateProcessing(
            "<|im_start|> $0", special_tokens=[("<|im_start|>", 1)]
        )
        backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    result = SimpleNamespace(tokenizer=load_tokenizer(ModelConfig(path=str(folder))))
    source = SimpleNamespace(result=result, kind="merged")
    draft: Any = SimpleNamespace(source=source, folder=folder, gguf_file=None)
    modelfiles.write(draft)
    text = (folder / "Modelfile").read_text()
    begins = "user" if adds_bos else "<|im_start|>user"
    assert '{{ if eq .Role "user" }}' + begins + "\n{{ .Content }}" in text


@pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="the published tokenizers are not here")
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_published_templates(name: str) -> None:
    folder = TOKENIZERS / name
    source = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    pieces = pieces_of(Renderer(source))
    assert pieces is not None
    assert all(as_ollama(pieces.template(), turns) == Renderer(source)(turns) for turns in TALKS)


def fake_ollama(folder: Path, code: int) -> None:
    """Write an `ollama` that notes where and with what it was called."""
    folder.mkdir()
    program = folder / "ollama"
    program.write_text(
        f'#!/bin/sh\necho "$PWD $*" > "{folder}/called"\necho no such model >&2\nexit {code}\n'
    )
    program.chmod(0o755)


def gguf_export(run_dir: Path) -> Path:
    folder = run_dir / "exports" / "step-000007-gguf-q8_0"
    folder.mkdir(parents=True)
    (folder / "Modelfile").write_text("FROM ./model-q8_0.gguf\n")
    (folder / "provenance.json").write_text(json.dumps({"files": {}}))
    return folder


def test_an_export_is_made_known_to_ollama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "Bot"
    run_dir.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert main(["serve", "--ollama", str(run_dir)]) == errors.USER
    assert "not in the PATH" in capsys.readouterr().err

    fake_ollama(tmp_path / "bin", 0)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert main(["serve", "--ollama", str(run_dir)]) == errors.USER
    assert "no export as GGUF" in capsys.readouterr().err

    folder = gguf_export(run_dir)
    assert main(["serve", "--ollama", str(run_dir)]) == errors.OK
    assert (tmp_path / "bin" / "called").read_text() == f"{folder} create bot -f Modelfile\n"
    assert main(["serve", "--ollama", f"mine={folder}"]) == errors.OK
    assert "ollama run mine" in capsys.readouterr().out

    (tmp_path / "bin" / "ollama").write_text("#!/bin/sh\necho bad file >&2\nexit 7\n")
    assert main(["serve", "--ollama", str(run_dir)]) == errors.ENVIRONMENT
    assert "exit code 7: bad file" in capsys.readouterr().err
