"""vLLM servers that draw the answers of GRPO in other tools' files: `grpo.servers`, and the correction that goes with it.

Their servers (`trl vllm-serve`, `axolotl vllm-serve`, `swift rollout`) take weights from the trainer; ours are stock
`vllm serve` processes that load adapter files. So the addresses come near, and another program has to answer there.
"""

from __future__ import annotations

from kubetune.plugins.importers.engine import Draft, as_list, near

_URLS = "grpo.servers.urls"
_CORRECTION = "grpo.importance_sampling_correction"
_LIMITS = {
    "vllm_importance_sampling_clip_max": "grpo.importance_sampling_clip_max",
    "vllm_importance_sampling_cap": "grpo.importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "grpo.importance_sampling_clip_min",
}
_OTHER_PROGRAM = (
    "stock `vllm serve --enable-lora` has to answer there in place of the tool's own server, and to see the run directory "
    "(docs/grpo.md)"
)


def take(draft: Draft) -> None:
    """Take the addresses of servers, and how answers that they draw are corrected, where servers are on."""
    if not draft.get("use_vllm") or draft.get("vllm_mode") != "server":
        return
    key, addresses = _addresses(draft)
    if any("$" in address for address in addresses):
        draft.drop(
            key, "holds a variable that the file does not set; put addresses into grpo.servers.urls"
        )
        return
    why = "follows from grpo.servers.urls"
    draft.ignore(why, "use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port")
    draft.write(key, near(addresses, _OTHER_PROGRAM), _URLS)
    # ms-swift's servers then draw by the weights of one set of answers before.
    if draft.take("async_generate"):
        draft.carry("async_generate", "grpo.servers.lag", 1)
    if draft.tool.name == "ms-swift":
        _correction_of_swift(draft)
    else:
        _correction_of_trl(draft)


def _addresses(draft: Draft) -> tuple[str, list[str]]:
    """Return the addresses of the servers, and the key that names them."""
    key = "vllm_server_base_url"
    addresses = as_list(draft.get(key))
    if not addresses:
        key = "vllm_mode" if draft.get("vllm_server_host") is None else "vllm_server_host"
        hosts = as_list(draft.get("vllm_server_host")) or ["localhost"]
        ports = as_list(draft.get("vllm_server_port")) or [8000] * len(hosts)
        if len(hosts) != len(ports):
            draft.refuse(
                "vllm_server_port",
                f"found {len(ports)} ports of {len(hosts)} servers; expected one for each",
            )
        for host, port in zip(hosts, ports, strict=True):
            addresses.append(f"http://{host}:{port}")
    # A server listens at 0.0.0.0; a trainer that is told so asks its own machine.
    return key, [
        str(address).replace("//0.0.0.0", "//localhost").rstrip("/") for address in addresses
    ]


def _correction_of_trl(draft: Draft) -> None:
    """Take TRL's correction, which is on by default."""
    switch = "vllm_importance_sampling_correction"
    mode = "vllm_importance_sampling_mode"
    if draft.take(switch) is False:
        draft.carry(switch, _CORRECTION, "none")
        draft.ignore(f"{switch} is off", mode, *_LIMITS)
        return
    draft.ignore(f"follows from {_CORRECTION}", switch)
    if draft.take(mode) is not None:
        draft.carry(mode, _CORRECTION, draft.get(mode))
    draft.assume(_CORRECTION, "sequence_mask", "TRL's default")
    for key, path in _LIMITS.items():
        if draft.take(key) is not None:
            draft.carry(key, path, draft.get(key))


def _correction_of_swift(draft: Draft) -> None:
    """Take ms-swift's correction, which is off by default; its ratio of an answer is the geometric mean."""
    mode_key = "rollout_importance_sampling_mode"
    limit_key = "rollout_importance_sampling_threshold"
    mode = draft.take(mode_key)
    if mode is None:
        draft.assume(_CORRECTION, "none")
        draft.ignore(f"{mode_key} is not set", limit_key)
        return
    draft.carry(mode_key, _CORRECTION, str(mode).replace("sequence", "geometric"))
    limit = draft.take(limit_key)
    if limit is None:
        draft.assume("grpo.importance_sampling_clip_max", 2.0)
    else:
        draft.carry(limit_key, "grpo.importance_sampling_clip_max", limit)


def withdraw_unusable(draft: Draft) -> None:
    """Take servers out again that could not load what is trained."""
    if not draft.has(_URLS):
        return
    why = ""
    if not draft.has("lora"):
        why = "stock vLLM servers take adapters, and no new weights of a whole model; set lora, or the model draws itself"
    for name in ("use_dora", "modules_to_save", "target_parameters"):
        if not why and draft.ours(f"lora.{name}"):
            why = f"vLLM takes no adapter with lora.{name}; the model draws its answers itself"
    if not why:
        return
    draft.withdraw(_URLS, why)
    draft.withdraw("grpo.servers.lag", why)
    for path in (_CORRECTION, *_LIMITS.values()):
        draft.withdraw(
            path, "the model draws its answers itself, so there is nothing to correct", "unneeded"
        )
