"""`kubetune cluster` against stand-ins for nebius and helm that keep state and fail where they are told."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kubetune import cli
from kubetune.base.locks import lock
from kubetune.errors import ConfigError, EnvironmentFault
from kubetune.plugins.nebius.cluster_file import load_cluster
from kubetune.plugins.nebius.provision import Finished, Provisioner, ProvisionState
from kubetune.plugins.nebius.steps import steps

STANDIN = Path(__file__).with_name("standin.sh")
EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "nebius.yaml"

# The flags of `nebius mk8s node-group create` and its kin in Nebius's own reference, as far as they are used here.
FLAGS = {
    "iam service-account create": {"--name", "--format"},
    "compute filesystem create": {
        "--name",
        "--size-gibibytes",
        "--type",
        "--format",
    },
    "mk8s cluster create": {
        *("--name", "--control-plane-version", "--control-plane-subnet-id", "--format"),
        "--control-plane-endpoints-public-endpoint=true",
    },
    "compute gpu-cluster create": {"--name", "--infiniband-fabric", "--format"},
    "mk8s node-group create": {
        *(
            "--parent-id",
            "--name",
            "--fixed-node-count",
            "--template-resources-platform",
            "--format",
        ),
        *(
            "--template-resources-preset",
            "--template-boot-disk-type",
            "--template-boot-disk-size-gibibytes",
        ),
        *(
            "--template-gpu-settings-drivers-preset",
            "--template-service-account-id",
            "--template-gpu-cluster-id",
        ),
        *(
            "--template-filesystems",
            "--template-cloud-init-user-data",
        ),
        "--template-preemptible=true",
    },
}
MAKING = (
    "iam-service-account create",
    "compute-filesystem create",
    "mk8s-cluster create",
    "compute-gpu-cluster create",
    "mk8s-node-group create",
    "mk8s-cluster get-credentials",
    "helm upgrade",
)


QUICK = {("mk8s-cluster create", "after")}
FAILURES = [
    pytest.param(what, when, marks=() if (what, when) in QUICK else pytest.mark.slow)
    for what in MAKING
    for when in ("before", "after")
]


@dataclass(frozen=True)
class Cloud:
    """The stand-in's state, and a cluster file with everything in it."""

    folder: Path
    file: Path

    def fail(self, when: str, what: str) -> None:
        (self.folder / "fail").write_text(f"{when}|{what}\n")

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []

    def made(self) -> list[str]:
        """Return what `create` was called for."""
        return [" ".join(c[1:4]) for c in self.calls() if c[0] == "nebius" and c[3] == "create"]

    def forget_calls(self) -> None:
        (self.folder / "calls").unlink()

    def things(self) -> set[str]:
        names = (
            str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()
        )
        return {name for name in names if name not in ("calls", "fail", "slow", "says")}

    def change(self, **changes: object) -> None:
        """Change keys of the cluster file; `node` those of its first node group."""
        content = YAML(typ="safe").load(self.file.read_text())
        for key, setting in changes.pop("node", {}).items():  # type: ignore[attr-defined]
            content["node_groups"][0][key] = setting
        content["node_groups"][0] = {
            k: v for k, v in content["node_groups"][0].items() if v is not None
        }
        with open(self.file, "w") as stream:
            YAML(typ="safe").dump(content | changes, stream)

    def state(self) -> dict[str, dict[str, object]]:
        records = json.loads(self.file.with_suffix(".state.json").read_text())["records"]
        return dict(records)

    def run(self, action: str, *more: str) -> int:
        return cli.main(["cluster", action, "-f", str(self.file), *more])


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    programs = tmp_path / "bin"
    folder = tmp_path / "cloud"
    programs.mkdir()
    folder.mkdir()
    for name in ("nebius", "helm"):
        (programs / name).symlink_to(STANDIN)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("STANDIN", str(folder))
    content = YAML(typ="safe").load(EXAMPLE.read_text())
    content["node_groups"][0]["infiniband_fabric"] = "fabric-3"
    file = tmp_path / "tune.yaml"
    with open(file, "w") as stream:
        YAML(typ="safe").dump(content, stream)
    return Cloud(folder, file)


def test_all_is_made_once_in_order_and_a_second_run_makes_nothing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud.run("create") == 0
    printed = capsys.readouterr().out
    assert "+ nebius mk8s cluster create --name tune --control-plane-version 1.33" in printed
    assert cloud.made() == list(FLAGS)
    for call in cloud.calls():
        if call[0] == "nebius" and call[3] == "create":
            flags = {word for word in call[4:] if word.startswith("--")}
            assert flags <= FLAGS[" ".join(call[1:4])], call
    assert {name.split("/")[0] for name in cloud.things()} == {
        *(
            "iam-service-account",
            "compute-filesystem",
            "compute-gpu-cluster",
        ),
        *("mk8s-cluster", "mk8s-node-group", "contexts", "helm"),
    }
    before = cloud.things(), cloud.state()
    cloud.forget_calls()
    assert cloud.run("create") == 0
    assert (cloud.things(), cloud.state()) == before
    assert cloud.made() == []


def test_the_nodes_mount_the_filesystem_that_was_made(cloud: Cloud) -> None:
    assert cloud.run("create") == 0
    (call,) = [call for call in cloud.calls() if call[1:4] == ["mk8s", "node-group", "create"]]
    attached = json.loads(call[call.index("--template-filesystems") + 1])
    assert attached[0]["existing_filesystem"] == {"id": "compute-filesystem-tune-shared"}
    assert attached[0]["mount_tag"] == "csi-storage"
    assert (
        "mount -t virtiofs csi-storage /mnt/data"
        in call[call.index("--template-cloud-init-user-data") + 1]
    )
    assert call[call.index("--template-service-account-id") + 1] == "iam-service-account-tune-nodes"
    assert call[call.index("--template-gpu-cluster-id") + 1] == "compute-gpu-cluster-tune-gpu"
    assert call[call.index("--parent-id") + 1] == "mk8s-cluster-tune"


@pytest.mark.parametrize(("what", "when"), FAILURES)
def test_a_failure_at_any_step_is_gone_on_from(
    cloud: Cloud, capfd: pytest.CaptureFixture[str], what: str, when: str
) -> None:
    cloud.fail(when, what)
    assert cloud.run("create") == 3
    assert "the connection broke" in capfd.readouterr().err
    assert cloud.run("create") == 0
    assert sorted(cloud.made()) == sorted(FLAGS) or when == "before"
    assert len(cloud.made()) - len(FLAGS) == (when == "before" and " create" in what)
    state = cloud.state()
    assert all(record["created"] and record["id"] for record in state.values())
    assert cloud.run("delete", "--yes") == 0
    assert {name.split("/")[0] for name in cloud.things()} <= {
        *("contexts", "helm"),  # these went with the cluster
    }


def test_what_was_there_before_is_used_and_never_deleted(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    for noun, name in (("compute-filesystem", "tune-shared"), ("mk8s-cluster", "tune")):
        (cloud.folder / noun).mkdir()
        (cloud.folder / noun / name).write_text(f"{noun}-{name} {name} 2026-01-01T00:00:00Z\n")
    assert cloud.run("create") == 0
    assert not {"compute filesystem create", "mk8s cluster create"} & set(cloud.made())
    assert cloud.run("delete", "--yes") == 0
    printed = capsys.readouterr().out
    assert (
        "shared filesystem tune-shared (compute-filesystem-tune-shared): stays: it was not made here"
        in printed
    )
    assert "lost for ever" not in printed
    left = {name for name in cloud.things() if not name.startswith("contexts")}
    assert left == {
        "compute-filesystem/tune-shared",
        "mk8s-cluster/tune",
        "helm/kube-system csi-mounted-fs-path",
    }
    assert not cloud.file.with_suffix(".state.json").exists()


def test_an_answer_that_never_came_makes_nothing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud.fail("before", "compute-filesystem get-by-name")
    assert cloud.run("create") == 3
    assert "run the same command" not in capsys.readouterr().out
    assert "compute filesystem create" not in cloud.made()


def test_deleting_shows_what_goes_asks_and_goes_on_after_a_failure(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud.run("create") == 0
    before = cloud.things()
    assert cloud.run("delete") == 2, "nobody can be asked"
    printed = capsys.readouterr()
    assert "nodes tune-gpu (mk8s-node-group-tune-gpu): is deleted" in printed.out
    assert "lost for ever" in printed.out
    assert "--yes" in printed.err
    assert cloud.things() == before
    cloud.fail("after", "mk8s-cluster delete")
    assert cloud.run("delete", "--yes") == 3
    assert cloud.run("delete", "--yes") == 0
    deleted = [" ".join(c[1:3]) for c in cloud.calls() if c[0] == "nebius" and c[3] == "delete"]
    assert deleted == [
        *(
            "mk8s node-group",
            "compute gpu-cluster",
            "mk8s cluster",
            "mk8s cluster",
            "compute filesystem",
        ),
        "iam service-account",
    ]
    cloud.forget_calls()
    assert cloud.run("delete", "--yes") == 0
    assert cloud.calls() == []


def test_nodes_alone_are_given_back_and_made_again(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    content = YAML(typ="safe").load(cloud.file.read_text())
    content["node_groups"].append(
        {"name": "tune-cpu", "nodes": 1, "platform": "cpu-d3", "preset": "4vcpu-16gb"}
    )
    with open(cloud.file, "w") as stream:
        YAML(typ="safe").dump(content, stream)
    assert cloud.run("delete", "--node-group") == 0
    assert "knows of no nodes" in capsys.readouterr().out
    assert cloud.run("create") == 0
    made = cloud.things()
    before = cloud.state()
    assert cloud.run("delete", "--node-group", "tune-gpu", "other") == 2
    assert (
        "knows of no nodes other, but of tune-gpu, tune-cpu. Nothing was deleted"
        in capsys.readouterr().err
    )
    assert cloud.run("delete", "--node-group", "tune-gpu") == 2, "nobody can be asked"
    assert (cloud.things(), cloud.state()) == (made, before)
    capsys.readouterr()
    cloud.fail("after", "compute-gpu-cluster delete")
    assert cloud.run("delete", "--node-group", "tune-gpu", "--yes") == 3
    printed = capsys.readouterr().out
    assert "nodes tune-gpu (mk8s-node-group-tune-gpu): is deleted" in printed
    assert "shared filesystem" not in printed
    assert cloud.run("delete", "--node-group", "tune-gpu", "--yes") == 0, "it goes on"
    assert made - cloud.things() == {"mk8s-node-group/tune-gpu", "compute-gpu-cluster/tune-gpu"}
    gone = {"node-group/tune-gpu", "gpu-cluster/tune-gpu"}
    assert cloud.state() == {key: record for key, record in before.items() if key not in gone}
    capsys.readouterr()
    assert cloud.run("status") == 0
    assert "nodes tune-gpu" not in capsys.readouterr().out, "it was given back"
    assert cloud.run("create") == 0
    assert (cloud.things(), cloud.state()) == (made, {key: cloud.state()[key] for key in before})
    assert cloud.run("delete", "--node-group", "--yes") == 0
    assert {key for key in cloud.state() if key.startswith(("node-group", "gpu-cluster"))} == set()
    assert cloud.state().keys() >= {"cluster", "filesystem", "service-account"}


def test_nodes_that_were_there_before_are_not_given_back(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    (cloud.folder / "mk8s-node-group").mkdir()
    (cloud.folder / "mk8s-node-group" / "tune-gpu").write_text(
        "mk8s-node-group-tune-gpu x 2026-01-01T00:00:00Z\n"
    )
    assert cloud.run("create") == 0
    before = cloud.things(), cloud.state()
    capsys.readouterr()
    assert cloud.run("delete", "--node-group", "--yes") == 0
    assert "knows of no nodes that were made here; nothing was deleted" in capsys.readouterr().out
    assert (cloud.things(), cloud.state()) == before


def test_status_may_be_asked_while_another_command_works(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud.run("create") == 0
    before = cloud.things(), cloud.state()
    capsys.readouterr()
    with lock(cloud.file.with_suffix(".lock"), wait=False):
        assert cloud.run("status") == 0
        assert "RUNNING" in capsys.readouterr().out
        assert cloud.run("delete", "--yes") == 3
    assert (cloud.things(), cloud.state()) == before


def test_status_says_how_it_stands_and_what_is_gone(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud.run("status") == 0
    assert "nothing is known" in capsys.readouterr().out
    assert cloud.run("create") == 0
    (cloud.folder / "compute-filesystem" / "tune-shared").unlink()
    capsys.readouterr()
    assert cloud.run("status") == 0
    printed = capsys.readouterr().out
    assert "RUNNING, 2 of 2 nodes ready" in printed
    assert "is not there" in printed
    assert "hours" in printed
    assert cloud.run("status", "--json") == 0
    things = {thing["key"]: thing for thing in json.loads(capsys.readouterr().out)["things"]}
    assert things["cluster"]["made_here"] is True
    assert things["filesystem"]["state"] == "is not there"
    assert cloud.run("create") == 0
    assert cloud.made().count("compute filesystem create") == 2, "made again"


def test_credentials_alone(cloud: Cloud) -> None:
    assert cloud.run("credentials") == 2
    assert cloud.run("create") == 0
    (cloud.folder / "contexts" / "nebius-tune").unlink()
    assert cloud.run("credentials") == 0
    assert (cloud.folder / "contexts" / "nebius-tune").exists()


def test_a_cluster_that_is_still_starting_is_waited_for(cloud: Cloud) -> None:
    config = load_cluster(cloud.file)
    waited: list[float] = []
    messages: list[str] = []
    provisioner = Provisioner(
        ProvisionState.read(cloud.file.with_suffix(".state.json")),
        messages.append,
        waited.append,
    )
    for name in ("compute-filesystem", "mk8s-cluster"):
        (cloud.folder / name).mkdir()
    (cloud.folder / "slow").touch()
    provisioner.create(steps(config))
    assert not waited, "the answer to `create` is not the state that counts"
    (cloud.folder / "slow").touch()
    provisioner.create([step for step in steps(config) if step.title == "cluster tune"])
    assert provisioner.look(provisioner.state.records["cluster"]) is not None
    (cloud.folder / "slow").touch()
    provisioner._until_it_runs(provisioner.state.records["cluster"])
    assert len(waited) == 1
    assert any("PROVISIONING" in line for line in messages)


def test_the_dry_run_is_a_script_that_makes_the_same(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cloud.run("create") == 0
    made = cloud.made()
    things = cloud.things()
    shutil.rmtree(cloud.folder)
    cloud.folder.mkdir()
    capsys.readouterr()
    assert cloud.run("create", "--dry-run") == 0
    assert cloud.calls() == [], "a dry run asks nobody"
    text = capsys.readouterr().out
    path = cloud.file.with_name("create.sh")
    path.write_text(text)
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", path], check=True)
    if not shutil.which("jq"):
        pytest.skip("the script needs jq")
    subprocess.run(["bash", path], check=True, capture_output=True)
    assert (cloud.made(), cloud.things()) == (made, things)


def test_without_the_programs_nothing_begins(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cloud.run("create") == 3
    stderr = capsys.readouterr().err
    assert all(f"{name} is not on the PATH" in stderr for name in ("nebius", "helm"))


def test_every_mistake_in_the_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "provider: nebius\nname: Tune\nkubernetes_version: 1.30\nfilesytem: {}\nnode_groups:\n  - name: a\n"
        "    nodes: two\n    platform: gpu-x\n    boot_disk: {sze: 1}\nsubnet: vpc\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_cluster(path)
    *problems, last = caught.value.problems
    lines = [problem.split(": ")[0].rsplit(":", 1)[1] for problem in problems]
    assert sorted(lines, key=int) == ["2", "3", "4", "6", "7", "9", "10"]
    for mistake in (
        "kubernetes_version: found 1.3; Input should be a valid string",
        "filesytem: unknown key",
        "boot_disk.sze: unknown key",
        "node_groups[0].preset: Field required",
    ):
        assert mistake in str(caught.value)
    assert last == "Nothing was made."


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    lines = [
        "provider: nebius",
        "name: tune",
        'kubernetes_version: "1.33"',
        "subnet: vpcsubnet-e00",
        "node_groups: [{name: a, nodes: 1, platform: gpu-h100-sxm, preset: p}]",
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="5: node_groups: a has GPUs but no drivers_preset"):
        load_cluster(path)
    path.write_text("\n".join([*lines[:4], "node_groups: []"]))
    with pytest.raises(ConfigError, match="5: node_groups: there is none; expected at least one"):
        load_cluster(path)


def test_a_damaged_state_file_stops_everything(cloud: Cloud) -> None:
    cloud.file.with_suffix(".state.json").write_text('{"version": 3}')
    assert cloud.run("delete", "--yes") == 2
    assert cloud.calls() == []


@pytest.mark.parametrize(
    ("what", "says", "never"),
    [
        (
            "compute-filesystem get-by-name",
            "Error: profile prod not found",
            "compute filesystem create",
        ),
        (
            "compute-filesystem get-by-name",
            "bash: helper: command not found",
            "compute filesystem create",
        ),
        (
            "mk8s-cluster get-by-name",
            "Error: code = NotFound desc = project-e00gone not found",
            "mk8s cluster create",
        ),
    ],
)
def test_a_look_up_that_fails_makes_nothing(cloud: Cloud, what: str, says: str, never: str) -> None:
    """However much its words are like those of "there is none": what was there would count as ours, to be deleted."""
    cloud.change(project="project-e00gone")
    (cloud.folder / "says").write_text(f"{what}|{says}\n")
    assert cloud.run("create") == 3
    program, *words = never.split()
    assert not [
        call for call in cloud.calls() if call[0] == program and all(word in call for word in words)
    ]
    (cloud.folder / "says").unlink()
    assert cloud.run("create") == 0


def test_nodes_take_any_option_of_the_command(cloud: Cloud) -> None:
    taints = '[{"key":"dedicated","effect":"NO_SCHEDULE"}]'
    options = {
        "autoscaling-min-node-count": "0",
        "autoscaling-max-node-count": "4",
        "template-preemptible": "true",
        "template-taints": taints,
    }
    cloud.change(node={"nodes": None, "options": options})
    assert cloud.run("create") == 0
    (call,) = [call for call in cloud.calls() if call[1:4] == ["mk8s", "node-group", "create"]]
    assert {f"--{name}={text}" for name, text in options.items()} <= set(call)
    assert "--fixed-node-count" not in call


def test_an_answer_that_is_no_json_is_no_absence() -> None:
    with pytest.raises(EnvironmentFault, match="printed no JSON"):
        Finished(("nebius",), 0, "not JSON").json()
