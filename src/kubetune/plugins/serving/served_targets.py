"""What is served: a run's newest export, a model of the hub, an image of a registry, or a path in the pod.

A target is a word of the command line, with `NAME=` in front if it is to be asked for by that name. Several adapters are
served on one base; whole weights are served alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kubetune.base.files import require_plain
from kubetune.base.humanize import shell_word
from kubetune.base.registry.address import SCHEME, cached_digest, parse
from kubetune.config import consent
from kubetune.config.data_files import is_hub_id
from kubetune.config.naming import OF_TRACKERS, RESOLVED
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config, LoraConfig
from kubetune.config.vllm import LORA_RANKS
from kubetune.data.text.tokenizer_files import read_json
from kubetune.errors import ConfigError
from kubetune.k8s.run_names import OUTPUTS, run_name
from kubetune.plugins.serving import kserve
from kubetune.result.forms.programs import is_known_to_vllm
from kubetune.result.forms.wanted import PROVENANCE
from kubetune.rundir.adapter_settings import require_as_trained

# Rank of an adapter that is not on this machine to be read. vLLM takes any rank up to this maximum.
DEFAULT_RANK: Final = 64

# What to call each kind of export.
_KINDS: Final = {"adapter": "adapter", "merged": "merged weights", "model": "weights"}

# A name that requests ask for.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class ServedTarget:
    """A model or an adapter to serve."""

    name: str  # what requests ask for
    path: str  # a hub id, or a path in the pod
    rank: int = DEFAULT_RANK  # of an adapter
    base: str | None = None  # the model that an adapter belongs to; None for whole weights
    run: Config | None = None  # config of the run that it comes from
    # What provenance.json says about the base of an exported adapter.
    known: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetOptions:
    """The options of `kubetune serve` that say what its words name."""

    base: str | None = None
    rank: int | None = None
    merged: bool = False
    trust_code: str | None = None
    by_kserve: bool = False  # which takes more addresses


def split_name(word: str) -> tuple[str, str]:
    """Return name and path of `NAME=PATH`; no name for `PATH`."""
    name, equals, path = word.partition("=")
    if not equals:
        return "", word
    return name, path


def target_of(word: str, options: TargetOptions) -> ServedTarget:
    """Return what a word of the command line names. Raise ConfigError if that cannot be served."""
    name, path = split_name(word)
    if (Path(path) / RESOLVED).is_file():
        return _of_run(name, Path(path), merged=options.merged, trust_code=options.trust_code)
    if options.merged:
        raise ConfigError(
            f"--merged: {path} is no run directory, and only runs have merged exports; leave it out"
        )
    _require_no_folder(path)
    addresses: tuple[str, ...] = ("/", SCHEME)
    if options.by_kserve:
        addresses += (*kserve.ADDRESSES, kserve.NATIVE_IMAGE)
    if not (path.startswith(addresses) or is_hub_id(path)):
        raise ConfigError(
            f"{path}: expected a run directory (`kubetune runs` lists them), a model of the hub (ORG/NAME), an image "
            "(oci://registry/name:tag) or an absolute path in the pod; it is none of them"
        )
    return ServedTarget(name or last_name(path), path, options.rank or DEFAULT_RANK, options.base)


def last_name(path: str) -> str:
    """Return the last part of a path, a hub id, or the address of an image without its tag."""
    if path.startswith(SCHEME):
        path = parse(path).name
    last = path.rstrip("/").rsplit("/", 1)[-1]
    if "://" in path:
        # A revision or a tag is no part of the name.
        last = re.split("[@:]", last)[0]
    return last


def _require_no_folder(path: str) -> None:
    """Raise ConfigError for a path that looks like a run directory of this machine, but is not one."""
    folder = Path(path)
    is_below_a_folder = folder.parent.is_dir() and len(folder.parts) > 1
    if path.startswith("/") or "://" in path or not (folder.is_dir() or is_below_a_folder):
        return
    mistake = "no such folder"
    if folder.is_dir():
        mistake = "a folder, but no run directory: it has no resolved.json"
    raise ConfigError(
        f"{path}: {mistake}; expected a run directory (`kubetune runs` lists them). To serve the model of the hub with "
        f"this name, run the command where there is no folder {folder.parts[0]}. Nothing was written."
    )


def _of_run(name: str, run_dir: Path, *, merged: bool, trust_code: str | None) -> ServedTarget:
    """Return the newest export of a run, as the pods see it on the outputs volume."""
    config = read_config(run_dir)
    require_plain(run_dir, but=OF_TRACKERS)
    consent.require(consent.effects_of(config, [consent.REMOTE_CODE]), run_dir, trust_code)
    name_of_run = run_name(config.name, config.model.path)
    name = name or name_of_run
    if merged and not config.lora:
        raise ConfigError(
            f"{run_dir} trained every weight, so it has no merged export; leave --merged out"
        )
    if config.classifies and config.task != "reward_model":
        raise ConfigError(
            f"{run_dir} is a classifier, which vLLM does not serve; use kubetune.classify or kubetune generate"
        )
    # Whole weights, which need no base.
    if merged or not config.lora:
        export = _newest_export(run_dir, "merged" if merged else "model")
        return ServedTarget(name, _path_in_pod(name_of_run, export), run=config)

    # An adapter, of which vLLM has to know every part, on a base that the pods can load.
    unsupported = _beyond_vllm(config.lora, classifies=config.classifies)
    if unsupported:
        raise ConfigError(
            f"{run_dir}: vLLM loads no adapters with {unsupported}; serve its merged weights: "
            f"kubetune export {shell_word(run_dir)} --merge, then --merged"
        )
    export = _newest_export(run_dir, "adapter")
    require_as_trained(export.parent, config.lora)
    base = _base_path(run_dir, config.model.path)
    if not (base.startswith(("/", SCHEME)) or is_hub_id(base)):
        raise ConfigError(
            f"{run_dir}: its base {base} is a path of this machine; serve its merged export with --merged"
        )
    known = _base_of(run_dir, export)
    path = _path_in_pod(name_of_run, export)
    return ServedTarget(name, path, config.lora.r, base, config, known)


def _base_path(run_dir: Path, path: str) -> str:
    """Return the path of a run's base; of an image, by the digest that the run began with, though its tag may move."""
    if not path.startswith(SCHEME):
        return path
    from kubetune.data.prepared import identity

    part = identity.read(run_dir).get("model")
    digest = None if part is None else cached_digest(part.path, path)
    if digest is None:
        return path
    address = parse(path)
    return str(replace(address, reference=digest))


def _newest_export(run_dir: Path, kind: str) -> Path:
    """Return the provenance.json of the newest export. Raise ConfigError if the run has none of this kind."""
    # Steps have six digits in names of folders, so the last name is that of the newest step.
    exports = sorted((run_dir / "exports").glob(f"step-*-{kind}/{PROVENANCE}"))
    if exports:
        return exports[-1]
    flag = " --merge" if kind == "merged" else ""
    raise ConfigError(
        f"{run_dir} has no export of its {_KINDS[kind]}; make one first, where its volume is mounted: "
        f"kubetune export {shell_word(run_dir)}{flag}"
    )


def _path_in_pod(name: str, export: Path) -> str:
    """Return where the pods see an export. `export`: its provenance.json on this machine."""
    return f"{OUTPUTS}/{name}/exports/{export.parent.name}"


def _base_of(run_dir: Path, provenance: Path) -> dict[str, Any]:
    """Return what is known of an adapter's base. Raise ConfigError if vLLM may ignore the adapter in silence."""
    # On some kinds of models vLLM takes an adapter and leaves parts of it out, without an error.
    base: dict[str, Any] = read_json(provenance).get("base", {})
    if not is_known_to_vllm(base):
        kind = base.get("experts_of") or base["text_of"]
        raise ConfigError(
            f"{run_dir}: vLLM is not known to load adapters on {kind}, and may ignore parts of one in silence; serve its "
            f"merged weights: kubetune export {shell_word(run_dir)} --merge, then --merged. Nothing was written."
        )
    return base


def _beyond_vllm(lora: LoraConfig, *, classifies: bool) -> str:
    """Return the parts of an adapter that vLLM refuses (its peft_helper.py); empty if it loads all of it."""
    parts = []
    if lora.use_dora:
        parts.append("lora.use_dora")
    if lora.modules_to_save:
        parts.append("lora.modules_to_save")
    if classifies:
        parts.append("its own head")
    return " and ".join(parts)


def require_servable(targets: Sequence[ServedTarget]) -> None:
    """Raise ConfigError for targets that cannot share a server, or that vLLM cannot serve."""
    # vLLM tells models apart by the names that requests ask for.
    names = {target.name for target in targets}
    if len(names) < len(targets):
        raise ConfigError("two targets have the same name; put NAME= in front of one")
    bases = {target.base for target in targets}
    if None in bases and len(targets) > 1:
        raise ConfigError(
            "whole weights are served alone; several targets are adapters on one base: give --base MODEL"
        )
    if len(bases) > 1:
        raise ConfigError(
            f"adapters of different bases cannot share a server: {', '.join(sorted(map(str, bases)))}"
        )
    for target in targets:
        if not _NAME.fullmatch(target.name):
            raise ConfigError(f"{target.name}: expected a name of letters, digits, -, _ and .")
        if target.base and target.rank > LORA_RANKS[-1]:
            raise ConfigError(
                f"{target.name}: rank {target.rank}; vLLM serves at most {LORA_RANKS[-1]}; use --merged"
            )
