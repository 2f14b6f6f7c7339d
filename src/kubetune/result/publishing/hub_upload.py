"""Upload an export to a repository of the Hugging Face hub: in one commit, so that nobody ever loads half a model.

Uploaded files stay there when an upload breaks off, and the next one sends only the rest. Nothing here makes an
export (exporting.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kubetune import errors
from kubetune.data.reading.hub import (
    NOT_THE_HUB,
    bound_waits,
    hub_token,
    is_lost,
    misread,
    unresolved_host,
)

# Environment variables that forbid to ask the hub.
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")

# Files that an earlier push may have left and this one does not have: loading would take both.
STALE = ["*.safetensors", "*.safetensors.index.json"]

# Between attempts.
WAITS_SECONDS = (2.0, 10.0, 30.0)


@dataclass(frozen=True)
class Pushed:
    """An uploaded export."""

    url: str  # of the repository
    commit: str  # the commit that the upload made
    private: bool


def token_to_upload() -> str:
    """Return the token that an upload uses. Raise known obstacles before anything is exported.

    Raise ConfigError without a token or where the hub may not be asked, EnvironmentFault if its name leads nowhere.
    """
    for name in OFFLINE:
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            raise errors.ConfigError(
                f"{name} is set, so the hub may not be asked; unset it and run the same again"
            )

    from huggingface_hub import get_token

    token = hub_token() or get_token()
    if not token:
        raise errors.ConfigError(
            "no token for the hub: set HF_TOKEN to one that may write (https://huggingface.co/settings/tokens), or "
            "run `hf auth login`"
        )
    away = unresolved_host()
    if away:
        raise errors.EnvironmentFault(f"the hub cannot be reached ({away}). Nothing was pushed")
    return token


def upload(
    folder: Path,
    repo: str,
    *,
    private: bool,
    message: str,
    tell: Callable[[str], None] = print,
) -> Pushed:
    """Put the files of `folder` into the model repository `repo`, which is made if it is not there.

    After a lost connection, wait and go on. Raise what `token_to_upload` does, and EnvironmentFault when the hub
    refuses, or cannot be reached in the end; the repository is as it was then.
    """
    token = token_to_upload()
    from huggingface_hub import HfApi

    bound_waits()
    api = HfApi(token=token)
    for wait in (*WAITS_SECONDS, None):
        # Making a repository that exists changes nothing, also not whether it is private.
        try:
            with _explained(repo):
                api.create_repo(repo, private=private, exist_ok=True)
                is_private = bool(api.model_info(repo).private)
                commit = api.upload_folder(
                    repo_id=repo,
                    folder_path=folder,
                    commit_message=message,
                    delete_patterns=STALE,
                )

            return Pushed(str(commit.commit_url).split("/commit/")[0], commit.oid, is_private)
        except _Interrupted as error:
            if wait is None:
                raise errors.EnvironmentFault(
                    f"the hub could not be reached to the end: {error}. What has arrived stays there; run the same "
                    "command again to send the rest"
                ) from error
            tell(f"the upload broke off ({error}); going on in {wait:g} s")
            time.sleep(wait)

    raise AssertionError("the last attempt returns or raises")


class _Interrupted(Exception):
    """Another attempt may do better."""


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Raise errors of the hub's client as what a user can act on, or as _Interrupted if another attempt may do."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise errors.ConfigError(
            f"{repo!r} is no name of a repository; expected ORG/NAME"
        ) from error
    except Exception as error:
        # The hub's client wraps what happened to one file in a RuntimeError.
        chain = list(errors.causes(error))
        refusals = [e for e in chain if isinstance(e, HfHubHTTPError)]

        # The hub has answered, and will answer the same again.
        refused = next((e for e in refusals if e.response.status_code < 500), None)
        if refused is not None:
            code = refused.response.status_code
            advice = {
                401: "the token in HF_TOKEN is not valid",
                403: f"the token in HF_TOKEN may not write to {repo.split('/')[0]}",
                404: f"there is no {repo}, and the token may not make it",
            }.get(code, errors.first_line(refused))
            raise errors.EnvironmentFault(
                f"the hub refused {repo} ({code}): {advice}. Nothing was pushed"
            ) from error

        # Something else has answered, such as the login page of a network.
        content = misread(chain)
        if content:
            raise errors.EnvironmentFault(
                f"what answers for the hub about {repo} {NOT_THE_HUB.format(found=content)}; then run the same command "
                "again, which sends only what has not arrived"
            ) from error

        # Nothing has answered, or the hub is out of order. An error of neither kind is a bug.
        for cause in chain:
            is_of_network = isinstance(cause, HfHubHTTPError | ConnectionError | TimeoutError)
            if is_of_network or is_lost(cause):
                break
        else:
            raise

        raise _Interrupted(" ".join(str(chain[-1]).split()) or type(chain[-1]).__name__) from error
