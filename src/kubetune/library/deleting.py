"""Delete a run of this machine for good."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kubetune.base.humanize import shell_word
from kubetune.config.naming import RESOLVED
from kubetune.errors import ConfigError
from kubetune.library.listing import facts
from kubetune.supervisor.place import hold


def require_deletable(run_dir: Path) -> None:
    """Raise ConfigError unless a folder is a run directory that nobody works in."""
    if run_dir.is_symlink():
        raise ConfigError(
            f"{run_dir} is a link to another folder; delete it there. Nothing was deleted"
        )
    if not (run_dir / RESOLVED).is_file():
        raise ConfigError(
            f"{run_dir} is no run directory: it has no {RESOLVED}. Nothing was deleted; rm -r {shell_word(run_dir)} "
            "removes it"
        )
    # A run of another machine is known by what it says of itself.
    if facts(run_dir)["state"] in ("running", "starting"):
        raise ConfigError(
            f"{run_dir} is at work; `kubetune stop {shell_word(run_dir)}` stops it. Nothing was deleted"
        )


def delete_run(run_dir: Path) -> None:
    """Delete a run directory. Raise EnvironmentFault if a process trains in it."""
    require_deletable(run_dir)
    # Half a run would look like a damaged one, so it leaves its place in one go.
    leaving = run_dir.with_name(f".deleted-{run_dir.name}-{os.getpid()}")
    with hold(run_dir, 0):
        run_dir.rename(leaving)
    shutil.rmtree(leaving)
