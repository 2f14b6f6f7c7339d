"""`kubetune events`: what the cluster says about everything of a run, oldest first."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kubetune.base.humanize import brief, visible
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.remote.run_on_cluster import add_run, find
from kubetune.cli.tables import print_table

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Object


HEAD = ("AGE", "TYPE", "REASON", "OBJECT", "MESSAGE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run(parser)
    add_json(parser, "whole events as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Print the events. Raise ConfigError when there is no such run."""
    cluster, spec = find(args)
    from kubetune.k8s.cluster.run_events import events_of

    events = events_of(cluster, spec)

    def show() -> None:
        print_table(HEAD, [row(event) for event in events])

    return Answer(events, show)


def row(event: Object) -> list[str]:
    """Return an event as a line of the table."""
    from kubetune.k8s.cluster.pods import about, age_seconds, event_time, times_seen, words_of

    subject = about(event)
    message = words_of(event)
    # The API server counts an event that repeats, and keeps the last.
    if times_seen(event) > 1:
        message += f" (×{times_seen(event)})"
    cells = (
        brief(age_seconds(event_time(event))),
        event.get("type") or "",
        event.get("reason") or "",
        f"{subject.get('kind') or '?'}/{subject.get('name') or '?'}",
        message,
    )

    # Images and webhooks write into messages what they like, terminal codes too.
    return [visible(str(cell)) for cell in cells]
