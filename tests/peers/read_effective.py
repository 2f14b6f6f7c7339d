"""Records what other tools make of keys that act on each other, for tests/peers/effective.json.

    pip install axolotl==0.19.0    (or llamafactory, ms-swift, or trl with transformers==5.6.0; each by itself)
    python -m tests.peers.read_effective axolotl

The tool's own argument classes read each of the settings below, as its command does, and transformers and PEFT compute
the rest: learning rates by `get_scheduler`, modules by `get_peft_model` on a small Qwen2. Needs no GPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("effective.json")
STEPS = 40  # optimizer steps of each run
SHOWN = 12  # steps whose learning rate is kept
NO = object()  # the key is left out

Settings = dict[str, Any]
Grid = dict[str, tuple[Any, ...]]


def pairs(grid: Grid) -> Iterator[Settings]:
    """Yield each combination of a grid's values."""
    for values in itertools.product(*grid.values()):
        yield {key: value for key, value in zip(grid, values, strict=True) if value is not NO}


def tiny_model(folder: Path) -> Path:
    """Write the config of a small Qwen2, and return its folder."""
    from transformers import Qwen2Config

    Qwen2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        architectures=["Qwen2ForCausalLM"],
    ).save_pretrained(folder)
    return folder


def build_model() -> Any:
    """Return the small Qwen2 with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(os.environ["TINY_MODEL"]))


def rates(scheduler: str, warmup_steps: int, extra: Any = None) -> list[float]:
    """Return the learning rates of the first steps, as shares of the highest."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(scheduler, optimizer, warmup_steps, STEPS, extra or None)
    learned = []
    for _ in range(SHOWN):
        learned.append(round(optimizer.param_groups[0]["lr"], 6))
        optimizer.step()
        schedule.step()
    return learned


def adapters(peft_config: Any) -> Settings:
    """Return the names of the modules that get adapters, and what scales them."""
    from peft import get_peft_model

    model = get_peft_model(build_model(), peft_config)
    names = set()
    scale = 0.0
    rank = 0
    for name, module in model.named_modules():
        if getattr(module, "lora_A", None) or getattr(module, "lora_embedding_A", None):
            names.add(name.split(".")[-1])
            scale = float(module.scaling["default"])
            rank = module.r["default"]
    return {
        "modules": sorted(names),
        "r": rank,
        "scale": round(scale, 6),
        "dropout": float(peft_config.lora_dropout),
    }


def of_arguments(arguments: Any) -> Settings:
    """Return what Hugging Face's TrainingArguments come to."""
    return {
        "samples": arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps,
        "max_steps": arguments.max_steps if arguments.max_steps > 0 else None,
        "epochs": arguments.num_train_epochs,
        "learning_rate": arguments.learning_rate,
        "weight_decay": arguments.weight_decay,
        "beta2": arguments.adam_beta2,
        "max_grad_norm": arguments.max_grad_norm,
        "save": interval(arguments.save_strategy, arguments.save_steps),
        "eval": interval(arguments.eval_strategy, arguments.eval_steps),
    }


def bits(asked: int | None, has_adapters: bool) -> Settings:
    """Return the bits of the base. Raises ValueError where it would be trained itself, as Trainer does."""
    if asked and not has_adapters:
        raise ValueError("You cannot perform fine-tuning on purely quantized models")
    return {"bits": asked, "adapters": has_adapters}


def interval(strategy: Any, steps: Any) -> Any:
    """Return the steps between two events, `epoch`, or `no`."""
    name = getattr(strategy, "value", strategy)
    return steps if name == "steps" else name


def warm_up_of(arguments: Any) -> list[float]:
    """Return the learning rates that TrainingArguments lead to."""
    name = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    return rates(name, arguments.get_warmup_steps(STEPS), arguments.lr_scheduler_kwargs)


SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts", NO)
RUN: Grid = {"num_train_epochs": (NO, 2), "max_steps": (NO, -1, 40)}
BATCH: Grid = {
    "per_device_train_batch_size": (NO, 2),
    "gradient_accumulation_steps": (NO, 1, 4),
}
SAVING: Grid = {"save_strategy": (NO, "no", "steps", "epoch"), "save_steps": (NO, 7)}
NUMBERS: Grid = {
    "weight_decay": (NO, 0.0, 0.1),
    "adam_beta2": (NO, 0.9),
    "max_grad_norm": (NO, 0.0),
}
WARM_UP: Grid = {
    "lr_scheduler_type": SCHEDULES,
    "warmup_steps": (NO, 0, 5, 0.25),
    "warmup_ratio": (NO, 0.0, 0.1),
}


def _llama_factory(settings: Settings, topic: str) -> Settings:
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29779"
    )
    from llamafactory.hparams.parser import get_train_args

    output = tempfile.mkdtemp()
    fixed = {"do_train": True, "output_dir": output, "use_cpu": True, "report_to": "none"}
    model, data, arguments, tuning, _ = get_train_args({**settings, **fixed, "template": "qwen"})
    if topic == "bits":
        return bits(model.quantization_bit, tuning.finetuning_type != "full")
    if topic == "rates":
        return {"rates": warm_up_of(arguments)}
    if topic == "adapters":
        return {"adapters": _adapters_of_llama_factory(model, tuning)}
    if topic == "preference":
        return {
            "loss": tuning.pref_loss,
            "beta": tuning.pref_beta,
            "label_smoothing": tuning.dpo_label_smoothing,
            "sft_weight": tuning.pref_ftx,
            "gamma": tuning.simpo_gamma if tuning.pref_loss == "simpo" else None,
        }
    if topic == "data":
        return {"packing": data.packing, "max_length": data.cutoff_len, "held_out": data.val_size}
    return of_arguments(arguments)


def _adapters_of_llama_factory(model_args: Any, tuning: Any) -> Settings | None:
    if tuning.finetuning_type == "full":
        return None
    import peft
    from llamafactory.model import adapter

    seen: list[Any] = []
    real = peft.get_peft_model

    def keep(model: Any, config: Any) -> Any:
        seen.append(config)
        return real(model, config)

    adapter.get_peft_model = keep
    model = build_model()
    adapter._setup_lora_tuning(model.config, model, model_args, tuning, True, False)
    return adapters(seen[0])


def _trl(settings: Settings, topic: str) -> Settings:
    from trl import DPOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser, get_peft_config

    kind = DPOConfig if topic == "preference" else SFTConfig
    parser = TrlParser((ScriptArguments, kind, ModelConfig))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(json.dumps({**settings, "use_cpu": True, "report_to": "none"}))
        _, arguments, model = parser.parse_args_and_config(["--config", str(file)])
    if topic == "bits":
        return bits(4 if model.load_in_4bit else 8 if model.load_in_8bit else None, model.use_peft)
    if topic == "rates":
        return {"rates": warm_up_of(arguments)}
    if topic == "adapters":
        config = get_peft_config(model)
        return {"adapters": None if config is None else adapters(config)}
    if topic == "preference":
        losses = arguments.loss_type
        return {
            "loss": losses if isinstance(losses, str) else ",".join(losses),
            "beta": arguments.beta,
            "label_smoothing": arguments.label_smoothing,
        }
    if topic == "data":
        return {"packing": arguments.packing, "max_length": arguments.max_length}
    return of_arguments(arguments)


def _ms_swift(settings: Settings, topic: str) -> Settings:
    from swift.arguments import RLHFArguments, SftArguments

    kind = RLHFArguments if topic == "preference" else SftArguments
    fixed = {"model_type": "qwen2", "template": "qwen2_5", "use_cpu": True, "report_to": ["none"]}
    read = kind(**settings, **fixed, output_dir=tempfile.mkdtemp())
    arguments = read.training_args
    if topic == "bits":
        made = read.get_quantization_config()
        four_or_eight = (4 if made.load_in_4bit else 8) if made is not None else None
        return bits(four_or_eight, read.tuner_type != "full")
    if topic == "rates":
        return {"rates": warm_up_of(arguments)}
    if topic == "adapters":
        return {"adapters": _adapters_of_swift(read)}
    if topic == "preference":
        loss = read.loss_type if read.rlhf_type in ("dpo", "cpo") else read.rlhf_type
        return {
            # ms-swift makes CPO with another loss of SimPO.
            "loss": "cpo" if (read.rlhf_type, read.loss_type) == ("cpo", "sigmoid") else loss,
            "beta": read.beta,
            "label_smoothing": read.label_smoothing,
            "sft_weight": read.rpo_alpha if read.rlhf_type == "dpo" else read.cpo_alpha,
            "gamma": read.simpo_gamma if loss == "simpo" else None,
        }
    if topic == "data":
        return {
            "packing": read.packing,
            "max_length": read.max_length,
            "held_out": read.split_dataset_ratio,
            "overlong": read.truncation_strategy,
            "chat_template": read.use_chat_template,
        }
    return of_arguments(arguments)


def _adapters_of_swift(read: Any) -> Settings | None:
    if read.tuner_type == "full":
        return None
    from peft import LoraConfig
    from swift.pipelines.train.tuner import get_target_modules

    model = build_model()
    model.model_meta, model.model_info = read.model_meta, read.model_info
    return adapters(
        LoraConfig(
            r=read.lora_rank,
            lora_alpha=read.lora_alpha,
            lora_dropout=read.lora_dropout,
            use_rslora=read.use_rslora,
            target_modules=get_target_modules(read, model),
        )
    )


def _axolotl(settings: Settings, topic: str) -> Settings:
    from axolotl.core.builders.base import TrainerBuilderBase
    from axolotl.loaders.adapter import _build_peft_lora_config
    from axolotl.utils.config import normalize_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.schemas.config import AxolotlInputConfig

    read = AxolotlInputConfig(**settings)
    config = DictDefault(read.model_dump(exclude_none=True))
    normalize_config(config)
    builder: Any = type("Builder", (), {"cfg": config, "eval_dataset": None})()
    made: Settings = {}
    if topic == "bits":
        from axolotl.loaders.model import ModelLoader

        loader: Any = type(
            "Loader", (), {"cfg": config, "model_config": None, "model_kwargs": {}}
        )()
        ModelLoader._set_quantization_config(loader)
        made_of_bits = loader.model_kwargs.get("quantization_config")
        asked = (4 if made_of_bits.load_in_4bit else 8) if made_of_bits is not None else None
        return bits(asked, bool(config.adapter))
    if topic == "rates":
        TrainerBuilderBase._configure_warmup_and_logging(builder, STEPS, made)
        TrainerBuilderBase._configure_scheduler(builder, made)
        return {"rates": rates(made["lr_scheduler_type"], made["warmup_steps"])}
    if topic == "adapters":
        if not config.adapter:
            return {"adapters": None}
        return {"adapters": adapters(_build_peft_lora_config(build_model(), config))}
    if topic == "data":
        return {
            "packing": bool(config.sample_packing),
            "max_length": config.sequence_len,
            "held_out": config.val_set_size or 0,
            "overlong": config.excess_length_strategy or "drop",
        }
    TrainerBuilderBase._configure_save_and_eval_strategy(builder, made)
    return {
        "samples": config.micro_batch_size * config.gradient_accumulation_steps,
        "max_steps": config.max_steps if (config.max_steps or 0) > 0 else None,
        "epochs": config.num_epochs,
        "learning_rate": float(config.learning_rate),
        "weight_decay": config.weight_decay or 0.0,
        "save": interval(made["save_strategy"], made.get("save_steps")),
    }


def _targets(*words: Any) -> tuple[Any, ...]:
    return (NO, ["q_proj"], ["q_proj", "v_proj"], *words)


# Of each tool: what reads its settings, what each case begins with, the packages, and the grids by topic.
PEERS: dict[str, tuple[Callable[[Settings, str], Settings], Settings, str, dict[str, list[Grid]]]] = {
    "axolotl": (
        _axolotl,
        {
            "base_model": "MODEL",
            "datasets": [{"path": "a/set", "type": "alpaca"}],
            "learning_rate": 1e-3,
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 1,
        },
        "axolotl transformers peft",
        {
            "rates": [
                {
                    "lr_scheduler": SCHEDULES,
                    "warmup_steps": (NO, 0, 1, 5),
                    "warmup_ratio": (NO, 0.0, 0.06, 0.1),
                    "max_steps": (STEPS,),
                }
            ],
            "adapters": [
                {
                    "adapter": ("lora", NO),
                    "lora_r": (8,),
                    "lora_alpha": (16,),
                    "lora_target_linear": (NO, True, False),
                    "lora_target_modules": _targets("all-linear", ["all-linear"], ["q_proj", "embed_tokens"]),
                },
                {
                    "adapter": ("lora",),
                    "lora_r": (8, 16),
                    "lora_alpha": (16,),
                    "lora_dropout": (NO, 0.05),
                    "peft_use_rslora": (NO, True, False),
                    "lora_target_linear": (True,),
                },
            ],
            "bits": [
                {
                    "adapter": (NO, "lora", "qlora"),
                    "load_in_4bit": (NO, True, False),
                    "load_in_8bit": (NO, True, False),
                    "lora_r": (8,),
                    "lora_alpha": (16,),
                    "lora_target_linear": (True,),
                }
            ],
            "data": [
                {
                    "sequence_len": (NO, 64),
                    "sample_packing": (NO, True, False),
                    "excess_length_strategy": (NO, "drop", "truncate"),
                },
                {"val_set_size": (NO, 0.0, 0.1), "eval_strategy": (NO, "steps", "no")},
            ],
            "run": [
                {"num_epochs": (NO, 2), "max_steps": (NO, 40)},
                {"micro_batch_size": (1, 2), "gradient_accumulation_steps": (1, 4)},
                SAVING | {"saves_per_epoch": (NO, 1)},
                {"weight_decay": (NO, 0.0, 0.1)},
            ],
        },
    ),
    "LLaMA-Factory": (
        _llama_factory,
        {"model_name_or_path": "MODEL", "stage": "sft", "finetuning_type": "lora", "dataset": "a"},
        "llamafactory transformers peft",
        {
            "rates": [WARM_UP],
            "adapters": [
                {
                    "finetuning_type": ("lora", "full"),
                    "lora_target": (NO, "all", "q_proj", "q_proj,v_proj", "all,q_proj"),
                },
                {
                    "lora_rank": (NO, 16),
                    "lora_alpha": (NO, 16),
                    "lora_dropout": (NO, 0.05),
                    "use_rslora": (NO, True, False),
                },
            ],
            "bits": [{"finetuning_type": ("lora", "full"), "quantization_bit": (NO, 4, 8)}],
            "data": [
                {"cutoff_len": (NO, 64), "packing": (NO, True, False), "neat_packing": (NO, True, False)},
                {"val_size": (NO, 0.0, 0.1), "eval_strategy": (NO, "steps", "no")},
                {"stage": ("pt",), "packing": (NO, True, False)},
            ],
            "run": [RUN, BATCH, SAVING, NUMBERS, {"learning_rate": (NO, 1e-3)}],
            "preference": [
                {
                    "stage": ("dpo",),
                    "pref_loss": (NO, "sigmoid", "hinge", "ipo", "simpo", "orpo"),
                    "pref_beta": (NO, 0.3),
                    "dpo_label_smoothing": (NO, 0.0, 0.1),
                    "pref_ftx": (NO, 0.0, 0.2),
                },
                {"stage": ("dpo",), "pref_loss": ("simpo",), "simpo_gamma": (NO, 0.7)},
            ],
        },
    ),
    "TRL": (
        _trl,
        {"model_name_or_path": "MODEL", "dataset_name": "a/set"},
        "trl transformers peft",
        {
            "rates": [WARM_UP],
            "adapters": [
                {
                    "use_peft": (NO, True, False),
                    "lora_target_modules": _targets(
                        ["all-linear"], "all-linear", ["all-linear", "q_proj"]
                    ),
                },
                {
                    "use_peft": (True,),
                    "lora_r": (NO, 8),
                    "lora_alpha": (NO, 16),
                    "lora_dropout": (NO, 0.0),
                    "use_rslora": (NO, True, False),
                },
            ],
            "bits": [
                {
                    "use_peft": (NO, True, False),
                    "load_in_4bit": (NO, True, False),
                    "load_in_8bit": (NO, True, False),
                }
            ],
            "data": [{"max_length": (NO, 64), "packing": (NO, True, False)}],
            "run": [RUN, BATCH, SAVING, NUMBERS, {"learning_rate": (NO, 1e-3)}],
            "preference": [
                {
                    "loss_type": (NO, "sigmoid", "hinge", "ipo", "robust", "apo_zero"),
                    "beta": (0.1, 0.3),
                    "label_smoothing": (NO, 0.0, 0.1),
                }
            ],
        },
    ),
    "ms-swift": (
        _ms_swift,
        {"model": "MODEL", "dataset": ["a.jsonl"]},
        "ms_swift transformers peft",
        {
            "rates": [WARM_UP],
            "adapters": [
                {
                    "tuner_type": (NO, "lora", "full"),
                    "target_modules": _targets(["all-linear"], ["all-linear", "q_proj"]),
                    "target_regex": (NO, ".*v_proj"),
                },
                {
                    "lora_rank": (NO, 16),
                    "lora_alpha": (NO, 16),
                    "lora_dropout": (NO, 0.0),
                    "use_rslora": (NO, True, False),
                },
            ],
            "bits": [
                {
                    "tuner_type": ("lora", "full"),
                    "quant_bits": (NO, 4, 8),
                    "quant_method": (NO, "bnb"),
                }
            ],
            "data": [
                {"max_length": (64,), "truncation_strategy": (NO, "delete", "right", "left")},
                {"use_chat_template": (NO, True, False), "max_length": (64,)},
                {
                    "split_dataset_ratio": (NO, 0.0, 0.1),
                    "eval_strategy": (NO, "steps", "no"),
                    "max_length": (64,),
                },
                {
                    "packing": (NO, True, False),
                    "attn_impl": ("flash_attn",),
                    "max_length": (64,),
                },
            ],
            "run": [
                RUN,
                BATCH,
                SAVING,
                NUMBERS,
                {"tuner_type": ("lora", "full"), "learning_rate": (NO, 1e-3)},
            ],
            "preference": [
                {
                    "rlhf_type": ("dpo",),
                    "loss_type": (NO, "sigmoid", "hinge"),
                    "beta": (NO, 0.3),
                    "label_smoothing": (NO, 0.0, 0.1),
                    "rpo_alpha": (NO, 0.2),
                },
                {"rlhf_type": ("kto", "simpo", "orpo", "cpo"), "beta": (NO, 0.3)},
            ],
        },
    ),
}  # fmt: skip


def cases_of(peer: str) -> Iterator[tuple[str, Settings]]:
    """Yield topic and settings of each case; the model's name is `MODEL`."""
    _, base, _, grids = PEERS[peer]
    for topic, listed in grids.items():
        seen = set()
        for grid in listed:
            for settings in pairs(grid):
                case = {**base, **settings}
                key = json.dumps(case, sort_keys=True)
                if key not in seen:
                    seen.add(key)
                    yield topic, case


def record(peer: str) -> Settings:
    """Return what a tool makes of each case: its effective values, or its refusal."""
    read, _, packages, _ = PEERS[peer]
    recorded = []
    for topic, case in cases_of(peer):
        settings = json.loads(json.dumps(case).replace("MODEL", os.environ["TINY_MODEL"]))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = {"effective": read(settings, topic)}
        except ImportError:
            raise  # the environment lacks a package, which says nothing of the case
        except (Exception, SystemExit) as error:
            text = str(error).replace(os.environ["TINY_MODEL"], "MODEL").partition(" [type=")[0]
            text = text.strip().splitlines()
            outcome = {"refused": f"{type(error).__name__}: {' '.join(text)[:160]}"}
        recorded.append({"topic": topic, "settings": case, **outcome})
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages.split()]
    return {"read_with": ", ".join(versions), "cases": recorded}


def main(peer: str) -> None:
    """Record one tool, and write it into the table beside the others."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TINY_MODEL"] = str(tiny_model(Path(folder)))
        table = json.loads(TABLE.read_text("utf-8")) if TABLE.is_file() else {}
        table[peer] = record(peer)
    parts = []
    for name in sorted(table):
        cases = ",\n  ".join(json.dumps(case, sort_keys=True) for case in table[name]["cases"])
        read_with = json.dumps(table[name]["read_with"])
        parts.append(
            f' {json.dumps(name)}: {{"read_with": {read_with}, "cases": [\n  {cases}\n ]}}'
        )
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
