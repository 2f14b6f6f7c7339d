"""The command line: one module per verb, imported only when that verb is used.

A verb module has `add_arguments(parser)` and `run(args) -> int` (the exit code); `port-forward` is remote/port_forward.
A verb with `--json` makes its `run` by json_answers.prints_json.
Adding a verb is one file, one line in overview.GROUPS, and its examples. Not for what a verb does (library and the
rooms above), but for what is typed and printed. Read `overview` first.
"""

from __future__ import annotations

import argparse
import contextlib
import keyword
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn, TextIO

from kubetune import __version__, errors
from kubetune.base.humanize import nearest, visible

# Not `logs` itself: that name is the verb's as soon as its module is imported.
from kubetune.base.logs import scrub, scrub_tracebacks
from kubetune.cli.last_run import put_last_run
from kubetune.cli.overview import FOLDERS, GROUPS, VERBS, examples_of, overview
from kubetune.supervisor.command_line import parse

_INTERRUPTED = 130
_USUAL: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
# Verbs of other tools that are options here.
_OPTIONS = {"compare": "report --compare"}
# Verbs that do more than show something: if their output is closed early, their work is unfinished, which is an error.
_WORKING = {
    "bench", "cp", "delete", "demo", "evaluate", "export", "push", "resume", "smoke", "stop", "submit", "sweep", "sync",
    "train", "verify-resume",
}  # fmt: skip
_FLUSH_SECONDS = 1.0


class _Parser(argparse.ArgumentParser):
    """A parser that prints what is wrong first, where argparse would print the usage of everything."""

    def error(self, message: str) -> NoReturn:
        self.exit(
            errors.USER,
            scrub(f"{self.prog}: {message}\n`{self.prog} --help` shows what is understood.\n"),
        )


class _Program(_Parser):
    """The parser of the program, whose help lists the verbs in groups."""

    def format_help(self) -> str:
        return overview()


def make_parser(*verbs: str | None) -> argparse.ArgumentParser:
    """Return the parser of the program. Only modules of `verbs` are imported; without any, no verb has options."""
    program = _Program(prog="kubetune")
    version = f"kubetune {__version__} (Python {sys.version.split()[0]})"
    program.add_argument("--version", action="version", version=version, help="show the version")
    commands = program.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=_Parser
    )
    for name in [verb for verb in VERBS if verb in verbs] or VERBS:
        line = VERBS[name]
        description = f"{line[0].upper()}{line[1:]}."
        verb = commands.add_parser(name, help=line, description=description, allow_abbrev=False)
        verb.formatter_class = argparse.RawDescriptionHelpFormatter
        if name in verbs:
            module = verb_module(name)
            module.add_arguments(verb)
            verb.set_defaults(run=module.run, parser=verb)
            verb.epilog = "\n\n".join(filter(None, (verb.epilog, examples_of(name))))
    return program


def verb_module(verb: str) -> ModuleType:
    """Return the module of a verb: `remote.port_forward` for `port-forward`, and `prepare.import_` for `import`.

    A verb that is a keyword of Python has an underscore after its name.
    """
    folder = next(FOLDERS[group] for group, verbs in GROUPS.items() if verb in verbs)
    name = verb.replace("-", "_")
    if keyword.iskeyword(name):
        name += "_"
    return import_module(f"kubetune.cli.{folder}.{name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; errors are explained, never shown as a traceback."""
    scrub_tracebacks()
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv[0] == "help":
        # As git has it: `kubetune help train`.
        argv = [*argv[1:2], "--help"]
    verb = argv[0] if argv[0] in VERBS else None
    parser = make_parser(verb)
    _require_utf8(parser, argv)
    if verb is None and not argv[0].startswith("-"):
        _refuse_verb(parser, argv[0])
    # `exec` takes the command line of another program after its mark; the options in it are not ours to parse.
    command: list[str] = []
    mark = None
    if verb is not None:
        mark = getattr(verb_module(verb), "COMMAND", None)
    if mark in argv:
        at = argv.index(mark)
        command = argv[at + 1 :]
        argv = argv[:at]
    args = parse(parser, argv)
    args.command = command
    # Until here a signal ends the process at once (__main__.py). `train` has its own handlers from the start.
    if verb != "train" and threading.current_thread() is threading.main_thread():
        _restore_signal_handlers()
    try:
        put_last_run(args)
        code = int(args.run(args))
        # Written while an error can still be explained.
        sys.stdout.flush()
        return code
    except errors.KubetuneError as error:
        return _explained(error)
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # The reader (`| head`) has what it wants.
        drop_unwritten(sys.stdout, BrokenPipeError)
        if verb not in _WORKING:
            return errors.OK
        reason = "standard output was closed, so the work was stopped"
        return _explained(errors.EnvironmentFault(reason))
    except Exception as error:
        return _explained_fault(error)


def drop_unwritten(stream: TextIO, *errors_of_stream: type[OSError]) -> None:
    """Write what a stream still holds; with one of these errors let it go nowhere.

    The interpreter would try again as it ends, complain, and end with 120.
    """
    try:
        stream.flush()
    except errors_of_stream:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _require_utf8(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Exit with an error where a word of the command line is not UTF-8."""
    for text in argv:
        # Python reads bytes that are not UTF-8 as lone surrogates, which cannot be encoded.
        if text.encode(errors="replace").decode() != text:
            parser.error(
                f"{text!r} holds bytes that are not UTF-8; expected text, and names of files that are UTF-8"
            )


def _refuse_verb(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    """Exit with an error about an unknown verb, and propose the verb or option that was probably meant."""
    close = _OPTIONS.get(word) or nearest(word, VERBS)
    hint = "`kubetune --help` lists the verbs"
    if close:
        hint = f"did you mean `{close}`?"
    parser.error(f"unknown verb {word!r}; {hint}")


def _restore_signal_handlers() -> None:
    """Give signals back the handlers that Python has by default, but leave ignored ones ignored."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) not in (signal.SIG_IGN, usual):
            signal.signal(number, usual)


def _explained_fault(error: Exception) -> int:
    """Print what an error of the system means, and return its exit code. Raise any other error again."""
    from kubetune.base.faults import fault_of

    fault = fault_of(error)
    if fault is None:
        raise error
    drop_unwritten(sys.stdout, OSError)
    return _explained(fault)


def _explained(error: errors.KubetuneError) -> int:
    """Print an error and return its exit code, which is all that is left where standard error is closed."""
    with contextlib.suppress(OSError):
        from kubetune.base.terminal import folded

        print(folded(visible(scrub(f"kubetune: {error}")), sys.stderr), file=sys.stderr)
    drop_unwritten(sys.stderr, OSError)
    return error.exit_code


def _interrupted() -> int:
    """Return the exit code after Ctrl-C, or exit with it at once where threads are left.

    The interpreter would wait for threads of open connections.
    """
    if threading.active_count() > 1:
        if threading.current_thread() is threading.main_thread():
            # Somebody impatient presses it twice.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A thread may hold standard output, if its reader has stopped reading.
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        os._exit(_INTERRUPTED)
    return _INTERRUPTED
