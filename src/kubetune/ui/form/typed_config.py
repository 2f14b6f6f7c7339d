"""The config of what is typed into the form, and its problems as the form shows them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.errors import ConfigError, KubetuneError
from kubetune.ui.form.field_sentences import field_sentence
from kubetune.ui.form.fixes import field_of, for_problems
from kubetune.ui.site import Site

# The remedy for settings that the page refuses, since they run code.
IN_A_TERMINAL = "write it into a run file, and start that in a terminal"


def config_of(site: Site, body: Mapping[str, Any]) -> Config:
    """Return the config of what is typed. Raise ConfigError, also for settings that run code."""
    typed = typed_values(body)

    # The method is a field of its own. "true" stands for a section with defaults, which any of its keys makes too.
    of_lora = [key for key in typed if key.startswith("lora.")]
    if of_lora and not typed.pop("lora", ""):
        raise ConfigError(
            f"{', '.join(of_lora)}: for LoRA only, and the method is full fine-tuning; empty them or change it"
        )

    # As on a command line, so that a field takes what an override takes.
    # A section comes before its settings: `data.train=FILE` after `data.train.columns.text=review` would undo it.
    overrides = [f"{key}={text}" for key, text in sorted(typed.items())]
    config = load_config(None, overrides=overrides)

    base = body.get("base")
    run_dir = None
    if base:
        run_dir = site.records.find(str(base))

    _require_allowed(config, run_dir)
    if config.output is None:
        output = (site.folder / (config.name or "run")).absolute()
        config = config.model_copy(update={"output": str(output)})
    return config


def typed_values(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that are filled in. Raise ConfigError for anything else."""
    values = body.get("values")
    if not isinstance(values, dict) or not all(isinstance(text, str) for text in values.values()):
        raise ConfigError("values: expected texts by key")
    return {key: text for key, text in values.items() if text.strip()}


def _require_allowed(config: Config, run_dir: Path | None) -> None:
    """Raise ConfigError for code that was typed, and for what the repeated run brings that nobody has allowed here.

    `run_dir`: the run that is repeated. It may be somebody else's, though its settings are in the form.
    """
    typed: Sequence[str] = consent.EFFECTS
    if run_dir is not None:
        typed = consent.changed(config, read_config(run_dir))
    typed_code = [key for key in consent.CODE if key in typed]
    for code in consent.effects_of(config, typed_code):
        raise ConfigError(f"{code.key} has code run ({code.what}): {IN_A_TERMINAL}")
    # Other values come from the repeated run.
    if run_dir is not None:
        brought = [key for key in consent.EFFECTS if key not in typed]
        consent.require(consent.effects_of(config, brought), run_dir, instead=IN_A_TERMINAL)


def command_of(site: Site, name: str | None, verb: str) -> str:
    """Return the command line that does with the run file what the page does."""
    return shlex.join(["kubetune", verb, str(run_file(site, name))])


def run_file(site: Site, name: str | None) -> Path:
    """Return the run file of a new run, which is next to the runs."""
    return site.folder / f"{name or 'run'}.yaml"


def lines_of(error: KubetuneError) -> list[str]:
    """Return the lines of an error, without the place: everything was typed into the form."""
    lines = []
    for line in str(error).splitlines():
        text = re.sub("^(override|command line): ", "", line)
        # The count of a list that is shown whole, and a reminder that nobody needs next to a form.
        if re.fullmatch(r"[\d,]+ problems\. Nothing was written\.", text):
            continue
        if text.strip():
            lines.append(for_form(text))
    return lines


def for_form(text: str) -> str:
    """Return a problem without what to write into a file, if a button does it."""
    return re.sub(r"; other names are given so: .*? proposes them", "", text)


def with_fixes(
    problems: Sequence[str],
    warnings: Sequence[str],
    typed: Mapping[str, str],
    known: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return problems and warnings with the buttons that fix them, and the fields that they are about.

    `known`: fixes that the words of problems do not say.
    """
    fixes = [*for_problems([*problems, *warnings], typed), *known]
    fields = {text: field_of(text, typed) for text in (*problems, *warnings)}
    # A problem with a known fix belongs to the field that the fix fills in.
    for fix in fixes:
        fields[fix["of"]] = fields[fix["of"]] or next(iter(fix["values"]))
    return {
        "problems": list(problems),
        "warnings": list(warnings),
        "fixes": fixes,
        "fields": fields,
        "sentences": {text: field_sentence(text, key) for text, key in fields.items()},
    }
