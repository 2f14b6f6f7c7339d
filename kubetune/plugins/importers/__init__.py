"""Other tools' configs, turned into run files: axolotl, LLaMA-Factory, TRL, ms-swift, and a job's resources.

What means the same is carried over, what only comes near is approximated, what is not there is dropped; each key of
the file is named in one of the lists. Where a file leaves a key out and its tool's default is not ours, theirs is
written down. Aliases.py holds the names that need no judgement; here is the rest.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kubetune.base.humanize import shell_word
from kubetune.config.load import load_config
from kubetune.config.schema import DataConfig
from kubetune.errors import ConfigError
from kubetune.plugins.importers import axolotl, llama_factory, ms_swift, preferences, resources, trl
from kubetune.plugins.importers.draft import WRONG_KINDS, Draft, Note, is_empty
from kubetune.plugins.importers.foreign import Foreign, read_foreign
from kubetune.plugins.importers.writing import comment, inline, run_file

PEERS: dict[str, ModuleType] = {
    module.NAME: module for module in (axolotl, llama_factory, trl, ms_swift, resources)
}

_KNOWN: dict[str, tuple[Any, ...]] = {
    "stage": ("sft", "pt", "dpo", "kto", "rm"),
    "rl": preferences.METHODS,
    "rlhf_type": preferences.METHODS,
    "reward_model": (True,),
    "process_reward_model": (),
    "task_type": ("causal_lm", "seq_cls"),
    "num_generations": (),
    "reward_funcs": (),
}
"""Keys that say what kind of learning it is, and the kinds that kubetune does."""
_COMMANDS = ("sft", "pt", "train", "rlhf", *preferences.METHODS)
_DOES = "kubetune does supervised fine-tuning, preference tuning and reward models only"


@dataclass(frozen=True)
class Imported:
    """A run file's text, the tool it was made from, and what became of each key."""

    peer: str
    text: str
    notes: Sequence[Note]

    def of(self, kind: str) -> list[Note]:
        """The notes of one kind."""
        return [note for note in self.notes if note.kind == kind]


def import_config(path: Path, peer: str | None = None) -> Imported:
    """A run file equal to another tool's config. `peer`: a key of PEERS; left out: seen from the keys.

    Raises ConfigError for a file that is none of these, or a kind of learning that kubetune does not do.
    """
    foreign = read_foreign(path)
    draft = understand(path, foreign, peer or foreign.peer or _recognise(path, foreign))
    _require_whole(path, draft)
    text = _text(path, draft)
    _require_valid(path, text, draft)
    return Imported(draft.peer, text, draft.notes)


def understand(path: Path, foreign: Foreign, peer: str) -> Draft:
    """Fate of each setting. Raises ConfigError for a kind of learning that kubetune does not do."""
    _require_known(path, foreign)
    draft = Draft(peer, foreign.settings, foreign.lines, str(path), command=foreign.command)
    try:
        preferences.learn(draft, foreign.command)
        if peer == llama_factory.NAME:
            llama_factory.convert(draft, path.absolute().parent)
        else:
            PEERS[peer].convert(draft)
        preferences.finish(draft)
        _settle(draft)
    except WRONG_KINDS:
        draft.refuse_value(draft.at)
    _complete(draft)
    why = "a further command of the script; a run file holds one run"
    draft.notes += [
        Note("dropped", f"line {line}", command, why, line)
        for line, command in foreign.more.items()
    ]
    return draft


def _settle(draft: Draft) -> None:
    """Take out what our sections do not allow together, and say so."""
    if draft.settings.get(("training", "global_batch_tokens")) == "packed":
        _settle_packing(draft)
    if not draft.has("data.eval"):
        for key in (
            "early_stopping_patience",
            "metric_for_best_model",
            "greater_is_better",
            "eval_steps",
        ):
            draft.withdraw(
                f"training.{key}",
                "nothing is evaluated, since no data are given for it; set data.eval",
            )
    if draft.has("push.private") and not draft.has("push.repo"):
        del draft.settings[("push", "private")]
        draft.unneeded("hub_private_repo", "nothing is uploaded")
    ours = draft.settings
    if ("lora",) not in ours and draft.peer != resources.NAME:
        for part in [path[1] for path in ours if path[0] == "lora" and len(path) == 2]:
            draft.withdraw(f"lora.{part}", "every parameter is trained, so it says nothing")
    refused = [
        ("quantization",),
        ("lora", "dropout"),
        ("lora", "use_dora"),
        ("training", "parallelism"),
    ]
    if (
        ("lora",) not in ours
        or ours.get(("task",), "causal_lm") != "causal_lm"
        or any(map(ours.get, refused))
    ):
        why = "training.fp8 is for LoRA without dropout, on a base that is neither quantised nor sharded"
        draft.withdraw("training.fp8", why)
    if ours.get(("training", "parallelism")) == "fsdp":
        _settle_sharding(draft)


def _settle_packing(draft: Draft) -> None:
    """A global batch that counts packed rows, as a number of tokens."""
    rows = ("training", "global_batch_size")
    if rows in draft.settings:
        key, number = draft.origins.pop(rows), draft.settings.pop(rows)
        draft.comments.pop(rows, None)
        length = draft.settings.get(
            ("data", "max_length"), DataConfig.model_fields["max_length"].default
        )
        said = f"training.global_batch_tokens: {number * length:,}, {number} full rows of {length:,} tokens"
        draft.carry(key, "training.global_batch_tokens", number * length, said)


def _settle_sharding(draft: Draft) -> None:
    """Settings that FSDP2 cannot be combined with here."""
    task = draft.settings.get(("task",), "causal_lm")
    full = ("lora",) not in draft.settings
    refused = {
        "a quantised base, which is small,": draft.settings.get(("quantization",), "none")
        not in ("none", "auto"),
        f"task: {task}": task == "sequence_classification",
        "preference.images without lora": full and draft.has("preference.images"),
        "DoRA": bool(draft.settings.get(("lora", "use_dora"))),
        "a model with lora.modules_to_save": draft.has("lora.modules_to_save"),
    }
    what = next((what for what, is_found in refused.items() if is_found), None)
    if what is not None:
        draft.withdraw("training.parallelism", f"{what} is not sharded; each GPU holds a copy")
    elif draft.settings.get(("training", "optim")) == "adamw_8bit" and full:
        key = draft.origins[("training", "optim")]
        draft.approximate(
            key,
            "training.optim",
            "adamw",
            "8-bit state is not sharded; slices of AdamW's are small",
        )


def _complete(draft: Draft) -> None:
    """One note for each key, and none without: a key whose setting was taken out again counts as dropped."""
    told = {note.key for note in draft.notes}
    for key, value in draft.given.items():
        if key not in told and is_empty(value):
            draft.unneeded(key, "left empty")
        elif key not in told:
            draft.drop(key, "read, but nothing here follows from it")
    last = {(note.key, note.kind == "assumed"): note for note in draft.notes}
    draft.notes[:] = [
        note for note in draft.notes if last[(note.key, note.kind == "assumed")] is note
    ]


def _recognise(path: Path, foreign: Foreign) -> str:
    points = {
        name: sum(mark in foreign.settings for mark in module.MARKS)
        for name, module in PEERS.items()
    }
    first, second = sorted(points, key=lambda name: -points[name])[:2]
    if points[first] > points[second]:
        return first
    found = f"keys {', '.join(list(foreign.settings)[:8])}"
    raise ConfigError(
        f"{path}: not recognised as a config of {', '.join(PEERS)}; found {found}. Say whose it is with --from. "
        "Nothing was written."
    )


def _require_known(path: Path, foreign: Foreign) -> None:
    problems = []
    for key, allowed in _KNOWN.items():
        value = foreign.settings.get(key)
        if value and value not in allowed:
            where = f"{path}:{foreign.lines.get(key, 1)}"
            problems.append(f"{where}: {key} is {inline(value)[:60]}; {_DOES}.")
    if foreign.command and foreign.command not in _COMMANDS:
        problems.append(f"{path}: runs `{foreign.command}`; {_DOES}.")
    if problems:
        raise ConfigError([*problems[:-1], f"{problems[-1]} Nothing was written."])


def _require_whole(path: Path, draft: Draft) -> None:
    """A model and data; where a key that names them could not be carried over, its line says why."""
    needs = {"model.path": "model", "data.train": "data to train on"}
    missing = [what for needed, what in needs.items() if not draft.has(needed)]
    if not missing:
        return
    why = [
        f"{path}:{note.line}: {note.key}: {note.text}."
        for note in draft.notes
        if note.kind == "dropped" and note.line and " holds $" in note.text
    ]
    found = f"found as a config of {draft.peer}: {', '.join(list(draft.given)[:8])}. Nothing was written."
    raise ConfigError(why or f"{path}: names no {' and no '.join(missing)}; {found}")


def _text(path: Path, draft: Draft) -> str:
    """The run file, with a heading, and at its end what to look at."""
    settings = dict(draft.settings)
    if settings.get(("task",)) == "causal_lm":
        del settings[("task",)]
    heading = [
        f"Made by `kubetune import {shell_word(path.name)}` from a config of {draft.peer}.",
        "`kubetune plan` shows what it comes to, `kubetune data check` what would be trained.",
    ]
    parts = [comment(heading), run_file(_plain(settings), draft.comments)]
    for kind, title in (
        ("dropped", "Not carried over:"),
        ("approximated", "Only near to the original:"),
    ):
        notes = [note for note in draft.notes if note.kind == kind]
        if notes:
            parts.append(comment([title, *(f"  {_key(note)}: {note.text}" for note in notes)]))
    return "\n".join(parts)


def _key(note: Note) -> str:
    shown = inline(note.value) if note.value is not None else ""
    return f"{note.key} ({shown})" if 0 < len(shown) <= 40 else note.key


def _plain(settings: dict[tuple[str, ...], object]) -> dict[tuple[str, ...], object]:
    """The short spellings that people write: a model that is only a name, a source that is only a path."""
    plain = dict(settings)
    if [key for key in plain if key[0] == "model"] == [("model", "path")]:
        plain = {
            ("model",) if key == ("model", "path") else key: value for key, value in plain.items()
        }
    for key in (("data", "train"), ("data", "eval")):
        sources = plain.get(key)
        if isinstance(sources, list):
            short = [
                item["path"] if isinstance(item, dict) and list(item) == ["path"] else item
                for item in sources
            ]
            plain[key] = short[0] if len(short) == 1 and isinstance(short[0], str) else short
    return plain


def _require_valid(path: Path, text: str, draft: Draft) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(text, "utf-8")
        try:
            load_config(file)
        except ConfigError as error:
            problems = [_in_their_words(problem, path, file, draft) for problem in error.problems]
            raise ConfigError(
                [
                    f"{path}: what it says is no valid run:",
                    *problems,
                    "Mend the file. Nothing was written.",
                ]
            ) from None


def _in_their_words(problem: str, path: Path, file: Path, draft: Draft) -> str:
    """A problem of the run file, told at the line and by the key of the file that it was made from."""
    text = re.sub(rf"^{re.escape(str(file))}(:\d+)?: ", "", problem)
    setting = re.split(r"[:\[]", text, maxsplit=1)[0]
    parts = tuple(setting.split("."))
    within = [key for origin, key in draft.origins.items() if origin[: len(parts)] == parts]
    around = (
        draft.origins[parts[:end]]
        for end in range(len(parts), 0, -1)
        if parts[:end] in draft.origins
    )
    key = next(around, within[0] if len(within) == 1 else None)
    if key is None:
        return f"{path}: as a run file: {text}"
    return f"{path}:{draft.lines.get(key, 1)}: {key}: becomes {text}"
