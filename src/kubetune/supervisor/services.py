"""What a run works with beside its model: trackers, a command for its events, a store for its copy."""

from __future__ import annotations

from kubetune.config.schema.tracking import HooksConfig, TrackingConfig


def require_services(tracking: TrackingConfig, hooks: HooksConfig, mirror: str | None) -> None:
    """Raise ConfigError for one that the run file names and that cannot be used here; nothing of it is imported."""
    # Most runs have none of these, whose code takes its time to import.
    if tracking != TrackingConfig():
        from kubetune.rundir.tracking import trackers

        trackers.check_installed(tracking)
    if hooks != HooksConfig():
        from kubetune.supervisor.observers.hooks import require_command

        require_command(hooks)
    if mirror is not None:
        from kubetune.rundir.mirror import stored_run

        stored_run.check_installed(mirror)
