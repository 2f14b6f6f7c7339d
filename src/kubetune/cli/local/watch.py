"""`kubetune watch`: the state of a run on one screen, here or on a cluster. Leaving it changes nothing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from kubetune.base.humanize import visible
from kubetune.base.signals import stoppable
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.local.watch_screen import RunView, draw
from kubetune.cli.program import next_commands, next_steps
from kubetune.cli.remote.run_on_cluster import add_namespace, find
from kubetune.config.load import load_config
from kubetune.config.naming import RESOLVED
from kubetune.config.resolved import read_config
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError, first_line
from kubetune.rundir.status import read_status, state_of

# Between two looks. Each look at a run on a cluster is some requests to its API server.
SECONDS = 2.0

# States after which nothing changes any more.
ENDED = ("done", "stopped", "failed", "absent")

HINT = "Ctrl-C leaves; the run goes on"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "run_name",
        metavar="RUN",
        help="a run directory, which may not exist yet; the name of a run on a cluster; or a run file",
    )
    add_namespace(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="show it once and exit; without a terminal this is the default",
    )
    add_json(parser, "what is known now as JSON")


@prints_json
def run(args: argparse.Namespace) -> Answer:
    """Show the run until it ends or the reader leaves. Raise ConfigError where there is no such run."""
    console = Console(highlight=False)
    is_live = sys.stdout.isatty() and not (args.once or args.json or console.is_dumb_terminal)
    run_dir = None
    if args.namespace is None:
        run_dir = _local_run_dir(args.run_name)
    if run_dir is None:
        if args.namespace is None:
            # The name may be that of a folder, mistyped.
            hint = f"there is no folder {args.run_name} here, so a cluster is asked"
            print(hint, file=sys.stderr)
        look = partial(look_there, *find(args))
    else:
        _require(run_dir, can_wait=is_live)
        look = partial(look_here, run_dir)
    run_view = look()
    if is_live:
        run_view = follow(run_view, look, console)

    def show() -> None:
        console.print(draw(run_view, console))
        if run_view.state in ("done", "stopped", "failed"):
            print(visible(_next(run_view, run_dir)))
        elif is_live:
            print("The run goes on. The same command shows it again.")

    facts = {"name": run_view.name, "state": run_view.state, "why": run_view.why}
    return Answer(facts | run_view.status, show)


def _local_run_dir(name: str) -> Path | None:
    """Return the run directory of this machine that is meant, existing or not; None for a run on a cluster."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        config = load_config(path, environ={})
        if config.output is None or config.kubernetes is not None:
            return None
        return Path(config.output)
    # A word without a slash that is no folder is the name of a run on a cluster.
    return path if path.is_dir() or "/" in name else None


def _require(run_dir: Path, *, can_wait: bool) -> None:
    """Wait for a run directory that another command is about to make, or raise ConfigError."""
    if run_dir.is_dir():
        return
    if not can_wait or run_dir.exists():
        raise ConfigError(
            f"{run_dir}: no such run directory; expected one, or the name of a run on a cluster"
        )
    print(f"{run_dir}: no such run directory yet; waiting for it. Ctrl-C leaves.", flush=True)
    while not (run_dir / RESOLVED).is_file():
        time.sleep(SECONDS / 8)


def follow(run_view: RunView, look: Callable[[], RunView], console: Console) -> RunView:
    """Draw the run until it ends or the reader presses Ctrl-C. Return the last view.

    While the cluster does not answer, the last view stays on the screen, with the reason.
    """
    # SIGTERM gives the terminal back too. Nothing is drawn before `live` is entered, which it could interrupt.
    live = Live(console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), stoppable(), live:
        live.update(draw(run_view, console, HINT), refresh=True)
        while run_view.state not in ENDED:
            time.sleep(SECONDS)
            hint = HINT
            try:
                run_view = look()
            except KubetuneError as error:
                hint = f"no answer, trying again: {first_line(error)}"
            live.update(draw(run_view, console, hint), refresh=True)
    return run_view


def look_here(run_dir: Path) -> RunView:
    """Return the state of a run of this machine. Raise ConfigError where the folder is no run directory."""
    config = read_config(run_dir)
    name = config.name or run_dir.absolute().name
    status = read_status(run_dir)
    progress = status["progress"]
    state, why = state_of(
        progress["exit_status"], status["ranks"], progress["launched"], progress["waits_for"]
    )
    best_by = config.training.metric_for_best_model
    return RunView(name, state, why, "on this machine", status, best_by)


def look_there(cluster: Any, spec: Any) -> RunView:
    """Return the state of a run on a cluster: its pods, and what the first running one reads in the run directory."""
    from kubetune.k8s.cluster.asking_pods import ask
    from kubetune.k8s.cluster.cluster_runs import observe, running
    from kubetune.k8s.cluster.run_status import facts

    observed = observe(cluster, spec)
    run_facts = facts(observed)
    pods = running(cluster, spec)
    # Without a pod to ask, these facts come from logs and from annotations of the run's objects.
    status: dict[str, Any] = {"progress": run_facts}
    why = run_facts["why"]
    if observed.silence:
        why = why or f"its pods cannot be asked: {observed.silence.splitlines()[0]}"
    elif pods:
        # The pod may have gone since it was listed.
        with suppress(EnvironmentFault):
            [status] = ask(cluster, pods[0], "status", spec.run_dir)
    if len(pods) > 1:
        # The GPUs of one node would look like all of them; `kubetune gpus` asks every pod.
        status.pop("gpus", None)
    where = f"{run_facts['namespace']}, {len(pods)} of {run_facts['nodes']} pods running"
    return RunView(spec.name, observed.state, why, where, status)


def _next(run_view: RunView, run_dir: Path | None) -> str:
    """Return the commands that make sense after a run has ended."""
    if run_dir is None:
        return next_commands(("logs", "cp", "resume"), run_view.name)
    if run_view.state == "done":
        return next_steps(run_dir, read_config(run_dir).task)
    return f"{next_commands(('report',), run_dir)}; the command that started it continues it"
