"""`kubetune watch`: the state of a run on one screen, here or on a cluster. Leaving it changes nothing."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.humanize import shell_word, visible
from kubetune.base.signals import stoppable
from kubetune.cli.json_answers import Answer, add_json, prints_json
from kubetune.cli.program import program
from kubetune.cli.remote.run_on_cluster import add_namespace
from kubetune.config.naming import RESOLVED
from kubetune.errors import ConfigError, EnvironmentFault, KubetuneError

if TYPE_CHECKING:
    from rich.console import Console

    from kubetune.cli.local.watch_screen import RunView

# Between two looks. Each look at a run on a cluster is some requests to its API server.
LOCAL_SECONDS = 1.0
CLUSTER_SECONDS = 3.0

LEFT = "The run goes on. The same command shows it again."

# Verbs that make sense after a run on a cluster has ended, by its state.
NEXT_ON_CLUSTER = {
    "done": ("cp", "delete"),
    "stopped": ("resume", "cp"),
    "failed": ("logs", "resume"),
}

# Reads the state of the run. Raises KubetuneError where nobody answers.
Look = Callable[[], "RunView"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "run_name",
        metavar="RUN",
        help="a run directory, which is waited for; the name of a run on a cluster; or a run file",
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
    from rich.console import Console

    from kubetune.cli.local.watch_screen import draw

    # Without a terminal, or with --once, the screen is printed once.
    console = Console(highlight=False)
    is_live = sys.stdout.isatty() and not (args.once or args.json or console.is_dumb_terminal)
    run_dir = None
    if args.namespace is None:
        run_dir = _local_run_dir(args.run_name)
    if run_dir is not None and is_live:
        _wait_for(run_dir)
    look, seconds = _looker(args, run_dir)
    run_view = look()
    if is_live:
        run_view = follow(run_view, look, seconds, console)

    def show() -> None:
        console.print(draw(run_view, console))
        if run_view.is_over and run_view.state != "absent":
            print(visible(_next(run_view, run_dir)))
        elif is_live:
            print(LEFT)

    facts = {"name": run_view.name, "state": run_view.state, "why": run_view.why}
    return Answer(facts | run_view.status, show)


def _local_run_dir(name: str) -> Path | None:
    """Return the run directory of this machine that is meant, existing or not; None for a run on a cluster."""
    # A word without a slash that is no folder is the name of a run on a cluster.
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if path.is_dir() or "/" in name:
            return path
        return None
    if not path.is_file():
        return None
    from kubetune.config.load import load_config

    config = load_config(path, environ={})
    if config.output is None or config.kubernetes is not None:
        return None
    return Path(config.output)


def _wait_for(run_dir: Path) -> None:
    """Wait for a run directory that another command is about to make."""
    if run_dir.exists():
        return
    print(f"{run_dir}: no such run directory yet; waiting for it. Ctrl-C leaves.", flush=True)
    while not (run_dir / RESOLVED).is_file():
        time.sleep(LOCAL_SECONDS / 4)


def follow(run_view: RunView, look: Look, seconds: float, console: Console) -> RunView:
    """Draw the run until it ends or the reader presses Ctrl-C. Return the last view.

    While nobody answers, the last view stays on the screen. rich draws it every second in a thread, so that the
    screen tells how long an answer takes.
    """
    from rich.live import Live

    from kubetune.cli.local.watch_screen import full_screen

    live = Live(
        get_renderable=lambda: full_screen(run_view, console),
        console=console,
        screen=True,
        refresh_per_second=1,
    )
    with suppress(KeyboardInterrupt), stoppable():
        try:
            # Not `with live`: a signal while it draws for the first time must give the terminal back too.
            live.start(refresh=True)
            while not run_view.is_over:
                time.sleep(seconds)
                try:
                    run_view = look()
                except KubetuneError as error:
                    run_view = replace(run_view, lost=str(error).splitlines()[0])
                live.refresh()
        finally:
            live.stop()
    return run_view


def _looker(args: argparse.Namespace, run_dir: Path | None) -> tuple[Look, float]:
    """Return what reads the state of the run, and the seconds between two looks."""
    if run_dir is not None:
        if not run_dir.is_dir():
            raise ConfigError(
                f"{run_dir}: no such run directory; expected one, or the name of a run on a cluster"
            )
        return lambda: look_here(run_dir), LOCAL_SECONDS
    from kubetune.cli.remote.run_on_cluster import find

    try:
        cluster, spec = find(args)
    except EnvironmentFault as error:
        why = "a namespace was given"
        if args.namespace is None:
            why = f"there is no folder {args.run_name} here"
        raise EnvironmentFault(f"{why}, so a cluster was asked: {error}") from None
    return lambda: look_there(cluster, spec), CLUSTER_SECONDS


def look_here(run_dir: Path) -> RunView:
    """Return the state of a run of this machine. Raise ConfigError where the folder is no run directory."""
    from kubetune.cli.local.watch_screen import RunView
    from kubetune.config.load import read_config
    from kubetune.rundir.status import read_status, state_of

    name = read_config(run_dir).name or run_dir.absolute().name
    status = read_status(run_dir)
    exit_status = status["progress"]["exit_status"]
    state, why = state_of(exit_status, status["ranks"], status["progress"]["launched"])
    is_over = exit_status is not None
    return RunView(name, state, why, status, is_over=is_over, where="on this machine")


def look_there(cluster: Any, spec: Any) -> RunView:
    """Return the state of a run on a cluster: its pods, and what the first running one reads in the run directory."""
    from kubetune.cli.local.watch_screen import RunView
    from kubetune.cli.remote.status import facts
    from kubetune.k8s.cluster.cluster_runs import ask, observe, running

    # What Kubernetes knows of the run, then what the run knows of itself.
    observed = observe(cluster, spec)
    run_facts = facts(observed)
    targets = running(cluster, spec)
    # Without a pod to ask, this is known from logs and from the notes at the run's objects.
    status: dict[str, Any] = {"progress": run_facts}
    if targets and not observed.silence:
        # The pod may have gone since it was listed.
        with suppress(EnvironmentFault):
            [status] = ask(cluster, targets[0], "status", spec.run_dir)
        if len(targets) > 1:
            # Those of one node would look like all; `kubetune gpus` asks every pod.
            status.pop("gpus", None)

    # A run that goes on but cannot be asked.
    why = run_facts["why"]
    if not why and observed.silence:
        why = f"its pods cannot be asked: {observed.silence.splitlines()[0]}"
    running_pods = [pod for pod in run_facts["pods"] if pod["phase"] == "Running"]
    pods = f"{len(running_pods)} of {run_facts['nodes']} pods running"
    is_over = observed.state in ("done", "failed", "stopped", "absent")
    where = f"{run_facts['namespace']}, {pods}"
    return RunView(spec.name, observed.state, why, status, is_over=is_over, where=where)


def _next(run_view: RunView, run_dir: Path | None) -> str:
    """Return the commands that make sense after a run has ended."""
    if run_dir is None:
        return _commands(NEXT_ON_CLUSTER[run_view.state], run_view.name)
    if run_view.state == "done":
        from kubetune.config.load import read_config

        return next_steps(run_dir, read_config(run_dir).task)
    report = f"{program()} report {shell_word(run_dir)}"
    return f"Next: the command that started it continues from the newest checkpoint · {report}"


def next_steps(run_dir: Path, task: str) -> str:
    """Return the commands that make sense after a run that ended well."""
    verb = "chat"
    if task in ("sequence_classification", "reward_model"):
        verb = "generate"
    return _commands((verb, "report", "export"), run_dir)


def _commands(verbs: Sequence[str], run_name: object) -> str:
    """Return command lines for a run, in one line."""
    commands = [f"{program()} {verb} {shell_word(run_name)}" for verb in verbs]
    return f"Next: {' · '.join(commands)}"
