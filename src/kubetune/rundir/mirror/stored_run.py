"""The files of a run in an object store. fsspec reaches it; credentials are those that its libraries look for."""

from __future__ import annotations

import logging
import re

from kubetune import errors
from kubetune.extras import require
from kubetune.rundir import checkpoints
from kubetune.rundir.mirror.store import PatientStore

# File that says whose copy it is (lease.py).
REMOTE = "mirror.json"
LIBRARIES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}


def check_installed(address: str) -> None:
    """Raise ConfigError if this is no address of a store, or its library is not installed. Imports nothing."""
    scheme, _, place = address.partition("://")
    library = LIBRARIES.get(scheme)
    if library is None or not place.partition("/")[2].strip("/"):
        raise errors.ConfigError(
            f"{address}: expected SCHEME://BUCKET/PATH with one of {', '.join(LIBRARIES)}. Nothing was sent."
        )
    require(address, library)


class StoredRun:
    """A run at an address of a store. All methods raise whatever the store's library raises."""

    def __init__(self, address: str) -> None:
        check_installed(address)
        from fsspec.core import url_to_fs

        self.address = address
        # gcsfs logs tracebacks of errors that copier.py reports in one line.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        try:
            # Without a cache of listings: another process may write to the store too.
            file_system, root = url_to_fs(
                address, use_listings_cache=False, skip_instance_cache=True
            )
        except (ValueError, OSError) as error:
            library = LIBRARIES[address.partition("://")[0]]
            raise errors.ConfigError(
                f"{address} cannot be opened: {error}. Credentials are looked for where {library} does so. "
                "Nothing was sent."
            ) from error
        self.store = PatientStore(file_system)
        self.root = root.rstrip("/")

    def place(self, name: str) -> str:
        """Return where a file of the run is in the store."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> str | None:
        """Return the text of a file. None if there is none."""
        try:
            return str(self.store.cat_file(self.place(name)).decode())
        except FileNotFoundError:
            return None

    def write(self, name: str, text: str) -> None:
        """Write a file whole."""
        self.store.pipe_file(self.place(name), text.encode())

    def files(self) -> dict[str, int]:
        """Return the sizes of the run's files in the store, by their path in the run directory."""
        try:
            listing = self.store.find(self.root, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {}
        for place, facts in listing.items():
            name = place[len(self.root) + 1 :]
            if name != REMOTE:
                sizes[name] = int(facts["size"])
        return sizes

    def steps(self) -> list[int]:
        """Return the steps whose checkpoint in the store is whole, in ascending order."""
        manifest = re.compile(
            rf"checkpoints/{checkpoints.STEP_FOLDER.pattern}/{re.escape(checkpoints.MANIFEST)}"
        )
        steps = []
        for name in self.files():
            match = manifest.fullmatch(name)
            if match:
                steps.append(int(match[1]))
        return sorted(steps)


def step_of(folder_name: str) -> int:
    """Return the step of a checkpoint's folder, such as 120 for step-000120; -1 for another name."""
    match = checkpoints.STEP_FOLDER.fullmatch(folder_name)
    if match is None:
        return -1
    return int(match[1])
