"""What was trained as an InferenceService or an LLMInferenceService of KServe, which makes the pods itself.

Pure, like `manifests` beside it. Fields are those of KServe 0.20, as are the addresses of weights (`storageUri`):

    here                                      KServe
    ORG/NAME at a revision                    hf://ORG/NAME:REVISION
    an export on the run's outputs volume     pvc://CLAIM/RUN/exports/…
    oci://…, as `kubetune push` writes it     oci+native://…
    s3://…, pvc://…, oci+native://…           the same

It gives a base and its adapters to an LLMInferenceService, and one address to an InferenceService.
"""

from __future__ import annotations

import re
from typing import Final

from kubetune.base.registry.address import SCHEME, parse
from kubetune.config.data_files import is_hub_id
from kubetune.config.vllm import options
from kubetune.errors import ConfigError
from kubetune.k8s.manifests.pod import pod_basics
from kubetune.k8s.manifests.pod_environment import secret_value
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, non_empty
from kubetune.k8s.run_names import OUTPUTS
from kubetune.plugins.serving.manifests import SERVER, Serving

INFERENCE: Final = "InferenceService"
LLM: Final = "LLMInferenceService"
KINDS: Final = (INFERENCE, LLM)
# What KServe calls the Service of an LLMInferenceService's pods, and the Secret with the certificate for it, after the
# name of the object.
WORKLOAD: Final = "-kserve-workload-svc"
CERTIFICATE: Final = "-kserve-self-signed-certs"
# Addresses that KServe takes as they are. An image can only be a base.
NATIVE_IMAGE: Final = "oci+native://"
ADDRESSES: Final = ("hf://", "s3://", "pvc://")
# The last part of the name of vLLM's images, before a tag or a digest: vllm/vllm-openai, vllm/vllm-openai-cpu.
_VLLM_IMAGE: Final = re.compile(r"(^|/)vllm-openai[\w-]*([:@]|$)")
# What a pod of KServe's has of the run file: the image brings its user and its security context.
_PLACEMENT: Final = (
    "imagePullSecrets",
    "nodeSelector",
    "affinity",
    "tolerations",
    "priorityClassName",
)


def serve(spec: RunSpec, serving: Serving, kind: str) -> list[Manifest]:
    """Return the object of this kind. Raise ConfigError for what KServe does not take."""
    if serving.scores:
        raise ConfigError(
            "--kserve: KServe's servers are started to generate, and rewards need vLLM's pooling runner; serve a reward "
            "model without --kserve. Nothing was written."
        )
    if kind == INFERENCE:
        return [_inference_service(spec, serving)]
    return [_llm_inference_service(spec, serving)]


def _inference_service(spec: RunSpec, serving: Serving) -> Manifest:
    """Return an InferenceService with KServe's Hugging Face server, which is vLLM with options of its own.

    Raise ConfigError for vLLM's own image: its program knows no `--model_name`, so no pod would ever start.
    """
    if serving.image and _VLLM_IMAGE.search(serving.image):
        raise ConfigError(
            f"--image: {serving.image} is vLLM's own server, and an {INFERENCE} gives it the options of KServe's Hugging "
            f"Face server; leave --image out, or use --kserve {LLM}. Nothing was written."
        )
    words = [f"--model_name={serving.names[0]}", *_words(serving)]
    words += options(tensor_parallel_size=serving.gpus)
    if serving.adapters:
        words += _adapters_of_hub(serving)
    model: Manifest = {
        "modelFormat": {"name": "huggingface"},
        "storageUri": address_of(spec, serving.model, serving.revision),
        "args": words,
        **_image(serving),
        **non_empty(env=_environment(spec)),
        "resources": _resources(spec, serving),
    }
    predictor: Manifest = {
        "minReplicas": serving.replicas,
        "maxReplicas": serving.most_replicas,
        **_placement(spec, serving),
        "model": model,
    }
    body = {"predictor": predictor}
    return spec.manifest("serving.kserve.io/v1beta1", INFERENCE, spec.name, SERVER, spec=body)


def _adapters_of_hub(serving: Serving) -> list[str]:
    """Return the words by which the server itself fetches adapters. Raise ConfigError for those of other places."""
    for adapter in serving.adapters:
        if not is_hub_id(adapter.path):
            raise ConfigError(
                f"--kserve: an InferenceService has one address, the one of the base, and its server fetches adapters only "
                f"from the hub; {adapter.path} is not there. Use --kserve {LLM}, push it, or serve merged weights. "
                "Nothing was written."
            )
    words = [*serving.lora_options(), "--lora-modules"]
    for adapter in serving.adapters:
        words.append(f"{adapter.name}={adapter.path}")
    return words


def _llm_inference_service(spec: RunSpec, serving: Serving) -> Manifest:
    """Return an LLMInferenceService with KServe's own route and scheduler of requests."""
    if serving.max_replicas:
        raise ConfigError(
            f"--max-replicas: an {LLM} is scaled by other means (spec.scaling, with KEDA or a variant autoscaler), which "
            "are not rendered; leave it out. Nothing was written."
        )
    model: Manifest = {
        "uri": address_of(spec, serving.model, serving.revision),
        "name": serving.names[0],
    }
    # KServe mounts or fetches each adapter, and tells vLLM the folders.
    if serving.adapters:
        adapters = []
        for adapter in serving.adapters:
            if adapter.path.startswith((SCHEME, NATIVE_IMAGE)):
                raise ConfigError(
                    f"--kserve: {adapter.path}: KServe takes adapters as hf://, s3:// or pvc://, and no images. "
                    "Nothing was written."
                )
            adapters.append({"name": adapter.name, "uri": address_of(spec, adapter.path)})
        model["lora"] = {
            "adapters": adapters,
            "maxRank": serving.lora_rank,
            "maxAdapters": len(adapters),
        }
    server: Manifest = {
        "name": "main",
        **_image(serving),
        **non_empty(args=_words(serving), env=_environment(spec)),
        "resources": _resources(spec, serving),
    }
    body: Manifest = {
        "model": model,
        "replicas": serving.replicas,
        "router": {"scheduler": {}, "route": {}, "gateway": {}},
    }
    # KServe's own command line has the number of GPUs from here; as an argument it would occur there twice.
    if serving.gpus > 1:
        body["parallelism"] = {"tensor": serving.gpus}
    body["template"] = {**_placement(spec, serving), "containers": [server]}
    return spec.manifest("serving.kserve.io/v1alpha2", LLM, spec.name, SERVER, spec=body)


def address_of(spec: RunSpec, path: str, revision: str | None = None) -> str:
    """Return a model's path as an address that KServe takes. Raise ConfigError if it takes none such."""
    if path.startswith((*ADDRESSES, NATIVE_IMAGE)):
        return path
    if path.startswith(SCHEME):
        # By the plain scheme KServe would run the image as a container, and there is no program in it.
        return NATIVE_IMAGE + parse(path).image
    if path.startswith(f"{OUTPUTS}/"):
        claim = spec.kubernetes.storage.outputs.claim
        if claim is None:
            raise ConfigError(
                f"--kserve: {path} lies on a volume without a claim, which KServe does not mount; push the export. "
                "Nothing was written."
            )
        return f"pvc://{claim}/{path.removeprefix(f'{OUTPUTS}/')}"
    # KServe's fetcher takes an owner and a name, no older id of one part such as `gpt2`.
    if is_hub_id(path) and "/" in path:
        mark = f":{revision}" if revision else ""
        return f"hf://{path}{mark}"
    raise ConfigError(
        f"--kserve: {path} is no address that KServe takes; expected ORG/NAME, s3://…, pvc://CLAIM/PATH, "
        f"{SCHEME}… or {NATIVE_IMAGE}… Nothing was written."
    )


def _words(serving: Serving) -> list[str]:
    """Return the options that both servers take."""
    return options(
        dtype=serving.dtype,
        max_model_len=serving.max_model_len,
        trust_remote_code=serving.trust_remote_code,
    )


def _image(serving: Serving) -> Manifest:
    """Return the server's image, if the user names one; KServe has its own."""
    if serving.image is None:
        return {}
    return {"image": serving.image}


def _environment(spec: RunSpec) -> list[Manifest]:
    token = spec.kubernetes.secrets.get("HF_TOKEN")
    if token is None:
        return []
    return [secret_value("HF_TOKEN", token.secret, token.key or "HF_TOKEN")]


def _resources(spec: RunSpec, serving: Serving) -> Manifest:
    gpus = {spec.kubernetes.gpu_resource: str(serving.gpus)}
    return {
        "requests": {"cpu": str(serving.cpu), "memory": serving.memory, **gpus},
        "limits": {"memory": serving.memory, **gpus},
    }


def _placement(spec: RunSpec, serving: Serving) -> Manifest:
    """Return where the pods may be, and the account by which KServe fetches weights."""
    basics = pod_basics(spec, gpus=serving.gpus)
    # The run's own account went with the run, so only one that the user has made is named.
    placement = non_empty(serviceAccountName=spec.kubernetes.service_account)
    for field in _PLACEMENT:
        if field in basics:
            placement[field] = basics[field]
    return placement


def notes(spec: RunSpec, serving: Serving, kind: str) -> list[str]:
    """Return what a person must know or do before KServe can serve it."""
    texts = []
    addresses = [serving.model, *(adapter.path for adapter in serving.adapters)]
    if any(path.startswith("s3://") or is_hub_id(path) for path in addresses):
        account = spec.kubernetes.service_account or "default"
        texts.append(
            f"KServe fetches weights with the Secrets of ServiceAccount {account}: for a private or gated model of the hub "
            "it needs one with HF_TOKEN, for s3:// one with the keys (KServe's annotations name the endpoint)"
        )
    if serving.model.startswith((SCHEME, NATIVE_IMAGE)):
        texts.append(
            "the image is mounted by Kubernetes 1.36 (1.33 with the gate ImageVolume) with containerd 2.2 or CRI-O 1.33, "
            "and has its files below /models, as `kubetune push` writes it without --modelpack"
        )
    needs = "0.20 or newer"
    if kind == LLM:
        needs += " with its LLMInferenceService controller, a Gateway, and the inference extension"
    if kind == INFERENCE and serving.image:
        texts.append(
            f"{serving.image} stands in for KServe's Hugging Face server, whose options it must take, such as --model_name"
        )
    texts.append(
        f"the cluster needs KServe {needs}; kubectl get {kind.lower()} {spec.name} says when it is ready"
    )
    return texts
