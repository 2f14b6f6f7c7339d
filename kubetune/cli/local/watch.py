"""`kubetune watch`: how a run goes, on one screen that stays: here, or on a cluster. Leaving it changes nothing."""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from kubetune.base.humanize import shell_word, visible
from kubetune.base.signals import stoppable
from kubetune.cli.remote.run_on_cluster import add_namespace
from kubetune.cli.tables import print_json
from kubetune.config.naming import RESOLVED
from kubetune.errors import OK, ConfigError, EnvironmentFault, KubetuneError

if TYPE_CHECKING:
    from kubetune.cli.local.watch_keys import View
    from kubetune.cli.local.watch_screen import RunView

_LOCAL_SECONDS, _CLUSTER_SECONDS = 1.0, 3.0
_REDRAW_SECONDS, _QUIET_SECONDS = 1.0, 5.0
_LEFT = "The run goes on. The same command shows it again."

Look = Callable[[int], "RunView"]
"""Sees how the run is now, with the log of this rank."""

News = Union["RunView", Exception, str]
"""A view of the run, why there is none, or a key that was pressed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the verb."""
    parser.add_argument(
        "run_name",
        metavar="RUN",
        help="a run directory, which is waited for; the name of a run on a cluster; or the file of a run",
    )
    add_namespace(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="show it once and leave; so too where there is no terminal",
    )
    parser.add_argument("--json", action="store_true", help="print what is known now as JSON")


def run(args: argparse.Namespace) -> int:
    """Show the run until it ends or the reader leaves. Raises ConfigError where there is no such run."""
    from kubetune.cli.local.watch_screen import draw

    place = _place(args.run_name) if args.namespace is None else None
    is_live = sys.stdout.isatty() and not (args.once or args.json)
    if place is not None and is_live:
        _wait_for(place)
    look, seconds = _looker(args, place)
    if args.json:
        run_view = look(0)
        facts = {
            "name": run_view.name,
            "state": run_view.state,
            "why": run_view.why,
            **run_view.status,
        }
        print_json(facts)
        return OK
    from rich.console import Console

    console = Console(highlight=False)
    if not is_live:
        run_view = look(0)
        console.print(draw(run_view, console.width))
    else:
        try:
            run_view = _follow(look, seconds, console)
        except KeyboardInterrupt:
            print(_LEFT)
            return OK
    if told := _next(run_view, place) if run_view.is_over else _LEFT if is_live else "":
        print(visible(told))
    return OK


def _next(run_view: RunView, place: Path | None) -> str:
    """Commands to go on with when a run has ended."""
    if place is not None:
        if run_view.state == "done":
            from kubetune.config.load import read_config

            return next_steps(place, read_config(place).task)
        return f"Next: the command that started it goes on from the newest checkpoint · kubetune report {shell_word(place)}"
    then = {
        "done": ("cp", "delete"),
        "stopped": ("resume", "cp"),
        "failed": ("logs", "resume"),
    }.get(run_view.state)
    return _listed(then, run_view.name) if then else ""


def next_steps(run_dir: Path, task: str) -> str:
    """Commands to go on with after a run that ended well."""
    judges = task in ("sequence_classification", "reward_model")
    return _listed(("generate" if judges else "chat", "report", "export"), run_dir)


def _listed(verbs: Sequence[str], of: object) -> str:
    return "Next: " + " · ".join(f"kubetune {verb} {shell_word(of)}" for verb in verbs)


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
        while not (place / RESOLVED).is_file():
            time.sleep(_LOCAL_SECONDS / 4)


class _Wish:
    """The rank whose log the reader wants to see, and whether that is news."""

    def __init__(self) -> None:
        self.rank, self.is_new = 0, threading.Event()

    def choose(self, rank: int) -> None:
        """Ask for the log of this rank, at once if it is another one."""
        if rank != self.rank:
            self.rank = rank
            self.is_new.set()


def _follow(look: Look, seconds: float, console: Any) -> RunView:
    """Draw again and again, on a screen of its own, until the run ends or the reader leaves; what was seen last.

    That stays on the terminal. What cannot be reached is waited for, with what was last seen still on the screen.
    """
    from kubetune.cli.local.watch_keys import View, keys
    from kubetune.cli.local.watch_screen import draw

    run_view, view = (
        look(0),
        View(),
    )  # a mistake in the command ends it here; what goes wrong later does not
    if not run_view.is_over:
        news: queue.SimpleQueue[News] = queue.SimpleQueue()
        wish = _Wish()
        # In the background: a cluster that has gone quiet is asked for minutes, and the reader should know meanwhile.
        threading.Thread(
            target=_keep_looking, args=(look, seconds, news, wish), daemon=True
        ).start()
        with stoppable(), keys(news.put) as has_keys:
            run_view, view = _show(
                run_view, news, wish, seconds + _QUIET_SECONDS, console, has_keys=has_keys
            )
    console.print(draw(run_view, *console.size, view=view))
    return run_view


def _show(
    run_view: RunView,
    news: queue.SimpleQueue[News],
    wish: _Wish,
    patience: float,
    console: Any,
    *,
    has_keys: bool,
) -> tuple[RunView, View]:
    """The screen while it is live: news and keys change what is seen; a pause keeps the news back."""
    from rich.live import Live

    from kubetune.cli.local.watch_keys import HELP, PAUSED, View
    from kubetune.cli.local.watch_screen import draw

    view, latest = View(), run_view
    is_screen = console.is_terminal and not console.is_dumb_terminal
    with (
        Live(console=console, auto_refresh=False, screen=is_screen, transient=True) as live,
        suppress(KeyboardInterrupt),
    ):
        while not (run_view.is_over or view.is_left):
            hint = (
                (PAUSED if view.is_paused else HELP)
                if has_keys
                else "Ctrl-C leaves; the run goes on"
            )
            screen = draw(run_view, *console.size, view=view, hint=hint)
            live.update(screen, refresh=True)
            try:
                new = news.get(timeout=_REDRAW_SECONDS)
            except queue.Empty:
                if time.monotonic() - latest.seen > patience and not latest.lost:
                    latest = latest.without_answer("it takes long")
            else:
                if isinstance(new, str):
                    ranks = run_view.status.get("log_ranks") or []
                    view = view.after(new, ranks=ranks, lines=len(run_view.log), page=screen.page)
                    wish.choose(view.rank)
                elif isinstance(new, KubetuneError):
                    latest = latest.without_answer(str(new))
                elif isinstance(new, Exception):
                    raise new
                else:
                    latest = new
            if not view.is_paused:
                run_view, view = latest, view.following(run_view.log, latest.log)
    return run_view, view


def _keep_looking(look: Look, seconds: float, news: queue.SimpleQueue[News], wish: _Wish) -> None:
    is_over = False
    while not is_over:
        wish.is_new.wait(seconds)
        wish.is_new.clear()
        try:
            run_view = look(wish.rank)
            is_over = run_view.is_over
            news.put(run_view)
        except KubetuneError as error:
            news.put(error)
        except Exception as error:
            news.put(error)
            return


def _looker(args: argparse.Namespace, place: Path | None) -> tuple[Look, float]:
    if place is None:
        from kubetune.cli.remote.run_on_cluster import find

        try:
            cluster, spec = find(args)
        except EnvironmentFault as error:
            why = (
                f"there is no folder {args.run_name} here"
                if args.namespace is None
                else "a namespace was given"
            )
            raise EnvironmentFault(f"{why}, so a cluster was asked: {error}") from None
        return lambda rank: look_there(cluster, spec, rank), _CLUSTER_SECONDS
    if not place.is_dir():
        raise ConfigError(
            f"{place}: no such run directory; expected one, or the name of a run on a cluster"
        )
    return lambda rank: look_here(place, rank), _LOCAL_SECONDS


def look_here(run_dir: Path, log_rank: int = 0) -> RunView:
    """A run of this machine. Raises ConfigError where the folder is none."""
    from kubetune.cli.local.watch_screen import RunView
    from kubetune.config.load import read_config
    from kubetune.rundir.status import read_status, state_of

    name = read_config(run_dir).name or run_dir.absolute().name
    status = read_status(run_dir, log_rank)
    ended = status["progress"]["exit_status"]
    state, why = state_of(ended, status["ranks"])
    return RunView(name, state, why, status, is_over=ended is not None, where="on this machine")


def look_there(cluster: Any, spec: Any, log_rank: int = 0) -> RunView:
    """A run on a cluster: how its pods stand, and what the first one that runs says of the run directory."""
    from kubetune.cli.local.watch_screen import RunView
    from kubetune.cli.remote.status import facts
    from kubetune.cluster.gpus import query_gpus
    from kubetune.cluster.runs import ask, observe, running

    observed = observe(cluster, spec)
    told, targets = facts(observed), running(cluster, spec)
    # without a pod to ask, what is known from logs and notes
    status: dict[str, Any] = {"progress": told}
    if targets and not observed.silence:
        with suppress(EnvironmentFault):  # it has gone since it was asked for progress
            (status,) = ask(cluster, targets[0], "status", spec.run_dir, str(log_rank))
        if len(targets) > 1 and status.get("gpus"):
            found = query_gpus(cluster, targets)
            status["gpus"] = [{"node": node.node, **gpu} for node in found for gpu in node.rows]
    why = told["why"] or (
        observed.silence and f"its pods cannot be asked: {observed.silence.splitlines()[0]}"
    )
    pods = (
        f"{sum(pod['phase'] == 'Running' for pod in told['pods'])} of {told['nodes']} pods running"
    )
    is_over = observed.state in ("done", "failed", "stopped", "absent")
    return RunView(
        spec.name,
        observed.state,
        why,
        status,
        is_over=is_over,
        where=f"{told['namespace']}, {pods}",
    )
