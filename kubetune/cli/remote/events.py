"""`kubetune events`: what the cluster says about everything of a run, oldest first."""

from __future__ import annotations

import argparse
import json

from kubetune.base.humanize import brief, visible
from kubetune.cli.remote.run_on_cluster import add_run, find
from kubetune.cli.tables import print_table
from kubetune.errors import OK


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print whole events as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the events. Raises ConfigError when there is no such run."""
    from kubetune.cluster.pods import age_seconds
    from kubetune.cluster.runs import event_time, events_of

    events = events_of(*find(args))
    if args.json:
        print(json.dumps(events, indent=2))
        return OK
    rows = []
    for event in events:
        about = f"{event['involvedObject']['kind']}/{event['involvedObject']['name']}"
        times = f" (×{event['count']})" if event.get("count", 1) > 1 else ""
        age = brief(age_seconds(event_time(event)))
        rows.append((age, event.get("type"), event.get("reason"), about, f"{event.get('message', '')}{times}"))
    head = ("AGE", "TYPE", "REASON", "OBJECT", "MESSAGE")
    print_table(head, [[visible("" if cell is None else str(cell)) for cell in row] for row in rows])
    return OK
