"""A run that came from git, under another name than its file says: every verb finds it all the same."""

from __future__ import annotations

import json
import subprocess

import yaml

from standin.state.objects import name_of
from tests.cluster.operation import Desk

TRAINERS = "app.kubernetes.io/component=trainer,app.kubernetes.io/instance=alice-fit"
SCRIPT = """
test "$PET_MASTER_ADDR" = alice-fit-0.alice-fit || exit 2
mkdir -p /outputs/fit
until python -c "import socket, sys; socket.gethostbyname(sys.argv[1])" $PET_MASTER_ADDR; do sleep 0.1; done
touch /outputs/met-$PET_NODE_RANK
until test -e /outputs/met-0 -a -e /outputs/met-1; do sleep 0.1; done
echo there > /outputs/fit/result
"""


def test_a_prefixed_run_meets_ends_and_is_found(desk: Desk, kubectl: str) -> None:
    """Its pods meet at the new name, and its results come home by it."""
    desk.write({"kubernetes.storage.outputs.access": "ReadWriteMany"})
    desk.quick("render", "run.yaml", "-o", "base")
    command = [
        {
            "op": "replace",
            "path": "/spec/template/spec/containers/0/command",
            "value": ["sh", "-c", SCRIPT],
        }
    ]
    overlay = {
        "resources": ["../base"],
        "namePrefix": "alice-",
        "patches": [{"target": {"kind": "Job"}, "patch": yaml.safe_dump(command)}],
    }
    (desk.folder / "overlay").mkdir()
    (desk.folder / "overlay" / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    applied = [kubectl, "apply", "--server-side", "-k", "overlay"]
    subprocess.run(
        applied, cwd=desk.folder, env=desk.environment(), check=True, capture_output=True
    )
    desk.cluster.wait(
        "Job", "alice-fit", lambda job: (job.get("status") or {}).get("succeeded") == 2
    )
    place = ("-n", desk.cluster.namespace)
    status = json.loads(desk.quick("status", "alice-fit", *place, "--json").stdout)
    assert (status["name"], status["state"], len(status["pods"])) == ("alice-fit", "done", 2)
    desk.quick("cp", "alice-fit", *place, "-o", "home")
    assert (desk.folder / "home" / "result").read_text() == "there\n"
    desk.quick("delete", "alice-fit", *place, "--yes", "--volumes")
    left = {
        kind: desk.cluster.find(kind, TRAINERS.split(",")[1])
        for kind in ("Job", "ConfigMap", "Service")
    }
    assert left == {kind: [] for kind in left}


def test_submit_goes_on_with_what_kubectl_has_applied(desk: Desk, kubectl: str) -> None:
    """The same file changes nothing. For another one the conflict names a way out, which works."""
    desk.cluster.never_schedule("fit-")
    path = desk.write({"kubernetes.max_restarts": 3})
    desk.quick("render", "run.yaml", "-o", "base")
    subprocess.run(
        [kubectl, "apply", "--server-side", "-k", "base"],
        cwd=desk.folder,
        env=desk.environment(),
        check=True,
        capture_output=True,
    )
    before = {name_of(pod) for pod in desk.cluster.wait_pods("job-name=fit", 2)}
    assert "was there already" in desk.quick("submit", "run.yaml", "--yes").stdout
    assert {name_of(pod) for pod in desk.cluster.find("Pod", "job-name=fit")} == before

    path.write_text(path.read_text().replace("max_restarts: 3", "max_restarts: 5"))
    stderr = desk.quick("submit", "run.yaml", "--yes", code=3).stderr
    assert 'conflict with "kubectl": .data.run.yaml' in stderr
    assert "remove what it made (kubetune delete RUN; the results stay)" in stderr
    desk.quick("delete", "fit", "-n", desk.cluster.namespace, "--yes")
    assert "was submitted" in desk.quick("submit", "run.yaml").stdout
