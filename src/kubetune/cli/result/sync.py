"""`kubetune sync`: copy a run directory to an object store now, or fetch one from there."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kubetune import errors
from kubetune.base import logs
from kubetune.base.humanize import shell_word
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.config import consent
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config

if TYPE_CHECKING:
    from kubetune.rundir.mirror.sync import Mirror


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "source",
        metavar="RUN_DIR|ADDRESS",
        help="what to copy: a run directory, or s3://bucket/run",
    )
    parser.add_argument(
        "target",
        nargs="?",
        metavar="ADDRESS|RUN_DIR",
        help="where to; left out: `mirror` of the run's config",
    )
    add_json(parser, "what is there as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Copy, and say how much there is."""
    # The present state, asked again: a copy of an earlier run may have more.
    mirror = _copied(args)
    sizes = mirror.stored.files()
    steps = mirror.stored.steps()
    total = sum(sizes.values())

    def show() -> None:
        print(f"{len(sizes)} files, {total:,} bytes at {mirror.address}; checkpoints {steps}")

    facts = {"address": mirror.address, "files": len(sizes), "bytes": total, "steps": steps}
    return Answer(facts, show)


def _mirror_of(run_dir: Path) -> str | None:
    """Return the address that a run's config names. Raise ConfigError if the user has not allowed it here."""
    config = read_config(run_dir)
    mirror = consent.effects_of(config, ["mirror"])
    consent.require(mirror, run_dir, instead="give the address in the command")
    return config.mirror


def _copied(args: argparse.Namespace) -> Mirror:
    """Send or fetch the run directory. Return the copy in the object store."""
    from kubetune.rundir import checkpoints
    from kubetune.rundir.mirror.copier import SECONDS_IF_NEVER_REACHED, persistently
    from kubetune.rundir.mirror.sync import Mirror

    logs.configure("INFO")

    # An address as the source is fetched, a run directory is sent.
    fetches = "://" in args.source
    if fetches and args.target is None:
        raise errors.ConfigError(
            f"kubetune sync {shell_word(args.source)}: give the folder to fetch it to. Nothing was written."
        )
    if fetches:
        run_dir = Path(args.target)
        address = args.source
    else:
        run_dir = Path(args.source)
        address = args.target or _mirror_of(run_dir)
    if not address or "://" not in address:
        raise errors.ConfigError(
            f"{run_dir}: its config has no `mirror`; say where to: kubetune sync {shell_word(run_dir)} s3://bucket/run"
        )

    # s3://bucket/run/ and s3://bucket/run are one place.
    mirror = Mirror(run_dir, re.sub(r"(?<![:/])/+$", "", address))
    if fetches:

        def fetch() -> None:
            mirror.fetch(everything=True)

        persistently(fetch, SECONDS_IF_NEVER_REACHED, what=f"{address} cannot be read")
        if not (run_dir / RESOLVED).is_file():
            raise errors.ConfigError(f"{address} holds no run. Nothing was written.")
    else:
        read_config(run_dir)  # refuses a folder that is not a run

        def send() -> None:
            mirror.lease.recognise(claims=True)
            # Another start of the run may have gone on elsewhere.
            if mirror.stored.steps()[-1:] > checkpoints.steps(run_dir)[-1:]:
                raise errors.ConfigError(
                    f"{address} is kept up by a later start of this run, which has gone further than {run_dir}; fetch "
                    f"it: kubetune sync {address} DIR. Nothing was sent."
                )
            mirror.send()

        persistently(send, SECONDS_IF_NEVER_REACHED, what=f"{address} cannot be written to")
    return mirror
