"""Where a result is pushed, and whether it may go there: known before anything is exported.

The user's options come first, then the environment, then `push` of the run's config.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kubetune import errors
from kubetune.base.registry import address as registry_address
from kubetune.base.registry.address import Address
from kubetune.config import consent
from kubetune.config.resolved import read_config
from kubetune.config.schema.tracking import PushConfig
from kubetune.rundir import metrics

# Environment variable that names the repository.
REPOSITORY = "RESULT_MODEL_ID"


@dataclass(frozen=True)
class WantedPush:
    """What the user asks for, by the options of `kubetune push`."""

    place: str | None  # ORG/NAME or oci://registry/name:tag
    merge: bool = False
    public: bool = False
    despite_gate: bool = False
    modelpack: bool = False
    plain_http: bool = False


@dataclass(frozen=True)
class PushTarget:
    """Where to, and what."""

    place: str  # ORG/NAME, or the address of an image
    merge: bool  # send merged weights instead of the adapter
    private: bool  # of a new repository on the hub
    image: Address | None  # None: the hub


def find_target(run_dir: Path, wanted: WantedPush) -> PushTarget:
    """Return where a run's result goes, and as what.

    Raise ConfigError if nothing names a place, if it is none, or if the result missed its gate.
    """
    config = read_config(run_dir)
    target = _target(run_dir, wanted, config.push, consent.effects_of(config, ["push"]))
    if not wanted.despite_gate:
        _require_gate(run_dir)
    return target


def require_way(target: PushTarget) -> None:
    """Raise the error of an upload without a token or a network, before an export is made for it."""
    # A registry asks for a password when it is spoken to, and takes it from the files of docker and podman.
    if target.image is None:
        from kubetune.result.publishing.hub_upload import token_to_upload

        token_to_upload()


def _require_gate(run_dir: Path) -> None:
    """Raise ConfigError for the result of a run that missed its gate."""
    # A run without a gate, or one that was not judged, has none to miss.
    gate = metrics.read_verdict(run_dir).get("gate")
    if gate and not gate["passed"]:
        missed = "; ".join(check["message"] for check in gate["checks"] if not check["holds"])
        raise errors.ConfigError(
            f"{run_dir} missed its gate: {missed}. Nothing was sent; --despite-gate uploads it all the same"
        )


def _target(
    run_dir: Path,
    wanted: WantedPush,
    of_run: PushConfig | None,
    effects: Sequence[consent.Effect],
) -> PushTarget:
    """Return where to: what the user asks for, else the environment, else the run.

    `effects`: what the run's settings name, which the user may not have allowed. Raise ConfigError if nothing names a
    place.
    """
    # The user's options come first; options can only add to what the run asks for.
    place = wanted.place or os.environ.get(REPOSITORY, "").strip()
    merge = wanted.merge
    private = not wanted.public
    if of_run is not None:
        if not place:
            consent.require(effects, run_dir, instead="give ORG/NAME in the command")
            place = of_run.repo
        merge = merge or of_run.merge
        # A run directory of somebody else does not make the user's repository public.
        if all(consent.is_allowed(effect) for effect in effects):
            private = private and of_run.private
    if not place:
        raise errors.ConfigError(
            f"where to? give ORG/NAME, set {REPOSITORY}, or set `push: ORG/NAME` in the run's config. Nothing was sent."
        )

    if place.startswith(registry_address.SCHEME):
        if wanted.public:
            raise errors.ConfigError(
                "--public: only for the hub; a registry's own settings say who sees an image. Nothing was sent."
            )
        image = registry_address.parse(place, plain=wanted.plain_http)
        if image.has_digest:
            raise errors.ConfigError(
                f"{place} names an image by its digest; expected a tag, oci://registry/name:tag. Nothing was sent."
            )
        return PushTarget(place, merge, private, image)
    for option in ("modelpack", "plain_http"):
        if getattr(wanted, option):
            name = option.replace("_", "-")
            raise errors.ConfigError(
                f"--{name} is only for oci:// addresses, and {place} is on the hub. Nothing was sent."
            )
    try:
        PushConfig(repo=place)
    except ValueError:
        raise errors.ConfigError(
            f"{place!r} is no name of a repository; expected ORG/NAME. Nothing was sent."
        ) from None
    return PushTarget(place, merge, private, None)
