"""The pods with vLLM beside the trainer's: they draw the answers of `task: grpo`, or are the teacher of `task: distill`.

Both groups start, stop and end together. They share the outputs volume, on which the trainer writes its adapters. Two
nodes that train and two that draw:

    kind      the trainer                      vLLM                                 its address
    jobset    fit-node-0-0    fit-node-0-1     fit-sampler-0-0  fit-sampler-0-1     fit-sampler-0-1.fit:8000
    job       fit-0           fit-1            fit-sampler-0    fit-sampler-1       fit-sampler-1.fit-sampler:8000

A JobSet has ended when the trainer has, and deletes its other pods then. Beside a Job the servers are a second Job. It
is no Deployment: that never ends, so its pods would hold their GPUs after the run, and they have no names to ask each of
them by.
"""

from __future__ import annotations

from kubetune import errors
from kubetune.config.schema import DistillConfig, GrpoConfig, LoraConfig, ModelConfig
from kubetune.config.schema.compute import SamplersConfig
from kubetune.config.vllm import lora_rank, options
from kubetune.k8s.manifests.kinds.services import headless_service
from kubetune.k8s.manifests.pod import container, pod_basics, pod_metadata
from kubetune.k8s.manifests.pod_environment import RUN_NAME, environment, field, value
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec
from kubetune.k8s.manifests.storage import volume_mounts, volumes
from kubetune.k8s.run_names import CACHE
from kubetune.rundir.exit_status import EXIT

SAMPLER = "sampler"
SAMPLER_PORT = 8000

# The variable by which the trainer learns the addresses of the servers.
ADDRESSES = "KUBETUNE_SAMPLERS"

# The most that a Job may take. Kubernetes counts every pod that `stop` ends as a failed one.
_MOST_STARTS = 2**31 - 1

# The name of the Job and of the Service of the servers, on the trainer's pods: kustomize changes it with the objects'.
GROUP = "kubetune/samplers"
_GROUP_VARIABLE = "KUBETUNE_SAMPLER_GROUP"

# A run that failed begins again within this time, if ever: Kubernetes waits ten minutes at most.
_SECONDS_FOR_ANOTHER_START = 3600
_LOOK_SECONDS = 2


def _keep_serving() -> str:
    """Return the shell script around `vllm serve`: `sh -c SCRIPT EXIT_JSON vllm serve …`.

    vLLM ends with 0 also when it is asked to stop, or its engine has died. To a Job that is a server that has done its
    work, which is never started again, so `resume` would bring no servers back. Here 0 means that the run has ended:

        exit.json of the run                          the server
        none: it trains                               serves
        143 or 145: another start follows             serves
        0, 2, 4, 5 or 6: none follows                 ends with 0
        another: another start may follow             ends with 0 after an hour without one
        what lay there as this pod began              ends with 0 after an hour without another start

    The last may be of an earlier start, if the trainer's pod is still to come, or of this one, if it has gone already.
    """
    follows = _codes(errors.PREEMPTED, errors.LOST_PEER)
    final = _codes(errors.OK, *errors.FINAL)
    return f"""\
server=
end() {{ test -z "$server" || {{ kill "$server"; wait "$server"; }}; exit "$1"; }}
trap 'end {errors.PREEMPTED}' TERM
test -e /tmp/exit-before || cat "$0" > /tmp/exit-before 2> /dev/null
before=$(cat /tmp/exit-before)
"$@" &
server=$!
waited=0
while kill -0 "$server"; do
  sleep {_LOOK_SECONDS} & wait $!
  now=$(cat "$0")
  case $now in
    "") waited=0 ;;
    {follows}) ;;
    {final}) test "$now" = "$before" || end 0; waited=$((waited + {_LOOK_SECONDS})) ;;
    *) waited=$((waited + {_LOOK_SECONDS})) ;;
  esac
  test $waited -lt {_SECONDS_FOR_ANOTHER_START} || end 0
done 2> /dev/null
wait "$server"
code=$?
test $code -ne 0 || code=1
exit $code
"""


def _codes(*codes: int) -> str:
    """Return the pattern of the shell for exit.json with one of these codes: `*'"code": 143,'* | …`."""
    return " | ".join(f"""*'"code": {code},'*""" for code in codes)


def addresses_in_jobset(spec: RunSpec) -> list[Manifest]:
    """Return the variable with the addresses of the servers of a JobSet; none where the run has no such pods."""
    samplers = spec.kubernetes.samplers
    if samplers is None:
        return []
    # The label of the run, so that a name which kustomize changes is followed.
    return [_addresses(samplers, f"{RUN_NAME}-{SAMPLER}-0", RUN_NAME)]


def addresses_beside_job(spec: RunSpec) -> list[Manifest]:
    """Return the same for servers that are a Job of their own."""
    samplers = spec.kubernetes.samplers
    if samplers is None:
        return []
    group = f"$({_GROUP_VARIABLE})"
    return [
        field(_GROUP_VARIABLE, f"metadata.annotations['{GROUP}']"),
        _addresses(samplers, group, group),
    ]


def _addresses(samplers: SamplersConfig, host: str, domain: str) -> Manifest:
    """Return the variable with the addresses of servers whose pods are called `HOST-INDEX.DOMAIN`."""
    urls = []
    for index in range(samplers.replicas):
        urls.append(f"http://{host}-{index}.{domain}:{SAMPLER_PORT}")
    return value(ADDRESSES, " ".join(urls))


def sampler_template(spec: RunSpec, samplers: SamplersConfig) -> Manifest:
    """Return the template of the pod of a server."""
    return {"metadata": pod_metadata(spec, SAMPLER), "spec": _pod(spec, samplers)}


def sampler_job(samplers: SamplersConfig, template: Manifest) -> Manifest:
    """Return the spec of the Job with one index for each server."""
    return {
        "completionMode": "Indexed",
        "completions": samplers.replicas,
        "parallelism": samplers.replicas,
        "backoffLimit": _MOST_STARTS,
        # Never two pods at one address.
        "podReplacementPolicy": "Failed",
        "template": template,
    }


def samplers_name(run: str) -> str:
    """Return the name of the Job and of the Service of the servers, beside a run that is a Job."""
    return f"{run}-{SAMPLER}"


def samplers_beside_job(
    spec: RunSpec, samplers: SamplersConfig, template: Manifest
) -> list[Manifest]:
    """Return the Service by which each server has an address, and the Job of the servers."""
    name = samplers_name(spec.name)
    template["spec"]["subdomain"] = name
    body = sampler_job(samplers, template)
    k = spec.kubernetes
    if k.max_runtime_seconds is not None:
        body["activeDeadlineSeconds"] = k.max_runtime_seconds
    if k.ttl_seconds is not None:
        body["ttlSecondsAfterFinished"] = k.ttl_seconds
    service = headless_service(spec, name, SAMPLER, "http", SAMPLER_PORT)
    return [service, spec.manifest("batch/v1", "Job", name, SAMPLER, spec=body)]


def command(spec: RunSpec, samplers: SamplersConfig) -> list[str]:
    """Return the command line of a server."""
    config = spec.config
    if config.task == "distill":
        path, words = _teaching(config.distill, config.longest_row)
    else:
        assert config.lora is not None, "the config's validators see to it"
        path = spec.mounted_base or spec.model.path
        words = _drawing(spec.model, config.lora, config.data.max_length, config.grpo)
    words += options(tensor_parallel_size=samplers.gpus)
    return ["vllm", "serve", path, "--host=0.0.0.0", f"--port={SAMPLER_PORT}", *words]


def _drawing(
    model: ModelConfig, lora: LoraConfig, longest_prompt: int, grpo: GrpoConfig
) -> list[str]:
    """Return the options of a server that draws, which has to hold all adapters that the run loads."""
    # Without it log-probabilities would be those before the temperature.
    is_changed = grpo.temperature != 1.0
    return options(
        enable_lora=True,
        max_lora_rank=lora_rank(lora.r),
        max_loras=2,
        max_model_len=longest_prompt + grpo.max_completion_length,
        revision=model.revision,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        logprobs_mode="processed_logprobs" if is_changed else None,
    )


def _teaching(distill: DistillConfig, longest_row: int) -> tuple[str, list[str]]:
    """Return model and options of a server that is the teacher."""
    assert distill.model is not None, "the config's validators see to it"
    # With a token that is drawn behind each row. A prompt of its own may be longer, by nobody knows how much.
    has_own_prompt = distill.teacher_prompt is not None
    return distill.model, options(
        max_logprobs=distill.top_k,
        enable_scale_out=distill.support == "student_k",
        max_model_len=None if has_own_prompt else longest_row + 1,
        revision=distill.revision,
    )


def _pod(spec: RunSpec, samplers: SamplersConfig) -> Manifest:
    """Return the spec of a pod with a server."""
    gpus = {}
    if samplers.gpus:
        gpus[spec.kubernetes.gpu_resource] = str(samplers.gpus)
    server = container(
        spec,
        SAMPLER,
        ["sh", "-c", _keep_serving(), f"{spec.run_dir}/{EXIT}"],
        args=command(spec, samplers),
        image=samplers.image,
        env=_environment(spec),
        ports=[{"name": "http", "protocol": "TCP", "containerPort": SAMPLER_PORT}],
        readinessProbe={"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5},
        resources={
            "requests": {"cpu": str(samplers.cpu), "memory": samplers.memory, **gpus},
            "limits": {"memory": samplers.memory, **gpus},
        },
        volumeMounts=volume_mounts(spec),
    )
    return {
        # A server that ends is started again, and the trainer gives it the adapter again.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 30,
        **pod_basics(spec, gpus=samplers.gpus),
        "containers": [server],
        "volumes": volumes(spec),
    }


def _environment(spec: RunSpec) -> list[Manifest]:
    """Return the variables of a server."""
    variables = {entry["name"]: entry for entry in environment(spec)}
    config = spec.config
    ours = []
    if config.task == "grpo":
        ours.append(value("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True"))
    ours.append(value("VLLM_CACHE_ROOT", f"{CACHE}/vllm"))
    ours.append(value("VLLM_NO_USAGE_STATS", "1"))
    if config.task == "distill" and config.distill.support == "student_k":
        # Only this runner scores tokens that are asked for.
        ours.append(value("VLLM_USE_V2_MODEL_RUNNER", "1"))
    # A teacher is fetched by its own server.
    if spec.offline and config.task == "grpo":
        ours.append(value("HF_HUB_OFFLINE", 1))
    for entry in ours:
        variables.setdefault(entry["name"], entry)
    return list(variables.values())
