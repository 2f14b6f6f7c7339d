"""Volumes of a run on a cluster: those that every run has, and further mounts."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from kubetune.config.schema.base import Section
from kubetune.config.schema.quantities import AbsolutePath, Name, Quantity


class CsiConfig(Section):
    """An inline CSI volume: its driver, and the driver's parameters."""

    driver: str = Field(
        min_length=1,
        description="Name of the CSI driver, such as `csi-mounted-fs-path.csi.nebius.ai`.",
    )
    attributes: dict[str, str] = Field(
        default_factory=dict, description="The driver's `volumeAttributes`."
    )
    fs_type: str | None = Field(None, description="File system, if the driver wants one.")
    secret: Name | None = Field(None, description="Secret that the driver reads on mounting.")


def require_one_source(section: Section, names: tuple[str, ...], *, needed: bool) -> None:
    """Raise ValueError if a section sets several of these keys, or, if one is `needed`, none of them."""
    keys = [name for name in names if getattr(section, name) is not None]
    if len(keys) > 1 or (needed and not keys):
        raise ValueError(
            f"give exactly one of {', '.join(names)}; found {' and '.join(keys) or 'none'}"
        )


class VolumeConfig(Section):
    """A volume of a run: a new claim, an existing one, a folder of the node, or an inline CSI volume."""

    model_config = ConfigDict(populate_by_name=True)

    size: Quantity | None = Field(None, description="Size of a new claim, such as `200Gi`.")
    storage_class: Name | None = Field(
        None, alias="class", description="Storage class; left out: the cluster's default."
    )
    access: Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"] | None = Field(
        None,
        description="Left out: a cache belongs to one pod (`ReadWriteOnce`); outputs are shared "
        "(`ReadWriteMany`) where several pods use them. A cache with `ReadWriteMany` is one claim for all pods.",
    )
    claim: Name | None = Field(None, description="An existing claim instead of a new one.")
    host_path: AbsolutePath | None = Field(
        None, description="A folder of the node instead; not with `restricted`."
    )
    csi: CsiConfig | None = Field(None, description="An inline CSI volume instead.")

    @model_validator(mode="after")
    def _one_kind_of_volume(self) -> VolumeConfig:
        require_one_source(self, ("size", "claim", "host_path", "csi"), needed=True)
        if self.size is None and (self.storage_class or self.access):
            raise ValueError(
                "class and access belong to a new claim: give its size too, or leave them out"
            )
        return self


class StorageConfig(Section):
    """The two volumes that every run has."""

    cache: VolumeConfig = Field(
        default_factory=lambda: VolumeConfig(size="100Gi"),
        description="Models, downloads and prepared data, at /cache. No work is lost with it.",
    )
    outputs: VolumeConfig = Field(
        default_factory=lambda: VolumeConfig(size="100Gi"),
        description="Run directories, at /outputs.",
    )


class MountConfig(Section):
    """One more volume in all pods of a run."""

    path: AbsolutePath = Field(description="Where the container sees it.")
    claim: Name | None = Field(None, description="An existing claim.")
    host_path: AbsolutePath | None = Field(
        None, description="A folder of the node; not with `restricted`."
    )
    csi: CsiConfig | None = Field(None, description="An inline CSI volume.")
    config_map: Name | None = Field(None, description="An existing ConfigMap.")
    secret: Name | None = Field(None, description="An existing Secret, each key a file.")
    sub_path: str | None = Field(
        None, pattern=r"^[^/].*$", description="Only this folder of the volume."
    )
    read_only: bool = Field(True, description="The run may only read it.")

    @model_validator(mode="after")
    def _one_source_of_files(self) -> MountConfig:
        require_one_source(self, ("claim", "host_path", "csi", "config_map", "secret"), needed=True)
        return self
