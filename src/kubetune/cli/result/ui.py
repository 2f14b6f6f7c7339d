"""`kubetune ui`: a page to work in, served to the browsers of this machine."""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
from pathlib import Path

from kubetune.errors import OK, ConfigError
from kubetune.extras import require

# Environment variable with the token, which the process list of the machine does not show.
TOKEN = "KUBETUNE_UI_TOKEN"

_PORT = 8600
_SHORTEST_TOKEN = 16  # characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("outputs"),
        metavar="DIR",
        help="folder of the runs (default outputs)",
    )
    parser.add_argument(
        "-n", "--namespace", help="show the runs of this namespace of the cluster, too"
    )
    parser.add_argument(
        "--port", type=int, default=_PORT, help=f"default {_PORT}; 0 takes a free one"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; all but 127.0.0.1 need --token",
    )
    parser.add_argument(
        "--token",
        help=f"token a browser has to send: {_SHORTEST_TOKEN} characters or more (default: {TOKEN}, or a new one)",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name this server is called by; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C. Raise ConfigError for settings that would let strangers in, or what is not installed."""
    require("kubetune ui", "starlette", "uvicorn")
    if args.folder.exists() and not args.folder.is_dir():
        raise ConfigError(
            f"{args.folder} is a file; expected the folder that holds the run directories"
        )

    # For this machine only, a token that is made now is enough. It is part of the address that is printed.
    token = args.token or os.environ.get(TOKEN)
    if token is not None and len(token) < _SHORTEST_TOKEN:
        raise ConfigError(
            f"the token has {len(token)} characters; expected at least {_SHORTEST_TOKEN}"
        )
    if token is None and not _is_own(args.host):
        raise ConfigError(
            f"--host {args.host} is open to other machines; give --token, or {TOKEN}, that nobody guesses. Nothing "
            "listens."
        )
    from kubetune.ui.server import serve

    serve(
        args.folder,
        args.host,
        args.port,
        token or secrets.token_urlsafe(24),
        args.allow_host,
        args.namespace,
    )
    return OK


def _is_own(host: str) -> bool:
    """True for an address that only this machine reaches."""
    # A name other than localhost may have any address.
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
