"""The command line: one module per verb, imported only when that verb is used.

A verb module has `add_arguments(parser)` and `run(args) -> int` (the exit code); `port-forward` is port_forward.py.
Adding a verb is one file and one line in VERBS.
"""

from __future__ import annotations

import argparse
import keyword
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from kubetune import errors
from kubetune.config.flags import parse

# Not `logs` itself: that name is the verb's as soon as its module is imported.
from kubetune.logs import scrub, scrub_tracebacks
from kubetune.writing import visible

VERBS: dict[str, str] = {
    "init": "write a commented starter file",
    "import": "turn a config of axolotl, LLaMA-Factory, TRL or ms-swift into a run file",
    "plan": "batches, steps, tokens, peak memory, hours and price of a run, before anything is held",
    "data": "check, convert or prepare data",
    "train": "fine-tune, here",
    "smoke": "whether ranks, links, devices and volumes are fit for a run, by a tiny one",
    "verify-resume": "whether a stop and a resume change a single bit of your run, by trying it",
    "watch": "how a run goes, on one screen that stays: here, or on a cluster",
    "report": "a page on a run, or on several side by side: one HTML file that needs no network",
    "evaluate": "evaluate a run on its own or on other data",
    "export": "write the result of a run as a model that others can load, and prove it",
    "push": "upload the result of a run to the Hugging Face hub",
    "sync": "copy a run to an object store, or from there",
    "generate": "answer prompts with the result of a run",
    "chat": "talk to the result of a run",
    "serve": "manifests that serve the result of a run with vLLM",
    "demo": "fine-tune the embedded model on the embedded data, offline",
    "render": "write the Kubernetes manifests of a run",
    "submit": "start a run on a cluster",
    "status": "how runs on a cluster stand",
    "logs": "what all pods of a run print",
    "events": "what the cluster says about a run",
    "exec": "run a command in the pods of a run",
    "cp": "copy the results of a run home",
    "gpus": "nvidia-smi over all pods of a run",
    "top": "CPU, memory and disk of all pods of a run",
    "stop": "have a run save a checkpoint and leave its nodes",
    "resume": "let a stopped run go on",
    "delete": "remove a run from the cluster",
    "port-forward": "open TensorBoard or JupyterLab of a run",
    "secret": "put a secret of this machine into the cluster, unseen",
    "cluster": "make a cluster with GPUs and shared storage on Nebius, look at it, delete it",
    "dev": "pods that idle, and training in them with the code of this folder",
}

_INTERRUPTED = 130
_FLUSH_SECONDS = 1.0


def _module_name(verb: str) -> str:
    """`port_forward` for `port-forward`; Python's own words get an underscore."""
    name = verb.replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in the first line, where argparse would say how everything is written."""

    def error(self, message: str) -> NoReturn:
        self.exit(errors.USER, scrub(f"{self.prog}: {message}\n`{self.prog} --help` shows what is understood.\n"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; errors are explained, never shown as a traceback."""
    scrub_tracebacks()
    argv = list(sys.argv[1:] if argv is None else argv)
    verb = argv[0] if argv and argv[0] in VERBS else None
    parser = _Parser(prog="kubetune", description="Fine-tune language models from one YAML file.")
    commands = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    command: list[str] = []
    for name, help_line in VERBS.items():
        sub = commands.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name == verb:
            module = import_module(f"kubetune.cli.{_module_name(name)}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run, parser=sub)
            if hasattr(module, "COMMAND") and module.COMMAND in argv:
                # Another program's command line, whose dashes are none of ours.
                at = argv.index(module.COMMAND)
                argv, command = argv[:at], argv[at + 1 :]
    args = parse(parser, argv)
    args.command = command
    try:
        return int(args.run(args))
    except errors.KubetuneError as error:
        print(visible(scrub(f"kubetune: {error}")), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # The reader (`| head`) has what it wants; without this the interpreter complains while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.OK
    except OSError as error:
        from kubetune.files import fault_of

        if (fault := fault_of(error)) is None:
            raise
        print(visible(scrub(f"kubetune: {fault}")), file=sys.stderr)
        return fault.exit_code


def _interrupted() -> int:
    """The exit code after Ctrl-C, unless threads are left: the interpreter would wait for those of open connections."""
    if threading.active_count() > 1:
        # One of them may hold standard output, when whoever reads it has stopped reading.
        flushing = threading.Thread(target=sys.stdout.flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        os._exit(_INTERRUPTED)
    return _INTERRUPTED
