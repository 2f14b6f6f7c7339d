"""Refusals that are not the last word: what each means, and for how long the same request is asked again.

The table is all that kubetune knows of them, and every request goes through it. A row that says of a pod that it is not
there is believed only by who asks what the watch knows of the pod (`k8s/cluster/log_follow`). That the cluster lacks a
kind which each cluster has is never believed. One refusal is not in the table: 410 says that a revision is forgotten,
and the informer then lists all objects anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kubetune.k8s.api.kinds import Kind

# How long a request is repeated while nobody answers, or who answers has too much to do.
PATIENCE_SECONDS = 60.0
# How long the refusals of a server are not believed that has just started.
STARTING_SECONDS = 30.0
_MOMENT_SECONDS = 10.0

# Parts of a pod that the API server asks its node for.
_OF_NODE = ("log", "exec", "portforward")
# Words about a path that nobody serves: of a kind, or of a pod's part at a node.
_NO_SUCH_PATH = "could not find the requested resource"
Believed = Literal["after a while", "once the server is ready", "where another pod may answer"]


@dataclass(frozen=True)
class PassingRefusal:
    """A refusal that may be another answer in a moment."""

    codes: tuple[int, ...]  # HTTP status
    meaning: str  # in messages, as a sentence
    seconds: float  # for so long it is asked again
    words: str = ""  # regular expression that is found in the message
    subresources: tuple[str, ...] = ()  # of those alone; empty: of all requests
    # About kinds that each cluster has, or about the others; None: about all.
    is_built_in: bool | None = None
    believed: Believed = "after a while"
    advice: str = "try again later"


PASSING = (
    PassingRefusal(
        (401,),
        "the API server has just started and knows no accounts yet",
        STARTING_SECONDS,
        believed="once the server is ready",
    ),
    PassingRefusal(
        (403,),
        "the API server has just started and knows no rights yet",
        STARTING_SECONDS,
        words=r'User "[^"]*" cannot \w+ resource|not yet ready to handle request',
        believed="once the server is ready",
    ),
    PassingRefusal(
        (404, 500),
        "its node has just started and does not know the pod yet",
        STARTING_SECONDS,
        words=f"{_NO_SUCH_PATH}|pod does not exist",
        subresources=_OF_NODE,
    ),
    # Of an object that is not there it says: configmaps "fit" not found.
    PassingRefusal(
        (404,),
        "a kind is not known here that each API server knows: this one has just started, or something else answers",
        STARTING_SECONDS,
        words=r'^(?!.*" not found)',
        subresources=("",),
        is_built_in=True,
        advice="try again later, or check `server` in the kubeconfig",
    ),
    # The cluster may well lack it.
    PassingRefusal(
        (404,),
        "the API server has just started and does not know the kind yet",
        STARTING_SECONDS,
        words=f"{_NO_SUCH_PATH}|page not found",
        subresources=("",),
        is_built_in=False,
        believed="once the server is ready",
    ),
    PassingRefusal(
        (403,),
        "Kueue still takes away what ran before the stop",
        PATIENCE_SECONDS,
        words="scaling down is still in progress|workload from previous scale-down is still being deleted",
    ),
    PassingRefusal((429,), "the API server has too much to do", PATIENCE_SECONDS),
    PassingRefusal(
        (504,),
        "the API server has not read yet what another one has written",
        PATIENCE_SECONDS,
        words="Too large resource version",
    ),
    PassingRefusal((502, 503, 504), "the API server is not ready", PATIENCE_SECONDS),
    # A webhook that starts, or a store that chooses a leader.
    PassingRefusal((500,), "the API server has a problem", _MOMENT_SECONDS, subresources=("",)),
    # It may stay away: who can ask another pod does so at once, and who needs this one asks again.
    PassingRefusal(
        (500,),
        "its node cannot be asked",
        _MOMENT_SECONDS,
        subresources=_OF_NODE,
        believed="where another pod may answer",
        advice="see kubectl get nodes",
    ),
)


def passing_refusal(code: int, message: str, kind: Kind, subresource: str) -> PassingRefusal | None:
    """Return the row for a refusal; None where it is the last word."""
    for row in PASSING:
        is_about = not row.subresources or subresource in row.subresources
        is_of_kind = row.is_built_in in (None, kind.is_built_in)
        if code in row.codes and is_about and is_of_kind and re.search(row.words, message):
            return row
    return None
