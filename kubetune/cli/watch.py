"""`kubetune watch`: how a run goes, on one screen that stays: here, or on a cluster. Leaving it changes nothing."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.cli.run_on_cluster import add_namespace
from kubetune.errors import OK, ConfigError, EnvironmentFault, KubetuneError

if TYPE_CHECKING:
    from kubetune.cli.watch_screen import Sight

_LOCAL_SECONDS, _CLUSTER_SECONDS = 1.0, 3.0
_REDRAW_SECONDS, _QUIET_SECONDS = 1.0, 5.0

Look = Callable[[], "Sight"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "run_name",
        metavar="RUN",
        help="a run directory, which is waited for; the name of a run on a cluster; or the file of a run",
    )
    add_namespace(parser)
    parser.add_argument("--once", action="store_true", help="show it once and leave; so too where there is no terminal")
    parser.add_argument("--json", action="store_true", help="print what is known now as JSON")


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends or the reader leaves. Raises ConfigError where there is no such run."""
    from kubetune.cli.watch_screen import draw

    place = _place(args.run_name)
    is_live = sys.stdout.isatty() and not (args.once or args.json)
    if place is not None and is_live:
        _wait_for(place)
    look, seconds = _looker(args, place)
    if args.json:
        sight = look()
        print(json.dumps({"name": sight.name, "state": sight.state, "why": sight.why, **sight.vitals}, indent=2))
        return OK
    from rich.console import Console

    console = Console(highlight=False)
    if not is_live:
        console.print(draw(look(), console.width))
        return OK
    try:
        _follow(look, seconds, console)
    except KeyboardInterrupt:
        print("The run goes on. The same command shows it again.")
    return OK


def _place(name: str) -> Path | None:
    """The run directory that is meant, there or not; None for a run on a cluster."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return _output_of(path) if path.is_file() else None
    return path if path.is_dir() or len(path.parts) > 1 else None


def _output_of(path: Path) -> Path | None:
    """The run directory that a run file names; None where its run is one on a cluster."""
    from kubetune.config.load import load_config

    config = load_config(path, environ={})
    return Path(config.output) if config.output and config.kubernetes is None else None


def _wait_for(place: Path) -> None:
    """Wait for a run directory that is not there yet, as of a run that is just being started elsewhere."""
    if not place.exists():
        print(f"{place}: no such run directory yet; waiting for it. Ctrl-C leaves.", flush=True)
        while not (place / "resolved.json").is_file():
            time.sleep(_LOCAL_SECONDS / 4)


def _follow(look: Look, seconds: float, console: Any) -> None:
    """Draw again and again. What cannot be reached is waited for, with what was last seen still on the screen."""
    from rich.live import Live

    from kubetune.cli.watch_screen import draw

    sight = look()  # a mistake in the command ends it here; what goes wrong later does not
    answers: queue.SimpleQueue[Sight | Exception] = queue.SimpleQueue()
    if not sight.is_over:
        # In the background: a cluster that has gone quiet is asked for minutes, and the reader should know meanwhile.
        threading.Thread(target=_keep_looking, args=(look, seconds, answers), daemon=True).start()
    with Live(draw(sight, console.width), console=console, auto_refresh=False) as live:
        while not sight.is_over:
            try:
                answer = answers.get(timeout=_REDRAW_SECONDS)
            except queue.Empty:
                if time.monotonic() - sight.seen > seconds + _QUIET_SECONDS and not sight.lost:
                    sight = sight.without_answer("it takes long")
            else:
                if isinstance(answer, KubetuneError):
                    sight = sight.without_answer(str(answer))
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    sight = answer
            live.update(draw(sight, console.width), refresh=True)


def _keep_looking(look: Look, seconds: float, answers: queue.SimpleQueue[Sight | Exception]) -> None:
    is_over = False
    while not is_over:
        time.sleep(seconds)
        try:
            sight = look()
            is_over = sight.is_over
            answers.put(sight)
        except KubetuneError as error:
            answers.put(error)
        except Exception as error:
            answers.put(error)
            return


def _looker(args: argparse.Namespace, place: Path | None) -> tuple[Look, float]:
    if place is None:
        from kubetune.cli.run_on_cluster import find

        try:
            cluster, spec = find(args)
        except EnvironmentFault as error:
            raise EnvironmentFault(
                f"there is no folder {args.run_name} here, so a cluster was asked: {error}"
            ) from None
        return lambda: look_there(cluster, spec), _CLUSTER_SECONDS
    if not place.is_dir():
        raise ConfigError(f"{place}: no such run directory; expected one, or the name of a run on a cluster")
    return lambda: look_here(place), _LOCAL_SECONDS


def look_here(run_dir: Path) -> Sight:
    """A run of this machine. Raises ConfigError where the folder is none."""
    from kubetune import endings
    from kubetune.cli.watch_screen import Sight
    from kubetune.cluster.vitals import take_vitals
    from kubetune.config.load import read_config

    name = read_config(run_dir).name or run_dir.absolute().name
    vitals = take_vitals(run_dir)
    ending = vitals["progress"]["ending"]
    if ending is None:
        silent = min((rank["silent_seconds"] for rank in vitals["ranks"]), default=None)
        state = "running" if silent is not None and silent < 30 else "waiting"
        why = "" if state == "running" else "no rank has said where it is: it starts, has just ended, or was cut off"
        return Sight(name, state, why, vitals)
    state = {0: "done", 143: "stopped"}.get(ending["code"], "failed")
    return Sight(name, state, "" if ending["reason"] == endings.DONE else ending["reason"], vitals, is_over=True)


def look_there(cluster: Any, spec: Any) -> Sight:
    """A run on a cluster: how its pods stand, and what the first one that runs says of the run directory."""
    from kubetune.cli.status import facts
    from kubetune.cli.watch_screen import Sight
    from kubetune.cluster.gpus import query_gpus
    from kubetune.cluster.runs import ask, running, take_snapshot

    snapshot = take_snapshot(cluster, spec)
    told, targets = facts(snapshot), running(cluster, spec)
    # without a pod to ask, what is known from logs and notes
    vitals: dict[str, Any] = {"progress": told}
    if targets and not snapshot.silence:
        with suppress(EnvironmentFault):  # it has gone since it was asked for progress
            (vitals,) = ask(cluster, targets[0], "vitals", spec.run_dir)
        if len(targets) > 1 and vitals.get("gpus"):
            found = query_gpus(cluster, targets)
            vitals["gpus"] = [{"node": node.node, **gpu} for node in found for gpu in node.rows]
    why = told["why"] or (snapshot.silence and f"its pods cannot be asked: {snapshot.silence.splitlines()[0]}")
    pods = f"{sum(pod['phase'] == 'Running' for pod in told['pods'])} of {told['nodes']} pods running"
    is_over = snapshot.state in ("done", "failed", "stopped", "absent")
    return Sight(spec.name, snapshot.state, why, vitals, is_over=is_over, where=f"{told['namespace']}, {pods}")
