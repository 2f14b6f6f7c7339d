"""Make the command line of a verb from what is chosen on the page.

    export, {"form": "gguf", "gguf": "q8_0", "checkpoint": "best"}
    kubetune export outputs/demo --gguf=q8_0 --checkpoint=best

Only these options are taken, and each is checked as its verb does before it loads a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kubetune.config.resolved import read_config
from kubetune.config.vllm import require_address
from kubetune.errors import ConfigError
from kubetune.result.forms import FORMS, chosen
from kubetune.result.forms.form import QUANTIZE
from kubetune.result.forms.wanted import WantedExport, place_of, require_place
from kubetune.result.publishing.push_target import WantedPush, find_target, require_way
from kubetune.rundir import checkpoints
from kubetune.ui.result.result_choices import (
    PLAIN,
    Choice,
    evaluations_of,
    forms_of,
    gguf_types_of,
    pushed_forms_of,
)

# Options that verbs with a model have. `--trust-code` is left out: a page allows no code of a run.
_RESULT: Final = ("checkpoint", "model")
_EXPORTS: Final = (*_RESULT, "dtype", "device")
_PUSH_SWITCHES: Final = ("public", "despite_gate", "modelpack", "plain_http")
_MOST_CHARACTERS: Final = 4096

# One folder of an export. It does not begin with a dot, as folders that are half written do.
_FOLDER: Final = re.compile(r"[^./\\\0\ud800-\udfff][^/\\\0\ud800-\udfff]{0,199}")


def words_of(verb: str, run_dir: Path, options: Mapping[str, Any]) -> list[str]:
    """Return the command of kubetune for what is chosen. Raise ConfigError for what it would refuse at once."""
    if verb not in _VERBS:
        raise ConfigError(f"verb: found {verb!r}; expected one of {', '.join(_VERBS)}")
    texts = _texts(options)
    # A missing checkpoint is refused before anything that depends on it.
    checkpoint = texts.get("checkpoint") or "best"
    if not re.fullmatch(r"best|last|\d{1,12}", checkpoint):
        raise ConfigError(f"checkpoint: found {checkpoint!r}; expected best, last or a step")
    checkpoints.choose(run_dir, checkpoint)

    words = [verb, str(run_dir), *_VERBS[verb](run_dir, texts)]
    if texts:
        raise ConfigError(f"{', '.join(texts)}: no option of {verb} that this page has")
    return words


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that are filled in."""
    texts = {}
    for key, value in options.items():
        if not isinstance(value, str) or len(value) > _MOST_CHARACTERS or "\0" in value:
            raise ConfigError(f"{key}: expected a text of at most {_MOST_CHARACTERS:,} characters")
        if value.strip():
            texts[key] = value.strip()
    return texts


def _taken(texts: dict[str, str], *names: str) -> list[str]:
    """Take options out of the texts, and return them as words."""
    words = []
    for name in names:
        if name in texts:
            # With "=", since a text may begin with a dash.
            words.append(f"--{name.replace('_', '-')}={texts.pop(name)}")
    return words


def _require_offered(choices: Sequence[Choice], value: str, name: str) -> None:
    """Raise ConfigError for what is not on the list, or does not fit this run."""
    for choice in choices:
        if choice.value == value:
            if choice.refusal:
                raise ConfigError(choice.refusal)
            return
    expected = ", ".join(choice.value for choice in choices)
    raise ConfigError(f"{name}: found {value!r}; expected one of {expected}")


def _evaluate(run_dir: Path, texts: dict[str, str]) -> list[str]:
    on = texts.pop("on", "own")
    _require_offered(evaluations_of(run_dir), on, "on")
    words = []
    if on == "base":
        # The page shows what the verb prints as JSON. No model is loaded, so no name is needed.
        return ["--compare=base", "--json", *_taken(texts, "checkpoint")]
    if on == "data":
        if "data" not in texts:
            raise ConfigError("which data? Give a file, or what a run file may have as data.train.")
        words = _taken(texts, "data")
    if on == "benchmarks":
        if "benchmarks" not in texts:
            raise ConfigError("which benchmarks? Give their names, such as arc_easy,hellaswag.")
        words = _taken(texts, "benchmarks", "limit")
        if texts.pop("with_base", ""):
            words.append("--with-base")
    return [*words, *_taken(texts, *_RESULT)]


def _export(run_dir: Path, texts: dict[str, str]) -> list[str]:
    form = texts.pop("form", PLAIN)
    gguf_types = gguf_types_of(run_dir)
    _require_offered(forms_of(run_dir, gguf_types), form, "form")
    words = []
    if form == "merged":
        words = ["--merge"]
    if form in FORMS and FORMS[form].option == QUANTIZE:
        words = [f"{QUANTIZE}={form}"]
    gguf = texts.get("gguf", "")
    if form == "gguf":
        _require_offered(gguf_types, gguf, "gguf")
        words = _taken(texts, "gguf")

    # Only a name is taken, so that exports are written below the run.
    folder = texts.pop("output", "")
    if folder and not _FOLDER.fullmatch(folder):
        raise ConfigError(
            f"output: found {folder!r}; expected the name of a folder, which is made in {run_dir / 'exports'}"
        )
    if folder:
        place = run_dir / "exports" / folder
        words.append(f"--output={place}")
    else:
        checkpoint = checkpoints.choose(run_dir, texts.get("checkpoint") or "best")
        place = place_of(run_dir, checkpoint.name, _name_of(run_dir, form, gguf))
    require_place(place)
    return [*words, *_taken(texts, *_EXPORTS, "max_shard_size")]


def _name_of(run_dir: Path, form: str, gguf: str) -> str:
    """Return the verb's name for the folder of a form."""
    if form == PLAIN:
        return chosen(WantedExport(), read_config(run_dir).lora)
    if form == "gguf":
        return f"gguf-{gguf}"
    return form


def _push(run_dir: Path, texts: dict[str, str]) -> list[str]:
    place = texts.pop("repo", "")
    # It is a separate word of the command, which would take it for an option.
    if place.startswith("-"):
        raise ConfigError(f"{place!r} is no name of a repository; expected ORG/NAME")
    form = texts.pop("form", PLAIN)
    _require_offered(pushed_forms_of(run_dir), form, "form")
    switches = [name for name in _PUSH_SWITCHES if texts.pop(name, "")]
    wanted = WantedPush(place or None, merge=form == "merged", **dict.fromkeys(switches, True))
    require_way(find_target(run_dir, wanted))

    words = [place] if place else []
    if wanted.merge:
        words.append("--merge")
    words += [f"--{name.replace('_', '-')}" for name in switches]
    return [*words, *_taken(texts, *_EXPORTS)]


def _serve(run_dir: Path, texts: dict[str, str]) -> list[str]:
    del run_dir
    url = texts.pop("url", "")
    require_address(url)
    return [f"--check={url}", *_taken(texts, "model")]


_VERBS: Final[Mapping[str, Callable[[Path, dict[str, str]], list[str]]]] = {
    "evaluate": _evaluate,
    "export": _export,
    "push": _push,
    "serve": _serve,
}
