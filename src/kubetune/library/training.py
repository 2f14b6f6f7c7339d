"""Training as a function: it starts a process, prints its lines, and raises its error.

caller ── request (JSON, stdin) ──────────→ child
       ←─ log lines (stdout and stderr) ──
       ←─ answer (JSON, a pipe) ──────────  exit code, error
       ── SIGTERM on Ctrl-C ──────────────→ saves a checkpoint and ends
"""

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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from kubetune import errors
from kubetune.base import processes
from kubetune.base.yaml_reader import read_file
from kubetune.config.resolved import resolved
from kubetune.config.schema import Config
from kubetune.library.configs import ConfigLike
from kubetune.library.plans import plan_here
from kubetune.library.run_handle import Run
from kubetune.library.users_functions import Metric, RunFollower, with_metrics
from kubetune.rundir import exit_status
from kubetune.rundir.exit_status import ExitStatus

CHILD = "kubetune.library.child"
_POLL_SECONDS = 0.2  # how often new events are looked for while nothing is printed
_PRINT_SECONDS = 1.0  # how long lines are gathered before they are printed together

# The error for an exit code, where exit.json names none.
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
    """Fine-tune on this machine to the end, as `kubetune train` does.

    The run is another process, so this may be called any number of times, from any thread, and from a
    notebook. Its log lines go to `sys.stdout`; with `quiet`, only warnings are
    printed, to `sys.stderr` and at the end, and nothing where it raises.
    The same config with the same `output` resumes a run that was stopped, and returns one that is done.

    `metrics`: your functions that judge each answer, like `evaluation.metrics` of a run file:
    `function(prompt, answer, reference, record) -> float`. They are called in a process of the run,
    which finds them by file and name: all must be defined at the top of one Python file. `on_event` is
    called in this thread with each line that the run adds to metrics.jsonl and events.jsonl; if it
    raises, the run saves a checkpoint and stops, and the error is raised here.

    Ctrl-C in the main thread lets the run save a checkpoint and end, and raises KeyboardInterrupt. A
    second one ends it at once. If this process ends, the run saves a checkpoint and ends too.

    Raises:
        ConfigError: the config is wrong, or the run directory belongs to another run.
        DataError: bad records, or data that do not exist.
        ModelError: the model cannot be loaded, or does not fit the task.
        EnvironmentFault: disk, device or network; or another process trains this run already.
        Diverged: the loss stopped being finite, or stayed too high.
        GateFailed: the run is done, and fails `evaluation.gate`.
        Preempted: somebody else stopped the run; its `step` has a checkpoint.
        LostPeer: a rank was killed or hung; calling this again resumes the run.
        KubetuneError: a bug in kubetune; the log in the run directory has the traceback.
    """
    _require_caller()
    # The file is read once, and its text kept in the run directory with its comments.
    file = None
    if not isinstance(config, (Config, Mapping)):
        file = read_file(Path(config))
    config, plan = plan_here(with_metrics(config if file is None else file, metrics))
    run_dir = Path(str(config.output)).expanduser().absolute()
    request = {
        "config": resolved(config),
        "plan": plan.to_json(),
        "run_dir": str(run_dir),
        "source": None if file is None else file.text,
    }
    try:
        answer = _in_child(request, _event_caller(on_event, run_dir), quiet=quiet)
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(f"{run_dir}: {_end_of(run_dir)}")
        raise
    if answer["code"] != errors.OK:
        raise _error(answer, run_dir)
    return Run.open(run_dir)


def _end_of(run_dir: Path) -> str:
    """Return how a run that was interrupted has ended: its exit.json says up to which step it is saved."""
    status = None
    if run_dir.is_dir():
        status = exit_status.read_exit_status(run_dir)
    if status is None:
        return "nothing was begun"
    return status.reason


def _require_caller() -> None:
    """Raise ConfigError in a process of a run.

    It is here because it imports the user's file for a function, and that file calls `train`.
    """
    if processes.AGENT_PID in os.environ:
        raise errors.ConfigError(
            "train() was called by a file that a run reads for its functions; put the call below "
            '`if __name__ == "__main__":`'
        )


def _event_caller(
    on_event: Callable[[dict[str, Any]], object] | None, run_dir: Path
) -> Callable[[], None]:
    """Return a function that calls `on_event` with the lines that are new since its last call."""
    if on_event is None:
        return lambda: None
    follower = RunFollower(run_dir)

    def call_on_event() -> None:
        for line in follower.read():
            on_event(line)

    return call_on_event


def start_child(
    request: Mapping[str, Any],
    stdout: int | IO[str],
    stderr: int,
    environ: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], IO[str]]:
    """Start the process of a run. Return it and its answer, which is empty if it dies without one."""
    # Closing the child's end here makes the end of the child the end of the answer.
    read_end, write_end = os.pipe()
    answer = open(read_end, encoding="utf-8")  # noqa: SIM115 - the caller closes it
    try:
        child = subprocess.Popen(
            processes.module(CHILD, write_end),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **(environ or {}), processes.AGENT_PID: str(os.getpid())},
            pass_fds=[write_end],
            # Ctrl-C in a terminal or a notebook must reach this process only.
            start_new_session=True,
        )
    except BaseException:
        answer.close()
        raise
    finally:
        os.close(write_end)
    assert child.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps(request).encode())
    except BaseException:
        # Ctrl-C. The child waits for the whole request, so it has done nothing yet.
        child.kill()
        child.communicate()
        answer.close()
        raise
    return child, answer


def _in_child(
    request: Mapping[str, Any], call_on_event: Callable[[], None], *, quiet: bool
) -> dict[str, Any]:
    """Run in a child and return its answer. Whatever ends the wait, such as Ctrl-C, stops it first."""
    if quiet:
        child, answer_file = start_child(request, subprocess.DEVNULL, subprocess.PIPE)
        lines = child.stderr
        # A failure is raised, with all that there is to say, so nothing of it is printed.
        out: IO[str] = io.StringIO()
    else:
        child, answer_file = start_child(request, subprocess.PIPE, subprocess.STDOUT)
        lines = child.stdout
        out = sys.stdout
    assert lines is not None
    with answer_file, lines:
        try:
            _print_lines(lines, out, call_on_event)
            child.wait()
            # The last events may have been written after the last line was printed.
            call_on_event()
        except BaseException:
            _stop(child, lines, out)
            raise
        answer = answer_file.read()
    if not answer:
        return _died(child.returncode)
    result = dict(json.loads(answer))
    if isinstance(out, io.StringIO) and result["code"] == errors.OK:
        sys.stderr.write(out.getvalue())
    return result


def _print_lines(
    lines: IO[bytes], out: IO[str], call_on_event: Callable[[], None] = lambda: None
) -> None:
    """Print what comes until the end. Call `call_on_event` when something came, and now and then."""
    # Bytes may end inside a character, or between \r and \n; the decoder keeps such a rest.
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8")("replace"), translate=True
    )
    # A notebook makes an output of each write, so what comes within a second is written at once.
    waiting = ""
    printed_at = time.monotonic()
    while True:
        has_input, _, _ = select.select([lines], [], [], _POLL_SECONDS)
        content = None
        if has_input:
            content = os.read(lines.fileno(), 1 << 16)
            waiting += decoder.decode(content, final=not content)
        if waiting and (content == b"" or time.monotonic() - printed_at >= _PRINT_SECONDS):
            out.write(waiting)
            out.flush()
            waiting = ""
            printed_at = time.monotonic()
        if content == b"":
            return
        call_on_event()


def _stop(child: subprocess.Popen[bytes], lines: IO[bytes], out: IO[str]) -> None:
    """Let the run save and end. A second Ctrl-C kills it with all its processes."""
    try:
        child.send_signal(signal.SIGTERM)
        try:
            _print_lines(lines, out)
        except Exception:
            # Printing failed. The pipe must still be emptied, or the run blocks and cannot save.
            while os.read(lines.fileno(), 1 << 16):
                pass
        child.wait()
    except BaseException:
        child.kill()
        child.wait()
        raise


def _died(status: int) -> dict[str, Any]:
    """Return the answer for a process that gave none."""
    if status >= 0:
        reason = "the process of the run failed by itself; what it printed says why"
        return {"code": errors.BUG, "error": "KubetuneError", "reason": reason}
    name = signal.Signals(-status).name
    reason = (
        f"the process of the run was killed by {name}; to train again goes on from the newest "
        "checkpoint"
    )
    return {"code": errors.LOST_PEER, "error": "LostPeer", "reason": reason}


def _error(answer: Mapping[str, Any], run_dir: Path) -> errors.KubetuneError:
    """Return the error of a run that did not end well: by its exit.json if it came so far."""
    if "error" in answer:
        return _error_of(answer["error"], ExitStatus(answer["code"], answer["reason"]))
    status = exit_status.read_exit_status(run_dir)
    if status is None or status.code != answer["code"]:  # exit.json is of an earlier start
        status = ExitStatus(answer["code"], f"{run_dir} ended with exit code {answer['code']}")
    reason = f"{status.reason.rstrip('.')}. Logs are in {run_dir / 'logs'}"
    return _error_of(status.error or _BY_CODE.get(status.code, ""), replace(status, reason=reason))


def _error_of(name: str, status: ExitStatus) -> errors.KubetuneError:
    """Return an error of the class of that name, if it is one of `errors`."""
    if status.code == errors.PREEMPTED:
        return errors.Preempted(status.step or 0)
    error_class = getattr(errors, name, None)
    # Preempted takes a step, not a reason, and was handled above.
    if (
        isinstance(error_class, type)
        and issubclass(error_class, errors.KubetuneError)
        and error_class is not errors.Preempted
    ):
        return error_class(status.reason)
    return errors.KubetuneError(status.reason)
