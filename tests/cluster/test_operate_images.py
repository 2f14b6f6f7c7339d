"""A base model that Kubernetes mounts as an image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster.harness import Cluster
from tests.cluster.operation import Desk
from tests.cluster.test_operate_training import TRAINING, model

__all__ = ["model"]

DIGEST = f"sha256:{'1a' * 32}"


@pytest.mark.slow
def test_a_run_trains_on_a_base_that_is_mounted(
    cluster: Cluster, tmp_path: Path, model: Path
) -> None:
    """No pod asks the registry, which does not exist."""
    reference = f"registry.invalid:5000/team/bot@{DIGEST}"
    desk = Desk(cluster, tmp_path)
    changes = {"model.path": f"oci://{reference}", "kubernetes.image_volumes": True}
    desk.write({**TRAINING, **changes})
    desk.kubetune("submit", "run.yaml")
    cluster.wait_event(f'Back-off pulling image "{reference}"')
    # Without the image its pods wait, and say for what.
    shown = desk.quick("status", "fit").stdout
    assert f'Back-off pulling image "{reference}"' in shown

    # Whole at once, and readable to all, as what `kubetune push` sends is.
    folder = cluster.image_folder(reference)
    partial = shutil.copytree(model, folder.with_name("partial"))
    for file in partial.iterdir():
        file.chmod(0o644)
    partial.rename(folder)
    cluster.wait_condition("Job", "fit", "Complete", seconds=240)
    identity = json.loads((desk.run_folder() / "identity.json").read_text())
    path = identity["parts"]["model"]["path"]
    assert path == "/images/oci/registry.invalid+5000/team/bot/" + DIGEST.replace(":", "-")
