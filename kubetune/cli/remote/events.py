"""`kubetune events`: what the cluster says about everything of a run, oldest first."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kubetune.base.humanize import brief, visible
from kubetune.cli.remote.run_on_cluster import add_run, find, show

if TYPE_CHECKING:
    from kubetune.k8s.api.client import Object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print whole events as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the events. Raises ConfigError when there is no such run."""
    cluster, spec = find(args)
    from kubetune.k8s.cluster.runs import events_of

    events = events_of(cluster, spec)
    head = ("AGE", "TYPE", "REASON", "OBJECT", "MESSAGE")
    return show(events, head, [row(event) for event in events], as_json=args.json)


def row(event: Object) -> list[str]:
    """An event as a line of the table."""
    from kubetune.k8s.cluster.pods import about, age_seconds, event_time, times_seen, words_of

    name = "/".join(str(about(event).get(key) or "?") for key in ("kind", "name"))
    times = f" (×{times_seen(event)})" if times_seen(event) > 1 else ""
    cells = (brief(age_seconds(event_time(event))), event.get("type"), event.get("reason"), name)
    return [visible(str(cell or "")) for cell in (*cells, words_of(event) + times)]
