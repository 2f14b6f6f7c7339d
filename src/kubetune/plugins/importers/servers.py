"""vLLM servers that draw the answers of GRPO in other tools' files: `grpo.servers`, and the correction that goes with it.

Their servers (`trl vllm-serve`, `axolotl vllm-serve`, `swift rollout`) take weights from the trainer; ours are stock
`vllm serve` processes that load adapter files. So the addresses come near, and another program has to answer there.
"""

from __future__ import annotations

from typing import Any

from kubetune.plugins.importers.engine import (
    OFF,
    Draft,
    Outcome,
    Row,
    Table,
    carried,
    dropped,
    near,
    unneeded,
)
from kubetune.plugins.importers.readings import as_list

URLS = "grpo.servers.urls"
CORRECTION = "grpo.importance_sampling_correction"
_OTHER_PROGRAM = (
    "stock `vllm serve --enable-lora` has to answer at these addresses in place of the tool's own server, and to see the "
    "run directory (docs/grpo.md)"
)


def _use(value: Any, draft: Draft) -> Outcome:
    """Take the addresses of the servers, if there are any and `use_vllm` is on."""
    if not value:
        return OFF
    if draft.get("vllm_mode") != "server":
        return dropped(
            "the model draws its answers itself; grpo.servers names stock vLLM servers that do"
        )
    addresses = as_list(draft.get("vllm_server_base_url"))
    hosts = as_list(draft.get("vllm_server_host")) or ["localhost"]
    ports = as_list(draft.get("vllm_server_port")) or [8000] * len(hosts)
    if not addresses and len(hosts) != len(ports):
        why = f"found {len(ports)} ports of {len(hosts)} servers; expected one for each"
        draft.refuse("vllm_server_port", why)
    if not addresses:
        addresses = [f"http://{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    # A server listens at 0.0.0.0; a trainer with that address asks its own machine.
    urls = [str(url).replace("//0.0.0.0", "//localhost").rstrip("/") for url in addresses]
    return near(urls, _OTHER_PROGRAM)


def _correction(value: Any, _: Draft) -> Outcome:
    """Take how answers of the servers are corrected; ms-swift's ratio of an answer is the geometric mean."""
    return carried(str(value).replace("sequence", "geometric"))


TABLE = Table(
    same={
        "grpo.importance_sampling_clip_max":
            "vllm_importance_sampling_clip_max vllm_importance_sampling_cap rollout_importance_sampling_threshold",
        "grpo.importance_sampling_clip_min": "vllm_importance_sampling_clip_min",
    },
    rows=[
        Row("use_vllm", URLS, other=_use),
        # ms-swift's servers then draw by the weights of one set of answers before.
        Row("async_generate", "grpo.servers.lag", {True: 1, False: OFF}),
        Row("vllm_importance_sampling_correction", CORRECTION, {False: "none"}, unneeded("on, as in its mode")),
        Row("vllm_importance_sampling_mode", CORRECTION),
        Row("rollout_importance_sampling_mode", CORRECTION, other=_correction),
    ],
    unneeded={
        "vllm_mode vllm_server_base_url vllm_server_host vllm_server_port": "follows from use_vllm",
    },
)  # fmt: skip
