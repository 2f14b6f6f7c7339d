"""What is away for a moment ends no verb: the kubelet of a node, and an API server that has just started."""

from __future__ import annotations

import json
import re
import subprocess
import time

import pytest

from standin.state.objects import name_of
from tests.cluster.operation import Desk, slow, write_progress
from tests.cluster.test_operate import bound
from tests.cluster.test_operate_leaving import LEFT
from tests.ranks import wait_until

COUNT = """
n=0; trap 'exit 143' TERM
while [ ! -e /outputs/end ]; do n=$((n+1)); echo line $n; sleep 0.01; done
echo last $n
"""
WAIT = "trap 'exit 143' TERM; echo up; while :; do sleep 0.02; done"
TRAINERS = "app.kubernetes.io/component=trainer"
REFUSED = "dial tcp 10.88.7.1:10250: connect: connection refused"
NO_KIND = "the server could not find the requested resource"
LOG, MADE = "get pods/log", "patch pods"


def with_few_rights(desk: Desk) -> None:
    """Be a user with the rights that kubetune needs and no others, by a Role."""
    rights = {
        "": ["configmaps", "secrets", "pods", "pods/log", "pods/exec", "events", "services"],
        "batch": ["jobs"],
        "kueue.x-k8s.io": ["workloads", "localqueues"],
    }
    rules = [
        {"apiGroups": [group], "resources": resources, "verbs": ["*"]}
        for group, resources in rights.items()
    ]
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "operator"},
        "rules": rules,
    }
    desk.cluster.apply(role, bound(role, desk.cluster.namespace))
    text = desk.cluster.kubeconfig.read_text()
    desk.cluster.kubeconfig.write_text(
        text.replace("token: admin", f"token: sa:{desk.cluster.namespace}:guest")
    )


def end(desk: Desk) -> None:
    (desk.cluster.claim_folder("fit-outputs") / "end").touch()


def wait_asked(desk: Desk, request: str, times: int) -> None:
    """Wait until users have sent a request so many more times."""
    before = desk.cluster.asked().count(request)
    deadline = time.monotonic() + 60
    while desk.cluster.asked().count(request) < before + times:
        assert time.monotonic() < deadline, f"{request} was not asked {times} times"
        time.sleep(0.02)


class Follower:
    """A verb that follows a run, whose output is read line by line; what it says beside goes to a file."""

    def __init__(self, desk: Desk, *argv: str) -> None:
        self._errors = desk.folder / "errors"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                desk.command(*argv),
                cwd=desk.folder,
                env=desk.environment(),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.lines: list[str] = []

    def read(self, lines: int) -> None:
        """Read so many lines of the run's pods."""
        assert self.process.stdout is not None
        while lines:
            line = self.process.stdout.readline()
            assert line, self._errors.read_text()
            lines -= self._keep(line)

    def end(self) -> None:
        """Read to the end; AssertionError where the verb failed, or a line was lost or came twice."""
        with self.process:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self._keep(line)
        assert self.process.returncode == 0, self._errors.read_text()
        count = len(self.lines) - 1
        assert self.lines == [*(f"line {n}" for n in range(1, count + 1)), f"last {count}"]

    def _keep(self, line: str) -> bool:
        is_of_pod = line.startswith(("line ", "last "))
        if is_of_pod:
            self.lines.append(line.strip())
        return is_of_pod


@pytest.mark.parametrize("argv", ["logs -f fit", slow("submit run.yaml --follow")])
def test_a_kubelet_that_is_away_ends_no_follower(desk: Desk, argv: str) -> None:
    trainer = {"name": "trainer", "command": ["sh", "-c", COUNT]}
    script = {"spec": {"template": {"spec": {"containers": [trainer]}}}}
    patch = {"target": {"kind": "Job", "name": "fit"}, "patch": script}
    desk.write({"compute.nodes": 1, "kubernetes.patches": [patch]})
    if argv.startswith("logs"):
        desk.quick("submit", "run.yaml")
        desk.cluster.wait_ready("fit")
    follower = Follower(desk, *argv.split())
    follower.read(lines=20)
    (pod,) = desk.cluster.wait_ready("fit")
    # The API server ends the log that is followed within a line.
    desk.cluster.leave_kubelet(pod["spec"]["nodeName"])
    wait_asked(desk, LOG, 3)
    desk.cluster.clear_faults()
    follower.read(lines=20)
    end(desk)
    follower.end()


@pytest.mark.parametrize("argv", ["logs fit", "logs -f fit"])
def test_a_last_line_without_an_end_is_shown(desk: Desk, argv: str) -> None:
    desk.submit_script("echo first; printf 'no end'", compute__nodes=1)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    assert desk.quick(*argv.split()).stdout == "first\nno end\n"


def test_an_api_server_that_has_just_started_ends_no_follower(desk: Desk) -> None:
    """It refuses for a while what the user's Role grants; an administrator does not notice."""
    desk.submit_script(COUNT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    with_few_rights(desk)
    follower = Follower(desk, "logs", "-f", "fit")
    follower.read(lines=20)
    with desk.cluster.outage():
        pass
    follower.read(lines=20)
    end(desk)
    follower.end()


@pytest.mark.parametrize("argv", ["status fit", slow("exec fit -- true"), slow("stop fit")])
def test_a_verb_that_meets_an_api_server_that_has_just_started(desk: Desk, argv: str) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    with_few_rights(desk)
    with desk.cluster.outage():
        pass
    done = desk.quick(*argv.split())
    assert "has just started and knows no rights yet; trying again" in done.stderr
    assert "Role" not in done.stderr


def test_a_right_that_is_missing_is_told_once_the_server_is_ready(desk: Desk) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    text = desk.cluster.kubeconfig.read_text()
    account = f"token: sa:{desk.cluster.namespace}:nobody"
    desk.cluster.kubeconfig.write_text(text.replace("token: admin", account))
    with desk.cluster.outage():
        pass
    assert "nobody may not get configmaps" in desk.quick("status", "fit", code=3).stderr


def test_results_of_a_run_that_runs_are_copied_from_its_pods(desk: Desk) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    write_progress(desk)
    desk.cluster.clear_faults()
    done = desk.quick("cp", "fit", "logs")
    assert "all verified" in done.stdout
    assert done.stderr == "kubetune: logs/rank-0.log (8 bytes)\n"
    assert desk.quick("logs", "fit", "--rank", "0").stdout == "one\ntwo\n"
    assert MADE not in desk.cluster.asked()


def test_a_program_that_the_image_lacks(desk: Desk) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    done = desk.quick("exec", "fit", "--", "nosuchprogram", code=127)
    assert "there is no program nosuchprogram in this pod" in done.stderr
    assert "get nodes" not in done.stderr
    done = desk.quick("exec", "fit", "--all", "--", "/no/such/program", code=127)
    assert "there is no program /no/such/program in this pod" in done.stderr
    assert "there is no nvidia-smi in this pod" in desk.quick("gpus", "fit").stdout


def test_what_a_node_says_in_the_place_of_a_log_is_no_line_of_it(desk: Desk) -> None:
    gone = "unable to retrieve container logs for containerd://e6756593aaba"
    desk.submit_script("echo first; echo second", compute__nodes=1)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    desk.cluster.trouble(LOG, code=200, message=gone, times=1)
    done = desk.quick("logs", "-f", "fit")
    assert done.stdout in ("", "first\nsecond\n")
    assert f"says of its log: {gone}" in done.stderr
    for kept in (desk.folder / "outputs/fit/logs/pods").glob("*"):
        assert "unable" not in kept.read_text()


@pytest.mark.parametrize("verb", ["status", "cp"])
def test_a_server_that_has_not_read_the_newest_revision_is_asked_again(
    desk: Desk, verb: str
) -> None:
    """As one of several does right after a write; `cp` watches the pod that it has just made."""
    desk.submit_script("echo done", compute__nodes=1)
    write_progress(desk)
    desk.cluster.wait_condition("Job", "fit", "Complete")
    desk.cluster.lag_behind(2)
    desk.quick(verb, "fit")


def test_a_watch_that_is_ahead_of_the_server_goes_on(desk: Desk) -> None:
    desk.submit_script(COUNT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    follower = Follower(desk, "logs", "-f", "fit")
    follower.read(5)
    desk.cluster.lag_behind(2)
    follower.read(5)
    end(desk)
    follower.end()


@pytest.mark.parametrize(
    ("argv", "asked"), [("logs fit", LOG), ("exec fit -- echo text", "get pods/exec")]
)
def test_a_kubelet_that_starts_anew_costs_seconds(desk: Desk, argv: str, asked: str) -> None:
    """No other pod can answer these, so they wait for it: it refuses connections until it listens."""
    desk.submit_script("echo text; sleep 60", compute__nodes=1)
    (pod,) = desk.cluster.wait_ready("fit")
    desk.cluster.wait_log(name_of(pod), "text")
    verb, *rest = argv.split()
    desk.cluster.trouble(asked, code=500, message=REFUSED, times=2)
    done = desk.kubetune(verb, "-n", desk.cluster.namespace, *rest)
    assert desk.cluster.asked().count(asked) > 2
    assert "text" in done.stdout


@pytest.mark.parametrize("verb", ["status", slow("logs"), slow("stop")])
def test_a_server_that_knows_no_kinds_yet_hides_no_run(desk: Desk, verb: str) -> None:
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.wait_ready("fit")
    for kind in ("configmaps", "jobs", "pods"):
        for verb_of_role in ("get", "list"):
            desk.cluster.trouble(f"{verb_of_role} {kind}", code=404, message=NO_KIND, times=2)
    done = desk.quick(verb, "fit", "-n", desk.cluster.namespace)
    assert "there is no run" not in done.stderr
    assert "absent" not in done.stdout


def test_a_kind_that_each_cluster_has_is_never_missing(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else answers at that address, say."""
    monkeypatch.setattr("kubetune.k8s.api.connection.PATIENCE_SECONDS", 0.5)
    desk.submit_script(WAIT, compute__nodes=1)
    desk.cluster.trouble(".* configmaps", code=404, message="<h1>nothing here</h1>", html=True)
    for argv in (["status", "fit"], ["delete", "fit", "--yes"], ["submit", "run.yaml"]):
        done = desk.quick(*argv, "-n", desk.cluster.namespace, code=3)
        assert "a kind is not known here that each API server knows" in done.stderr
        assert "there is no run" not in done.stderr


@pytest.mark.parametrize("rights", ["all", "few"])
def test_a_lost_host_is_named_with_the_way_out(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, rights: str
) -> None:
    """Who may not read nodes is told by the pod, which is there long after it should have ended."""
    monkeypatch.setattr("kubetune.k8s.cluster.hosts._OVERDUE_SECONDS", -3600.0)
    desk.submit_script(WAIT)
    pods = desk.cluster.wait_ready("fit", pods=2)
    lost = pods[1]["spec"]["nodeName"]
    if rights == "few":
        with_few_rights(desk)
    # Kubernetes waits for five minutes before it takes the pods away.
    desk.cluster.cut_host(lost, evicts=False)
    shown = desk.quick("status", "fit").stdout
    assert f"host {lost} is lost since 20" in shown
    assert re.search(rf"{name_of(pods[1])} .* Running .* its host is lost", shown)
    desk.cluster.cut_host(lost)
    shown = desk.quick("status", "fit").stdout
    assert f"host {lost} is lost since 20" in shown
    assert f"kubectl delete node {lost}, or kubectl taint nodes {lost} node.kubernetes.io" in shown
    assert [
        host["name"]
        for host in json.loads(desk.quick("status", "fit", "--json").stdout)["lost_hosts"]
    ] == [lost]
    taint = {
        "key": "node.kubernetes.io/out-of-service",
        "value": "nodeshutdown",
        "effect": "NoExecute",
    }
    desk.cluster.request(
        "PATCH",
        f"/api/v1/nodes/{lost}",
        {"spec": {"taints": [taint]}},
        "application/merge-patch+json",
    )
    desk.cluster.wait_gone("Pod", pods[1]["metadata"]["name"])


def test_who_stops_or_deletes_a_run_hears_of_a_lost_host(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pod stays, whatever its processes do; all others save and go."""
    for name, value in (
        ("stopping.MARGIN_SECONDS", -4.0),
        ("stopping._HOSTS_SECONDS", 0.0),
        ("log_follow._LOOK_SECONDS", 0.2),
    ):
        monkeypatch.setattr(f"kubetune.k8s.cluster.{name}", value)
    script = (
        f"trap 'echo saved step 7; echo '\"'\"'{LEFT}'\"'\"' > /dev/termination-log; exit 143' TERM; "
        "echo up; while :; do sleep 0.02; done"
    )
    desk.submit_script(script, kubernetes__spread="required")
    # Node 0 is on the lost host, so the other one tells how far the run is.
    stuck, other = sorted(desk.cluster.wait_ready("fit", pods=2), key=name_of)
    lost = stuck["spec"]["nodeName"]
    desk.cluster.cut_host(lost)
    for verb in (["stop"], ["delete", "--yes"]):
        done = desk.quick(*verb, "fit", "-n", desk.cluster.namespace, code=3)
        assert f"{name_of(stuck)} did not go within 2.0 s; host {lost} is lost since" in done.stderr
        assert f"kubectl delete node {lost}" in done.stderr
        if verb == ["stop"]:
            assert "node 1: saved step 7" in done.stdout
            desk.cluster.wait_gone("Pod", name_of(other))
            shown = desk.quick("status", "fit").stdout
            assert "stopped\nwhy: host" in shown
            assert "step 7/20 · loss 2.5000 · 1,234 tokens/s · saved step 7" in shown
    desk.cluster.clear_faults()
    desk.cluster.wait_gone("Pod", name_of(stuck))


def test_a_host_that_is_cut_off_reports_nothing_until_it_is_back(desk: Desk) -> None:
    desk.submit_script(
        "until test -e /outputs/go; do sleep 0.02; done; touch /outputs/went; exit 7",
        compute__nodes=1,
    )
    (pod,) = desk.cluster.wait_ready("fit")
    desk.cluster.cut_host(pod["spec"]["nodeName"])
    outputs = desk.cluster.claim_folder("fit-outputs")
    (outputs / "go").touch()
    wait_until((outputs / "went").exists)
    (listed,) = desk.cluster.find("Pod", TRAINERS)
    assert listed["status"]["phase"] == "Running"
    desk.cluster.clear_faults()
    desk.cluster.wait_gone("Pod", name_of(pod))
