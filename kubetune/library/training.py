"""Training as a function: a run in a process of its own, whose lines come here, and whose end is raised here."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from kubetune import errors
from kubetune.base import processes
from kubetune.base.yaml_reader import read_file
from kubetune.config.load import resolved
from kubetune.config.schema import Config
from kubetune.library.configs import ConfigLike
from kubetune.library.functions import Metric, RunFollower, with_metrics
from kubetune.library.plans import plan_here
from kubetune.library.runs import Run
from kubetune.rundir import exit_status
from kubetune.rundir.exit_status import ExitStatus
from kubetune.supervisor.local import check_run_dir

CHILD = "kubetune.library.child"
SECONDS_BETWEEN_LOOKS = 0.2
"""For what `on_event` is told, where nothing is printed."""

_BY_CODE = {
    errors.USER: "ConfigError",
    errors.ENVIRONMENT: "EnvironmentFault",
    errors.DIVERGED: "Diverged",
    errors.GATE: "GateFailed",
    errors.OUT_OF_MEMORY: "OutOfMemoryAgain",
    errors.LOST_PEER: "LostPeer",
}


def train(
    config: ConfigLike,
    *,
    quiet: bool = False,
    metrics: Sequence[Metric] = (),
    on_event: Callable[[dict[str, Any]], object] | None = None,
) -> Run:
    """Fine-tune on this machine to the end; as `kubetune train`, with a checkpoint to go on from after every stop.

    The run has a process of its own, so this may be called any number of times, from any thread, and from a notebook.
    Its log lines go to `sys.stdout`; with `quiet` only what `kubetune` has to warn of, to `sys.stderr`. The same config
    with the same `output` goes on with a run that was stopped, and finds one that is done as it is.

    `metrics`: functions of yours that judge each answer, as `evaluation.metrics` of a run file has them:
    `function(prompt, answer, reference, record) -> float`. They are called in a process of the run, which finds them by
    file and name: all must be defined at the top of one Python file. `on_event` is called here, in this thread, with
    each line that the run adds to metrics.jsonl and events.jsonl; where it raises, the run is stopped with a checkpoint
    and the error raised.

    Ctrl-C, in the main thread, has the run save a checkpoint and end; then KeyboardInterrupt is raised. A second one
    ends it at once. Where this process ends, the run is stopped with a checkpoint too.

    Raises:
        ConfigError: the config is wrong, or the run directory belongs to another run.
        DataError: bad records, or data that are nowhere.
        ModelError: the model cannot be had, or does not fit the task.
        EnvironmentFault: disk, device or network; also where the run goes on in another process.
        Diverged: the loss stopped being finite, or stayed too high.
        GateFailed: the run is done, and misses what `evaluation.gate` asks for.
        Preempted: somebody else stopped the run; its `step` has a checkpoint.
        LostPeer: a rank was killed or hung; to train again goes on.
        KubetuneError: a bug in kubetune; the log in the run directory has the traceback.
    """
    _require_caller()
    file = None
    if not isinstance(config, (Config, Mapping)):
        file = read_file(Path(config))
    settled, plan = plan_here(with_metrics(config if file is None else file, metrics))
    run_dir = Path(str(settled.output)).expanduser().absolute()
    check_run_dir(settled, run_dir, plan)
    request = {
        "config": resolved(settled),
        "plan": plan.to_json(),
        "run_dir": str(run_dir),
        "source": None if file is None else file.text,
    }
    try:
        tell = _teller(on_event, run_dir)
        answer = _in_child(request, sys.stdout, sys.stderr, tell, quiet=quiet)
    except KeyboardInterrupt as interrupt:
        status = exit_status.read_exit_status(run_dir) if run_dir.is_dir() else None
        interrupt.add_note(f"{run_dir}: {status.reason if status else 'nothing was begun'}")
        raise
    if answer["code"] != errors.OK:
        raise _error(answer, run_dir)
    return Run.open(run_dir)


def _require_caller() -> None:
    """Raise ConfigError in a process of a run, which has come here by running a file of the user's for a function."""
    if processes.AGENT_PID in os.environ:
        raise errors.ConfigError(
            "train() was called by a file that a run reads for its functions; put the call below "
            '`if __name__ == "__main__":`'
        )


def _teller(
    on_event: Callable[[dict[str, Any]], object] | None, run_dir: Path
) -> Callable[[], None]:
    """A function that hands `on_event` what the run has written since the last time."""
    if on_event is None:
        return lambda: None
    follower = RunFollower(run_dir)

    def tell() -> None:
        for line in follower.read():
            on_event(line)

    return tell


def start_child(
    request: Mapping[str, Any],
    stdout: int | IO[str],
    stderr: int,
    environ: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], IO[str]]:
    """The process of a run, and where its answer comes, of which nothing is read where it dies without one."""
    reading, writing = os.pipe()
    told = open(reading, encoding="utf-8")  # noqa: SIM115 - the caller's
    try:
        child = subprocess.Popen(
            processes.module(CHILD, writing),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(environ or {}), processes.AGENT_PID: str(os.getpid())},
            pass_fds=[writing],
            start_new_session=True,  # Ctrl-C in a terminal, or in a notebook, must reach this process only
        )
    except BaseException:
        told.close()
        raise
    finally:
        os.close(writing)
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps(request).encode())
    except BaseException:  # Ctrl-C: without its whole request it has begun nothing
        child.kill()
        child.communicate()
        told.close()
        raise
    return child, told


def _in_child(
    request: Mapping[str, Any], out: IO[str], err: IO[str], tell: Callable[[], None], *, quiet: bool
) -> dict[str, Any]:
    """Answer of the process of the run. Whatever ends the waiting for it, Ctrl-C above all, stops it first."""
    streams = (
        (subprocess.DEVNULL, subprocess.PIPE) if quiet else (subprocess.PIPE, subprocess.STDOUT)
    )
    child, told = start_child(request, *streams)
    with told:
        lines = child.stderr if quiet else child.stdout
        assert lines is not None
        with lines:
            try:
                _pass_on(lines, err if quiet else out, tell)
                child.wait()
                tell()
            except BaseException:
                _stop(child, lines, err if quiet else out)
                raise
        answer = told.read()
    return json.loads(answer) if answer else _died(child.returncode)


def _pass_on(lines: IO[bytes], to: IO[str], tell: Callable[[], None] = lambda: None) -> None:
    """Hand on what is printed, as it comes, until the end; `tell` is called whenever something came, or might have."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8")("replace"), translate=True
    )
    while True:
        if select.select([lines], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            content = os.read(lines.fileno(), 1 << 16)
            to.write(decoder.decode(content, final=not content))
            to.flush()
            if not content:
                return
        tell()


def _stop(child: subprocess.Popen[bytes], lines: IO[bytes], to: IO[str]) -> None:
    """Have the run save and end, and see it end; a second Ctrl-C kills it, and all its processes with it."""
    try:
        child.send_signal(signal.SIGTERM)
        try:
            _pass_on(lines, to)
        except Exception:  # nobody reads any more, which must not keep the run from saving
            while os.read(lines.fileno(), 1 << 16):
                pass
        child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise


def _died(status: int) -> dict[str, Any]:
    """The answer of a process that gave none."""
    if status >= 0:
        reason = "the process of the run failed by itself; what it printed says why"
        return {"code": errors.BUG, "error": "KubetuneError", "reason": reason}
    name = signal.Signals(-status).name
    reason = f"the process of the run was killed by {name}; to train again goes on from the newest checkpoint"
    return {"code": errors.LOST_PEER, "error": "LostPeer", "reason": reason}


def _error(answer: Mapping[str, Any], run_dir: Path) -> errors.KubetuneError:
    """Error for a run that did not end well: by what it says of itself, where it came so far."""
    if "error" in answer:
        return _made(answer["error"], ExitStatus(answer["code"], answer["reason"]))
    status = exit_status.read_exit_status(run_dir)
    if status is None or status.code != answer["code"]:  # that of an earlier start
        status = ExitStatus(answer["code"], f"{run_dir} ended with exit code {answer['code']}")
    told = f"{status.reason.rstrip('.')}. Logs are in {run_dir / 'logs'}"
    return _made(status.error or _BY_CODE.get(status.code, ""), replace(status, reason=told))


def _made(name: str, status: ExitStatus) -> errors.KubetuneError:
    if status.code == errors.PREEMPTED:
        return errors.Preempted(status.step or 0)
    kind = getattr(errors, name, None)
    if (
        not (isinstance(kind, type) and issubclass(kind, errors.KubetuneError))
        or kind is errors.Preempted
    ):
        kind = errors.KubetuneError
    return kind(status.reason)
