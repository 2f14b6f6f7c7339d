"""`kubetune smoke`: a tiny training run that says whether this machine, or these nodes, are fit for a real one.

Exit code 0: good. 3: something of the environment is not, and the lines say what and on which rank.
"""

from __future__ import annotations

import argparse

from kubetune.plugins.diagnostics.smoke import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    settings.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train for a moment and judge. Return the exit code."""
    from kubetune.plugins.diagnostics.smoke import rank_launch

    return rank_launch.run(args)
