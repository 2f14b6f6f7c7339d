"""What is measured: the cases, and the trainers that each is given to. Data only; adding one is one entry here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.corpus import Corpus
from benchmarks.flops import Adapt

Home = Literal["ours", "peers", "llamafactory"]


@dataclass(frozen=True)
class Case:
    """A model, what of it is trained, on which rows, by whom."""

    name: str
    model: str
    adapt: Adapt  # what is trained
    corpus: Corpus
    trainers: tuple[str, ...]
    epochs: int = 3  # the first warms up and is not counted
    # Sequences at a time of the peers whose best batch is not looked for. kubetune gets a budget of as many times
    # `corpus.max_length` tokens.
    batch: int = 4
    sequences_per_step: int = 16
    pack_length: int = 512  # tokens of a row of peers that pack
    gpu: bool = False  # True if it wants a GPU
    # Each row has two answers to compare by DPO. It is two sequences, and counts as one of a batch.
    pairs: bool = False

    @property
    def packs_per_step(self) -> int:
        """Return how many packed rows hold about as many sequences as a step has."""
        mean = self.corpus.mean if self.corpus.sigma else self.corpus.longest
        mean += self.corpus.shared
        return max(1, round(mean * self.sequences_per_step / self.pack_length))


@dataclass(frozen=True)
class Trainer:
    """A trainer with its settings."""

    label: str  # its name in tables
    driver: str  # the module in `peers` that runs it
    home: Home  # the environment that it runs in
    settings: dict[str, Any] = field(default_factory=dict)
    beside: str = "kubetune"  # the trainer of ours that its speed is compared with

    @property
    def seeks_batch(self) -> bool:
        """True if it is a peer at its best, so that its fastest batch is looked for. A packed row is always alone."""
        return bool(self.settings.get("tuned")) and not self.settings.get("packed")


BF16 = {"model": {"dtype": "bfloat16"}, "arguments": {"gradient_checkpointing": False}}

TRAINERS: dict[str, Trainer] = {
    "kubetune": Trainer(
        "kubetune, bf16, compiled",
        "ours",
        "ours",
        {"model.dtype": "bfloat16", "training.compile": True},
    ),
    "kubetune-eager": Trainer(
        "kubetune, bf16, not compiled",
        "ours",
        "ours",
        {"model.dtype": "bfloat16", "training.compile": False},
    ),
    "kubetune-unshared": Trainer(
        "kubetune, bf16, compiled, beginnings computed for each row",
        "ours",
        "ours",
        {"model.dtype": "bfloat16", "training.compile": True, "data.share_prefixes": False},
    ),
    "kubetune-fp32": Trainer(
        "kubetune, fp32, compiled",
        "ours",
        "ours",
        {"model.dtype": "float32", "training.compile": True},
        beside="kubetune-fp32",
    ),
    "kubetune-default": Trainer("kubetune, defaults", "ours", "ours"),
    "hf-best": Trainer(
        "HF Trainer + PEFT, best stock: bf16 weights, length groups",
        "hf",
        "peers",
        {"dtype": "bfloat16", "grouped": True, "tuned": True},
    ),
    "hf-fp32": Trainer(
        "HF Trainer + PEFT, fp32 weights, length groups; beside kubetune in fp32",
        "hf",
        "peers",
        {"dtype": "float32", "grouped": True, "tuned": True},
        beside="kubetune-fp32",
    ),
    "hf-default": Trainer("HF Trainer + PEFT, defaults", "hf", "peers"),
    "trl-best": Trainer(
        "TRL, best stock: bf16 weights, no checkpointing, packing",
        "trl",
        "peers",
        {**BF16, "packed": True, "tuned": True},
    ),
    "trl-grouped": Trainer(
        "TRL, bf16 weights, no checkpointing, length groups",
        "trl",
        "peers",
        {**BF16, "grouped": True, "tuned": True},
    ),
    "trl-default": Trainer("TRL SFTTrainer, defaults", "trl", "peers"),
    "dpo-best": Trainer(
        "TRL, best stock: bf16 weights, no checkpointing, reference before training, length groups",
        "trl_dpo",
        "peers",
        {**BF16, "precomputed": True, "grouped": True, "tuned": True},
    ),
    "dpo-default": Trainer("TRL DPOTrainer, defaults", "trl_dpo", "peers"),
    "llamafactory": Trainer(
        "LLaMA-Factory, defaults with bf16",
        "llamafactory",
        "llamafactory",
        {"arguments": {"bf16": True}},
    ),
}

ALPACA = Corpus(rows=64)
ALL = tuple(name for name in TRAINERS if name != "kubetune-unshared" and not name.startswith("dpo"))
STOCK = ("kubetune", "hf-best", "hf-default", "trl-best", "trl-default")
SHARING = ("kubetune", "kubetune-unshared", "hf-best")
PAIRS = ("kubetune", "kubetune-unshared", "dpo-best", "dpo-default")
LONG_PROMPTS = Corpus(rows=8, mean=400.0, unlabelled=(0.6, 0.9))
GPU = ("kubetune", "kubetune-eager", "hf-best", "trl-best", "trl-default", "llamafactory")

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("q32k-attention", "q32k", "attention", ALPACA, ALL),
        Case("q32k-all-linear", "q32k", "all-linear", ALPACA, STOCK),
        Case("q152k-attention", "q152k", "attention", ALPACA, ("kubetune", "hf-best", "trl-default"), epochs=2),
        Case("q32k-full", "q32k", "full", ALPACA, ("kubetune", "hf-best", "hf-default")),
        Case("q32k-system", "q32k", "attention", Corpus(rows=32, shared=1000), SHARING, epochs=2, pack_length=2048),
        Case("q32k-header", "q32k", "attention", Corpus(rows=64, shared=38), SHARING, epochs=2),
        Case(
            "q32k-pairs", "q32k", "attention", Corpus(rows=24), PAIRS,
            epochs=2, batch=2, sequences_per_step=8, pairs=True,
        ),
        Case(
            # One step an epoch: the first of compiled layers is in the second, and so not in what is measured.
            "q32k-pairs-long", "q32k", "attention", LONG_PROMPTS, PAIRS,
            epochs=3, batch=2, sequences_per_step=8, pairs=True,
        ),
        Case(
            "qwen3-8b-alpaca", "qwen3-8b", "all-linear", Corpus(rows=512), GPU,
            batch=16, sequences_per_step=128, pack_length=4096, gpu=True,
        ),
        Case(
            "qwen3-8b-4096", "qwen3-8b", "all-linear", Corpus(rows=32, sigma=0.0, longest=4096, unlabelled=(0.0, 0.0)),
            ("kubetune", "hf-best", "trl-best", "trl-default"), batch=2, pack_length=4096, gpu=True,
        ),
        Case("tiny", "tiny", "attention", Corpus(rows=32, mean=60, longest=128), ALL, pack_length=128),
        Case("tiny-pairs", "tiny", "attention", Corpus(rows=32, mean=60, longest=128), PAIRS, pairs=True),
    )
}  # fmt: skip
QUICK = Case("quick-q32k-attention", "q32k", "attention", Corpus(rows=32), ALL, epochs=2)


@dataclass(frozen=True)
class Job:
    """One measurement of one trainer in processes of its own."""

    case: Case
    trainer: str
    threads: int = 1
    processes: int = 1
    repeat: int = 0
    batch: int | None = None  # sequences of a peer's micro-batch; None: the case's

    @property
    def key(self) -> dict[str, Any]:
        """Return what tells this measurement from the others in a results file."""
        return {
            "case": self.case.name,
            "trainer": self.trainer,
            "threads": self.threads,
            "processes": self.processes,
            "repeat": self.repeat,
            "batch": self.batch,
        }

    @property
    def micro_batch(self) -> int:
        """Return how many sequences a micro-batch of the peers has."""
        if self.batch is None:
            return self.case.batch
        return self.batch

    @property
    def accumulation(self) -> int:
        """Return how many micro-batches the peers take per step and rank."""
        return max(1, self.case.sequences_per_step // (self.micro_batch * self.processes))

    def settings(self) -> dict[str, Any]:
        """Return the trainer's settings."""
        settings = dict(TRAINERS[self.trainer].settings)
        if settings.get("packed"):
            # About as many sequences a step as the others have.
            settings["batch"] = 1
            settings["accumulation"] = max(1, self.case.packs_per_step // self.processes)
        return settings
