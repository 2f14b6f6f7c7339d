"""What transformers, PEFT and the hub raise while a model is loaded, turned into one sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from kubetune import errors
from kubetune.config.schema import ModelConfig
from kubetune.data.reading.hub import explained_hub_errors
from kubetune.plan.base_model import needs_code

# transformers' error for a model that its class for the task does not know: the model's config, and that class.
_OTHER_KIND = re.compile(
    r"Unrecognized configuration class .*?(\w+)'> for this kind of AutoModel: (\w+)"
)
# Errors of transformers for a file with a value that it does not expect.
OF_ODD_FILES = (
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    NotImplementedError,
    RecursionError,
)


@contextmanager
def explained_model(model: ModelConfig) -> Iterator[None]:
    """Turn what huggingface_hub and transformers raise into one sentence that says what to do."""
    from huggingface_hub import errors as hub

    strict: type[Exception] = hub.StrictDataclassError
    kinds = (
        hub.HfHubHTTPError,
        hub.HFValidationError,
        hub.OfflineModeIsEnabled,
        hub.LocalEntryNotFoundError,
    )
    try:
        yield
    except SafetensorError as error:
        raise errors.ModelError(
            f"model {model.path}: a *.safetensors file is damaged or was not downloaded to its end ({error}); "
            "fetch it again"
        ) from error
    except (OSError, ValueError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise needs_code(model.path) from error
        # transformers wraps errors of the hub in an OSError of its own, with other advice.
        for cause in errors.causes(error, hidden=True):
            if isinstance(cause, kinds):
                with explained_hub_errors(model.path, model.revision):
                    raise cause from error
        other_kind = _OTHER_KIND.search(str(error))
        if other_kind is not None:
            # The rest of the message lists each of the hundreds of classes that would do.
            kind = other_kind[1].removesuffix("Config")
            raise errors.ModelError(
                f"model {model.path}: is a {kind}, which {other_kind[2]} has no form of; choose "
                "a model of another kind, or another `task`"
            ) from error

        raise errors.ModelError(f"model {model.path}: {' '.join(str(error).split())}") from error
    except (*OF_ODD_FILES, RuntimeError, strict) as error:
        raise errors.ModelError(
            f"model {model.path}: transformers cannot make a model of its config.json and weights "
            f"({fault_of_files(error)}); fetch it again, or fix config.json"
        ) from error


def fault_of_files(error: Exception) -> str:
    """Return what a library says of what is in a file, in short. Raise the error itself if it says something else.

    A lack of memory, a lost rank and a broken device are no fault of the files. They have classes of their own, or
    words.
    """
    if isinstance(error, RuntimeError):
        is_odd = isinstance(error, OF_ODD_FILES) or type(error) is RuntimeError
        if not is_odd or re.search(r"alloc|memory|CUDA", str(error)[:2000]):
            raise error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
