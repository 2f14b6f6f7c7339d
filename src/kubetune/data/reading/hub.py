"""Finds a model's small files in a folder, in the hub's cache or on the hub, with a message for each failure.

Weights are not fetched here. `huggingface_hub` is imported only when the hub is really asked.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
import traceback
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kubetune.base.files import IrregularFileError, require_plain
from kubetune.base.humanize import nearest
from kubetune.base.registry.address import SCHEME
from kubetune.base.secrets import HUB_TOKENS
from kubetune.config import consent
from kubetune.config.schema import ModelConfig
from kubetune.errors import DataError, EnvironmentFault, KubetuneError, ModelError, causes
from kubetune.plan import model_shapes

# Silence after which the hub counts as lost, however often it is asked. Its commits of large models take a while.
PATIENCE_SECONDS = 120.0

_NOT_HERE = (
    "{kind} {repo} is not in the local cache and the hub cannot be reached{why}; go online once "
    "(`hf download {repo}{flags}`; a gated one wants its licence accepted and a token in HF_TOKEN) or give a folder "
    "that holds it"
)
NOT_THE_HUB = "is not the hub: {found}. Look at HF_ENDPOINT, and whether a proxy or a login page stands in between"


def _not_here(kind: str, repo: str, why: str = "") -> str:
    flags = " --repo-type dataset" if kind == "dataset" else ""
    return _NOT_HERE.format(kind=kind, repo=repo, why=why, flags=flags)


def hub_token() -> str | None:
    """Return the access token in the environment, under any of its names; None leaves it to `hf auth login`."""
    for name in HUB_TOKENS:
        token = os.environ.get(name)
        if token:
            return token
    return None


def is_local(path: str) -> bool:
    """True if a model's path means a folder on disk rather than a hub id or an image in a registry."""
    if is_image(path):
        return False
    return (
        Path(os.path.expanduser(path)).is_dir()
        or path.startswith(("/", "./", "../", "~"))
        or path.count("/") > 1
    )


def is_image(path: str) -> bool:
    """True if a model's path is the address of an image, `oci://registry/name:tag`."""
    return path.startswith(SCHEME)


def image_folder(
    model: ModelConfig,
    path: str,
    digest: str | None = None,
) -> Path:
    """Return the folder of an image in this user's cache, fetched unless it is there. `digest`: left out, today's."""
    # Its HTTP library takes a quarter of a second to import.
    from kubetune.base.registry import pull

    # HF_HUB_OFFLINE is of the hub alone: pods have it whose model is not from there.
    tell = logging.getLogger(__name__).info
    return pull.fetch(path, digest, offline=model.local_files_only, tell=tell)


def find_files(
    model: ModelConfig,
    path: str,
    names: Sequence[str],
) -> dict[str, Path]:
    """Return those of `names` that the model at `path` has, each with where it lies on disk.

    Asks the hub for what is not in the cache, unless `model.local_files_only`. Raise ModelError when there is no
    such model, it is gated, or it cannot be had offline; EnvironmentFault when the hub cannot be reached.
    """
    if is_image(path):
        path = str(image_folder(model, path))
    if is_local(path):
        folder = Path(os.path.expanduser(path))
        if not folder.is_dir():
            raise _no_folder(path)
        present = {name: folder / name for name in names if (folder / name).is_file()}
        if present:
            _require_plain(folder)
        return present

    away = "" if model.local_files_only else unresolved_host()
    files = {}
    for name in names:
        # A revision is the model's: a tokenizer from elsewhere has commits of its own.
        revision = model.revision if path == model.path else None
        file = _download(path, name, revision, model.local_files_only or bool(away))
        if file is not None:
            files[name] = file

    # Nothing at all of a model means that it is not here; single files may not exist.
    if not files and away:
        raise EnvironmentFault(_not_here("model", path, f": {away}"))
    if not files and _is_offline() and not model.local_files_only:
        raise EnvironmentFault(_not_here("model", path))
    if not files and model.local_files_only:
        raise ModelError(
            f"model {path} is not in the local cache and local_files_only is set; download it first "
            f"(`hf download {path}`), give the folder that holds it, or allow the network"
        )

    return files


def list_files(model: ModelConfig, path: str) -> list[str]:
    """Return the paths of the files of the model at `path`; of a local folder, two levels deep.

    Raise as `find_files` does, also where the hub is not to be asked.
    """
    if is_image(path):
        path = str(image_folder(model, path))
    if is_local(path):
        folder = Path(os.path.expanduser(path))
        files = [*folder.glob("*"), *folder.glob("*/*")]
        return sorted(str(file.relative_to(folder)) for file in files)
    if model.local_files_only or _is_offline():
        raise EnvironmentFault(_not_here("list of files of model", path, ", or is not to be asked"))
    from huggingface_hub import HfApi

    revision = model.revision if path == model.path else None
    with explained_hub_errors(path, revision):
        return sorted(HfApi(token=hub_token()).list_repo_files(path, revision=revision))


def _download(
    repo: str,
    name: str,
    revision: str | None,
    local_files_only: bool,
) -> Path | None:
    """Return a file of a hub repository, or None when the repository does not have it."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    with explained_hub_errors(repo, revision):
        try:
            return Path(
                hf_hub_download(
                    repo,
                    name,
                    revision=revision,
                    local_files_only=local_files_only,
                    token=hub_token(),
                )
            )
        except RemoteEntryNotFoundError:
            return None
        except LocalEntryNotFoundError:
            # Offline nobody can say whether the repository has this file; most have few of the names.
            if local_files_only or _is_offline():
                return None
            raise


def _is_offline() -> bool:
    """True if HF_HUB_OFFLINE says that the hub must not be asked."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def unresolved_host() -> str:
    """Return why the hub's name leads nowhere from here; empty if it leads somewhere, or if the hub is not asked.

    Without a network this is known at once, while the hub's client tries again for half a minute.
    """
    if _is_offline() or urllib.request.getproxies():  # a proxy resolves names itself
        return ""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return f"the name {host} cannot be resolved: {error.strerror or error}"
    return ""


def check_model_folder(model: ModelConfig) -> None:
    """Check a local folder before anything starts; transformers' own message would send the user to the hub.

    Raise ModelError when it is missing or no model, when it holds an adapter, links that lead out of it, weights only
    as pickles, or other code than the config pins.
    """
    if not is_local(model.path):
        return
    folder = Path(os.path.expanduser(model.path))
    if not folder.exists():
        raise _no_folder(model.path)
    require_base_folder(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {folder}: has no config.json; expected a folder in Hugging Face form"
        )

    _require_plain(folder)
    files = model_shapes.files_of(folder)
    if model.trust_remote_code:
        _require_read_code(folder, str(model.revision))
    if files:
        return
    # No safetensors: say whether there are weights of the older kind.
    pickles = [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pt*"))]
    if pickles:
        raise ModelError(
            f"model {folder}: has only {pickles[0].name}, a pickle that could run code when it is read; convert it to "
            "safetensors (model.save_pretrained with transformers does)"
        )

    raise ModelError(f"model {folder}: has no *.safetensors file")


def _no_folder(path: str) -> ModelError:
    """Return the error for a folder that is not there, with the one that was probably meant; or for a file of its name."""
    folder = Path(os.path.expanduser(path))
    if folder.exists():
        return ModelError(f"model {path}: is a file; expected the folder of a model")
    advice = _near(folder) or "; give a folder that holds the model, or a hub id"
    return ModelError(f"model {path}: there is no such folder{advice}")


def _near(folder: Path) -> str:
    """Return `; did you mean ./tiny?` for a folder that was mistyped; empty where none beside it has a like name."""
    beside = []
    if folder.parent.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
    close = nearest(folder.name, beside)
    if close is None:
        return ""
    meant = str(folder.parent / close)
    return f"; did you mean {meant if folder.is_absolute() else f'./{meant}'}?"


def require_model(model: ModelConfig, environ: Mapping[str, str]) -> None:
    """Raise ModelError for a model or tokenizer that is neither on this machine nor to be had from the hub.

    Nothing is asked of the hub for what is here, and no weights are fetched.
    """
    check_model_folder(model)
    for path in dict.fromkeys((model.path, model.tokenizer or model.path)):
        needed = "weights" if path == model.path else "tokenizer"
        if is_local(path) or is_image(path) or _has_files(path, needed, environ):
            continue
        try:
            # A gated model keeps its config.json too, so asking for that shows whether the run may read it.
            files = find_files(model, path, ("config.json", "tokenizer.json"))
        except EnvironmentFault as error:
            # `models/tinny` may be a hub id, and a mistyped folder is more likely.
            if _near(Path(path)):
                raise _no_folder(path) from error
            raise ModelError(str(error)) from error
        # If the weights of a model never came, the cache has its small files.
        if model.local_files_only or offline(environ):
            raise ModelError(_not_here(f"the {needed} of model", path))
        if not files:
            raise ModelError(f"model {path} has no config.json on the hub; give another one")


def offline(environ: Mapping[str, str]) -> bool:
    """True if the environment says that the hub must not be asked. Imports nothing, unlike huggingface_hub."""
    values = (environ.get("HF_HUB_OFFLINE"), environ.get("TRANSFORMERS_OFFLINE"))
    return any(str(value).upper() in ("1", "ON", "YES", "TRUE") for value in values)


def require_dataset(path: str, environ: Mapping[str, str]) -> None:
    """Raise DataError for a data set that is neither in the caches of this machine nor to be had from the hub."""
    if _has_dataset(path, environ):
        return
    away = "" if offline(environ) else unresolved_host()
    if offline(environ) or away:
        raise DataError(_not_here("dataset", path, f": {away}" if away else ""))
    try:
        _ask_for_dataset(path)
    except (EnvironmentFault, ModelError) as error:
        raise DataError(str(error)) from error


@functools.lru_cache(maxsize=64)
def _ask_for_dataset(path: str) -> None:
    """Raise EnvironmentFault or ModelError if the hub does not give a data set. A form asks with every letter."""
    from huggingface_hub import HfApi

    with explained_hub_errors(path, kind="dataset"):
        HfApi(token=hub_token()).dataset_info(path)


def _has_dataset(path: str, environ: Mapping[str, str]) -> bool:
    """True if a cache of this machine has a data set: the hub's has its files, that of `datasets` what it made of them."""
    of_hub = model_shapes.hub_folder(path, environ)
    if of_hub.with_name(of_hub.name.replace("models--", "datasets--", 1)).is_dir():
        return True
    home = environ.get("HF_DATASETS_CACHE") or model_shapes.hub_home(environ) / "datasets"
    # It writes org/SomeData as org___some_data.
    wanted = _bare(path.replace("/", ""))
    return any(
        _bare(folder.name) == wanted for folder in Path(os.path.expanduser(home)).glob("*___*")
    )


def _bare(name: str) -> str:
    return name.lower().replace("_", "")


_PATTERNS = {"weights": ("*/*.safetensors", "*/*.bin"), "tokenizer": ("*/tokenizer*.json",)}


def _has_files(path: str, needed: str, environ: Mapping[str, str]) -> bool:
    """True if the hub's cache has what is needed of a model: its weights, or its tokenizer."""
    snapshots = model_shapes.hub_folder(path, environ) / "snapshots"
    return any(True for pattern in _PATTERNS[needed] for _ in snapshots.glob(pattern))


def require_base_folder(folder: Path) -> None:
    """Raise ModelError for a file, an adapter, or weights of 0 bytes in place of a model."""
    if not folder.is_dir():
        raise _no_folder(str(folder))
    # transformers would load the model that an adapter names, from wherever that is.
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"model {folder}: is an adapter (it holds adapter_config.json), which would load another model; give the "
            "folder of a whole model, such as `kubetune export --merge` writes. Nothing was loaded."
        )
    for weights in sorted(folder.glob("*.safetensors")):
        if weights.is_file() and weights.stat().st_size == 0:
            raise ModelError(f"model {folder}: {weights.name} has 0 bytes; download it again")


def _require_plain(folder: Path) -> None:
    """Raise ModelError unless all that lies below a model's folder are files and folders inside it.

    Libraries open files of its folders too, such as chat templates, which are copied into checkpoints.
    """
    try:
        require_plain(folder)
    except IrregularFileError as error:
        raise ModelError(f"model {error}. Nothing was loaded.") from None


def _require_read_code(folder: Path, pin: str) -> None:
    """Raise ModelError unless `pin` is the digest of what can make code run: the modules of a folder, and its JSON."""
    try:
        digest = consent.folder_digest(folder)
    except IrregularFileError as error:
        raise ModelError(f"model {error}. Nothing was run.") from None
    if digest != pin:
        raise ModelError(
            f"model {folder}: model.trust_remote_code runs its code, and model.revision pins {pin}, but the folder's "
            f"Python and JSON files have the digest {digest}. Read the code, then set model.revision "
            "to that. Nothing was run."
        )


@contextlib.contextmanager
def explained_hub_errors(
    repo: str,
    revision: str | None = None,
    kind: str = "model",
) -> Iterator[None]:
    """Turn what `huggingface_hub` raises into errors that say what to do."""
    from huggingface_hub import errors as hub

    # What it logs reaches our log through the root logger; its own handler would print it twice.
    logging.getLogger("huggingface_hub").handlers.clear()
    bound_waits()
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{repo}"
    try:
        yield
    except hub.GatedRepoError as error:
        have = "the token in HF_TOKEN has no access yet" if hub_token() else "no token is set"
        raise ModelError(
            f"{kind} {repo} is gated and {have}: accept its licence at {page}, create a token at "
            "https://huggingface.co/settings/tokens and set HF_TOKEN to it"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelError(
            f"{kind} {repo} is not on the hub, or is private; check the spelling, give an existing folder, or set "
            "HF_TOKEN to a token that may read it"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelError(
            f"{kind} {repo} has no revision {revision!r}; see {page}/commits/main"
        ) from error
    except hub.HFValidationError as error:
        raise ModelError(
            f"{repo!r} is neither an existing folder nor a hub id such as Qwen/Qwen3-8B"
        ) from error
    except Exception as error:
        explained = _explained(error, repo, kind)
        if explained is None:
            raise
        raise explained from error


def is_of_hub(error: Exception) -> bool:
    """True if an error is about the hub, or the way there."""
    return isinstance(error, KubetuneError) or _explained(error, "", "") is not None


def _explained(
    error: Exception,
    repo: str,
    kind: str,
) -> KubetuneError | None:
    """Return the error that says what went wrong between here and the hub; None for what has nothing to do with it."""
    from huggingface_hub import errors as hub

    # `datasets` reports a hub that cannot be reached as a file that is not found, and hides the cause.
    words = "on the Hugging Face Hub either"
    is_wrapped = isinstance(error, FileNotFoundError) and words in str(error)
    chain = list(causes(error, hidden=is_wrapped))
    what = f"{kind} {repo}"
    # An answer with a status comes first: it says most. A lost connection comes last: it may be behind any of them.
    for cause in chain:
        if isinstance(cause, hub.HfHubHTTPError):
            return _refused(cause.response.status_code, what)
    if mistake := misread(chain):
        answer = NOT_THE_HUB.format(found=mistake)
        return EnvironmentFault(f"what answers for the hub about {what} {answer}")
    for cause in chain:
        is_of_arrow = type(cause).__module__ == "pyarrow.lib"
        if is_of_arrow and not isinstance(error, KubetuneError):
            return EnvironmentFault(
                f"what came from the hub as {what} cannot be read as rows ({_one_line(cause)}): a file of it is "
                "damaged, or a page of somebody else came in its place"
            )

    return _unreachable(chain, what, kind, repo, is_wrapped=is_wrapped)


def _refused(status: int, what: str) -> KubetuneError:
    """Return the error for an answer of the hub that says no."""
    if status in (401, 403):
        why = "no token is set"
        if hub_token():
            why = "the token in HF_TOKEN is not valid, or may not read it"
        return ModelError(
            f"the hub refused {what} ({status}): {why}; set HF_TOKEN to a token that may "
            "(https://huggingface.co/settings/tokens)"
        )

    # Anything else is the hub's to fix.
    advice = "too many requests; wait some minutes" if status == 429 else "try again later"
    return EnvironmentFault(
        f"the hub refused {what} ({status}): {advice}, and run the same command again"
    )


def _unreachable(
    chain: Sequence[BaseException],
    what: str,
    kind: str,
    repo: str,
    *,
    is_wrapped: bool,
) -> KubetuneError | None:
    """Return the error for a hub that did not answer, or not to the end; None where it was not the connection."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    lost = next((cause for cause in chain if is_lost(cause)), None)
    reason = _one_line(lost or chain[-1])
    is_missing = any(isinstance(cause, LocalEntryNotFoundError) for cause in chain)
    # These two mean that nothing was ever heard: the hub is away, and no download was cut off.
    is_connected = type(lost).__name__ not in ("ConnectError", "ConnectTimeout")
    if lost is not None and is_connected and not is_missing:
        return EnvironmentFault(
            f"the connection to the hub was lost over {what} ({reason}); run the same command again, which goes "
            "on with what has arrived"
        )

    away = (LocalEntryNotFoundError, ConnectionError, TimeoutError)
    if lost or is_wrapped or any(isinstance(cause, away) for cause in chain):
        # To be offline on purpose is no news.
        why = "" if _is_offline() else f": {reason}"
        return EnvironmentFault(_not_here(kind, repo, why))
    return None


def _one_line(error: BaseException) -> str:
    """Return what an error says on one line, or its name if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


@functools.cache
def bound_waits() -> None:
    """Have the hub's client give up on silence, and on a hub that asks it to come back much later.

    By itself it waits for ever on much of what it asks, asks again, and would wait for hours if the server asks it to.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    # Of each thread: `since`, the time at which it asked what has had no answer yet, and `waits`, the seconds that the
    # hub has asked it to wait for since its last useful answer.
    unheard = threading.local()

    def limit(request: Any) -> None:
        left = PATIENCE_SECONDS
        # Only what reads: sending takes as long as it takes.
        if request.method in ("GET", "HEAD"):
            since = unheard.__dict__.setdefault("since", time.monotonic())
            left -= time.monotonic() - since
        if left <= 0:
            unheard.__dict__.clear()
            raise TimeoutError(f"nothing heard from {request.url.host} for {PATIENCE_SECONDS:g} s")
        timeouts = dict(request.extensions.get("timeout", {}))
        for kind in ("connect", "read", "write", "pool"):
            timeouts[kind] = min(timeouts.get(kind) or left, left)
        request.extensions["timeout"] = timeouts

    def hear(response: Any) -> None:
        wait = _wait_asked_for(response)
        waits = unheard.__dict__.get("waits", 0.0) + wait
        unheard.__dict__.clear()
        if waits > PATIENCE_SECONDS:
            _http.hf_raise_for_status(response)
        if wait:
            unheard.waits = waits

    def make_client() -> Any:
        client = _http.default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], limit],
            "response": [*hooks["response"], hear],
        }
        return client

    # Older ones have none, and keep their own waits.
    if hasattr(_http, "default_client_factory"):
        set_client_factory(make_client)


def _wait_asked_for(response: Any) -> float:
    """Return the seconds after which the hub wants to be asked again, as its client reads it; 0 if it says nothing."""
    from huggingface_hub.utils import _http

    # Only an error asks for a wait.
    if response.status_code < 400:
        return 0.0
    if response.status_code == 429 and hasattr(_http, "parse_ratelimit_headers"):
        limit = _http.parse_ratelimit_headers(response.headers)
        if limit is not None and limit.remaining == 0:
            return float(limit.reset_in_seconds)
    if hasattr(_http, "_parse_retry_after"):
        return float(_http._parse_retry_after(response.headers) or 0)

    # A client that reads it elsewhere: seconds, the form that the hub writes. A date counts as no wait.
    seconds = response.headers.get("retry-after", "")
    return float(seconds) if seconds.isdigit() else 0.0


def misread(chain: Sequence[BaseException]) -> str:
    """Return what was wrong with an answer that the hub's client could not read; empty if that was not the fault."""
    import huggingface_hub
    from huggingface_hub.errors import FileMetadataError

    client = str(Path(huggingface_hub.__file__).parent)
    for error in chain:
        if isinstance(error, json.JSONDecodeError):
            return "expected JSON"
        if isinstance(error, FileMetadataError):
            return "expected the commit and the checksum of a file"
        # The client takes most fields of an answer for granted, and fails on a missing one as any code would. A few,
        # such as sizes, it checks.
        is_missing_field = isinstance(error, KeyError | TypeError | AttributeError)
        is_failed_check = type(error) is ValueError or (
            type(error) is OSError and error.errno is None
        )
        if (is_missing_field or is_failed_check) and _origin(error).startswith(client):
            words = " ".join(str(error).split())
            return f"expected another answer ({type(error).__name__}: {words})"

    return ""


def _origin(error: BaseException) -> str:
    """Return the file of the code that raised an error; empty if it was never raised."""
    # The innermost frame is where it was raised.
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_code.co_filename if frames else ""


def is_lost(error: BaseException) -> bool:
    """True if an error means that the connection failed."""
    # By name: the hub's client has changed its HTTP library before, and this name stayed.
    return any(kind.__name__ == "TransportError" for kind in type(error).__mro__)
