"""What plans foresee of large sharded models, against a step counted on ranks and tensors that do not exist.

Rank 0 of a fake world runs a forward and backward of our own code on tensors without numbers: its products, what it
gathers and reduces, and the bytes it holds are real. A value that is asked for within the step ends it with an error,
since there is none: so nothing is copied from a device to its host there. Attention's mask, which on a CPU is asked
about numbers, is held to the same in tests/run/test_padding_free.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.masking_utils import AttentionMaskInterface

from kubetune.batching.batch import Batch, collate
from kubetune.config.load import load_config
from kubetune.config.schema import LoraConfig
from kubetune.kernels import cross_entropy
from kubetune.kernels.pointwise import Kernels
from kubetune.models import fsdp
from kubetune.models.adapters import shared_input
from kubetune.models.adapters.lora import add_lora
from kubetune.models.attention_hooks import MaskRule
from kubetune.models.fused_forwards import swap_forwards
from kubetune.models.learner import Learner
from kubetune.models.padding_free import Route, set_attention, unwrap
from kubetune.plan.flops import planned_cost
from kubetune.plan.forecast import forecast
from kubetune.plan.linears import Trainable, linears
from kubetune.plan.memory import chunk_rows
from kubetune.plan.model_shapes import Weights
from kubetune.plan.plan import make_plan
from kubetune.plan.rank_work import RankWork
from kubetune.tasks import causal_lm
from kubetune.training.optimizer.adam_step import AdamSettings
from kubetune.training.optimizer.adamw import FlatAdamW
from tests.ranks import run_ranks

LLAMA = {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False}
SHAPES: dict[str, Any] = {
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, num_hidden_layers=32, intermediate_size=14_336, num_attention_heads=32, **LLAMA
    ),
    "Qwen3-32B": Qwen3Config(
        hidden_size=5120, num_hidden_layers=64, intermediate_size=25_600, num_attention_heads=64, head_dim=128,
        num_key_value_heads=8, vocab_size=151_936, tie_word_embeddings=False,
    ),
    "Llama-3.1-70B": LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, intermediate_size=28_672, num_attention_heads=64, **LLAMA
    ),
}  # fmt: skip
LENGTHS = (128, 64, 128, 192)
SHALLOW = 2


class Operations(TorchDispatchMode):
    """Calls by the name of the operation, and the bytes that collectives give."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            input_bytes = max(
                sum(
                    t.numel() * t.element_size()
                    for t in torch.utils._pytree.tree_leaves(arg)
                    if isinstance(t, Tensor)
                )
                for arg in args
            )
            self.bytes[name] += input_bytes
        if not func.is_view:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def counted(_: Any, name: str, layers: int, ranks: int, lora: bool) -> dict[str, Any]:
    """Return the counts of one micro-batch on rank 0 of so many, in a process of its own."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    config = type(SHAPES[name])(
        **{**SHAPES[name].to_dict(), "num_hidden_layers": layers, "layer_types": None}
    )
    half = MixedPrecisionPolicy(
        torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if lora else torch.float32
        )
    fsdp.cut(model, MixedPrecisionPolicy(cast_forward_inputs=False) if lora else half)
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    parameters = {n: tuple(p.shape) for n, p in model.named_parameters()}
    if lora:
        model = add_lora(model, LoraConfig(r=16), task_type="CAUSAL_LM", seed=0)
    set_attention(unwrap(model), "padding_free")
    # What is asked about masks reads numbers, of which there are none here.
    AttentionMaskInterface.register("padding_free", lambda **_: MaskRule(0))
    # On a CPU logits lie in memory of their own, which is real.
    cross_entropy._room = lambda number, like, rows, width, dtype: like.new_empty(
        rows, width, dtype=dtype
    )
    cross_entropy.STRIPE = 2**40  # all of the head's gradient at once: no caches here
    batch = collate(
        [(np.arange(length, dtype=np.uint32) + 3, np.ones(length, bool)) for length in LENGTHS]
    )
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    operations = Operations()
    with fake:
        model.to_empty(device="cpu")
        swap_forwards(model, None, ExitStack())
        learner = Learner(model, Route(True), kernels=Kernels())
        flop_registry[torch.ops.aten.addmm_] = flop_registry[
            torch.ops.aten.addmm
        ]  # which torch does not count
        with FlopCounterMode(display=False) as flops, operations:
            causal_lm.TASK.backward(learner, _faked(batch, fake), 1.0)
    flops_of = {
        str(op).split(".")[-1]: count for op, count in flops.get_flop_counts()["Global"].items()
    }
    dist.destroy_process_group()
    return {
        "flops": flops_of,
        "bytes": operations.bytes,
        "calls": operations.calls,
        "held": held,
        "shapes": parameters,
    }


def _faked(batch: Batch, fake: FakeTensorMode) -> Batch:
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    return dataclasses.replace(
        batch, **{n: fake.from_tensor(t) for n, t in tensors.items() if isinstance(t, Tensor)}
    )


def require_as_planned(folder: Path, name: str, layers: int, ranks: int, lora: bool) -> None:
    (counts,) = run_ranks(counted, 1, name, layers, ranks, lora)
    facts = {**SHAPES[name].to_dict(), "num_hidden_layers": layers}
    weights = Weights(counts["shapes"], facts, stated=True)
    flags = {"model.path": "m", "data.train": str(folder / "rows.jsonl"), "data.max_length": 512,
             "training.parallelism": "fsdp", "model.dtype": "bfloat16",
             **({"lora.r": 16, "lora.target_modules": "all-linear"} if lora else {})}  # fmt: skip
    (folder / "rows.jsonl").touch()
    config = load_config(None, flags=flags)
    tokens = sum(LENGTHS)
    labels = sum(length - 1 for length in LENGTHS)
    cost = planned_cost(Trainable(config.lora, config.sight), weights, has_vocabulary=True)
    assert cost is not None
    products = sum(
        counts["flops"][name] for name in ("mm", "addmm", "addmm_") if name in counts["flops"]
    )
    assert products == pytest.approx(cost.of(tokens, 0, labels), rel=0.05)
    element = 2
    sizes = [a * b for _, a, b in linears(weights)]
    around = weights.parameters - sum(sizes)
    # Each layer is gathered for the forward and again for the backward; what lies around them once.
    gathered = element * (2 * sum(sizes) + around)
    assert counts["bytes"]["_allgather_base_"] == pytest.approx(gathered, rel=0.05)
    assert counts["calls"]["_allgather_base_"] == 2 * layers + 1
    if lora:  # adapters are whole, and reduced by the optimizer once a step
        assert "_reduce_scatter_base_" not in counts["calls"]
    else:
        assert counts["bytes"]["_reduce_scatter_base_"] == pytest.approx(
            4 * weights.parameters, rel=0.05
        )
        assert counts["calls"]["_reduce_scatter_base_"] == layers + 1
    plan = make_plan(config, 100, world_size=ranks, device="cuda")
    ahead = forecast(RankWork.of(config, plan), weights, 80 << 30)
    assert ahead is not None
    held = ahead.parts["weights"] if lora else ahead.parts["trained weights, in fp32"]
    assert counts["held"] == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize(
    ("name", "ranks", "lora"),
    [
        pytest.param("Llama-3.1-8B", 8, True, marks=pytest.mark.slow),
        ("Llama-3.1-70B", 64, False),
    ],
    ids=["lora", "full"],
)
def test_a_sharded_step_computes_gathers_and_holds_what_is_planned(
    tmp_path: Path, name: str, ranks: int, lora: bool
) -> None:
    """Of two layers, in which all counts are linear."""
    require_as_planned(tmp_path, name, SHALLOW, ranks, lora)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_a_whole_model_does_too(tmp_path: Path, name: str, ranks: int, lora: bool) -> None:
    require_as_planned(tmp_path, name, SHAPES[name].num_hidden_layers, ranks, lora)


def test_a_layer_with_lora_launches_little() -> None:
    """Operations of one layer's forward and backward: the third's, counted as what it adds to two.

    The frozen products are 7 forward and 7 backward. Around them, with the seven adapters sharing what inputs they
    share: 4 + 7 products forward, 7 + 4 to the gradients of inputs, 4 + 7 to their own, each added to the optimizer's
    sums at once. Nothing of the adapters is cast: that is left to norms.
    """
    deep, shallow = (_launched(layers) for layers in (3, 2))
    layer = {name: deep[name] - shallow[name] for name in deep if deep[name] != shallow[name]}
    assert {name: layer[name] for name in ("mm", "addmm_", "add_", "_to_copy")} == {
        "mm": 33, "addmm_": 14, "add_": 18, "_to_copy": 18
    }  # fmt: skip
    assert sum(layer.values()) < 260


def _launched(layers: int) -> Counter[str]:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, intermediate_size=48,
    )  # fmt: skip
    model = add_lora(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), LoraConfig(r=4),
                     task_type="CAUSAL_LM", seed=0)  # fmt: skip
    set_attention(unwrap(model), "padding_free")
    swap_forwards(model, None, ExitStack())
    optimizer = FlatAdamW(model.named_parameters(), AdamSettings())
    optimizer.mirror(shared_input.copies(model, optimizer.collected))
    batch = collate(
        [(np.arange(length, dtype=np.uint32) + 3, np.ones(length, bool)) for length in (5, 8)]
    )
    with Operations() as operations:
        causal_lm.TASK.backward(
            Learner(model, Route(True), gradient_sums=optimizer.collected), batch, 1.0
        )
    return operations.calls


def test_a_gpu_scores_as_many_rows_at_once_as_keep_it_busy() -> None:
    assert chunk_rows(151_936) == 220
    assert chunk_rows(151_936, 80 << 30) == 1024
    assert chunk_rows(151_936, 24 << 30) == 512
    assert chunk_rows(32_000) == chunk_rows(32_000, 4 << 30) == 512
    assert chunk_rows(256_000, 8 << 30) == 131


if __name__ == "__main__":
    print(
        json.dumps(
            counted(None, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "lora")
        )
    )
