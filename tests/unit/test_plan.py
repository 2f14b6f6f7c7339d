"""The arithmetic of a run: worlds, batches, steps, schedule, names."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubetune.base.gpus import visible_gpus
from kubetune.config.naming import default_output, model_label, model_short_name
from kubetune.config.schema import Config, LoraConfig
from kubetune.errors import ConfigError
from kubetune.library.plan_text import describe
from kubetune.plan.cost import reference_hours
from kubetune.plan.plan import Plan, learning_rate_at, make_plan


def config(*, packing: bool = True, **sections: Any) -> Config:
    data = {"train": "x", "packing": packing} | sections.pop("data", {})
    return Config.model_validate({"model": "Qwen/Qwen3-8B", "data": data} | sections)


def test_accumulation_follows_from_the_global_batch() -> None:
    for gpus, accumulation in ((1, 32), (2, 16), (8, 4), (32, 1)):
        plan = make_plan(config(packing=False, training={"global_batch_size": 32}), 1000, gpus=gpus)
        assert (plan.world_size, plan.global_batch_size, plan.accumulation) == (
            gpus,
            32,
            accumulation,
        )
        assert (plan.steps_per_epoch, plan.num_steps) == (
            32,
            32,
        )  # the last step has the 8 samples that are left
        assert (
            plan.batch_text() == f"32 = batch × accumulation × world = 1 × {accumulation} × {gpus}"
        )


def test_the_global_batch_follows_from_accumulation() -> None:
    training = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    plan = make_plan(config(training=training, data={"max_length": 512}), 100, gpus=2)
    assert (plan.global_batch_size, plan.accumulation, plan.micro_batch_tokens) == (16, 4, 1024)
    assert make_plan(config(packing=False), 100).micro_batch_tokens is None


PACKED = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "global_batch_tokens": "packed",
}


def test_packed_rows_are_counted_as_tools_do_that_pack_before_they_batch() -> None:
    """1,000 rows of 200 tokens in rows of 4,096, two at a time, four times: 49 rows there, seven steps."""
    plan = make_plan(config(training=PACKED, data={"max_length": 4096}), 1000, tokens=200_000)
    assert (plan.global_batch_tokens, plan.steps_per_epoch, plan.accumulation) == (32_768, 7, 4)
    assert (plan.global_batch_size, plan.tokens_per_step) == (143, 28_571)
    assert plan.batch_text() == (
        "about 28,571 tokens, 143 samples; about 4 micro-batches of at most 8,192 tokens on each of "
        "1 process"
    )
    assert (
        make_plan(
            config(training=PACKED, data={"max_length": 4096}), 1000, gpus=2
        ).global_batch_tokens
        == 65_536
    )


def test_a_step_of_so_many_tokens_stays_the_same_on_more_processes() -> None:
    asked = config(training={"global_batch_tokens": 10_000}, data={"max_length": 512})
    plans = [make_plan(asked, 1000, gpus=gpus, tokens=95_000) for gpus in (1, 2, 4)]
    assert {(plan.steps_per_epoch, plan.global_batch_size) for plan in plans} == {(10, 100)}
    assert [plan.accumulation for plan in plans] == [19, 10, 5]
    unread = make_plan(asked)
    assert (unread.steps_per_epoch, unread.num_steps, unread.global_batch_size) == (0, 0, 0)
    assert unread.batch_text() == (
        "about 10,000 tokens; at most 20 micro-batches of at most 512 tokens on each of 1 process"
    )
    # Rows longer than a step: each is a step of its own.
    assert make_plan(asked, 3, tokens=95_000).steps_per_epoch == 3


def test_short_rows_need_fewer_micro_batches_than_full_ones() -> None:
    """32 samples of 60 tokens fit into one micro-batch of 2,048; full-length ones would take 32."""
    asked = config(training={"global_batch_size": 32})
    plan = make_plan(asked, 320, tokens=320 * 60)
    assert (plan.accumulation, plan.tokens_per_step, plan.may_accumulate) == (1, 1920, True)
    assert plan.batch_text() == (
        "32 samples, about 1,920 tokens; about 1 micro-batch of at most 2,048 tokens on each of "
        "1 process"
    )
    assert plan.batch_text("grpo").startswith("32 prompts, about")
    assert make_plan(asked, 320).accumulation == 32


@pytest.mark.parametrize(
    ("training", "packing", "message"),
    [
        (
            {"global_batch_tokens": 900, "global_batch_size": 3},
            True,
            "beside global_batch_size 3; expected one",
        ),
        ({"global_batch_tokens": 900, "gradient_accumulation_steps": 2}, True, "leave that out"),
        (
            {"global_batch_tokens": "packed"},
            False,
            "found packed with data.packing: false; expected a number",
        ),
    ],
)
def test_two_words_on_the_batch_are_refused(
    training: dict[str, Any], packing: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(config(training=training, packing=packing), 100)


@pytest.mark.parametrize(
    ("compute", "gpus", "expected"),
    [
        ({}, 0, (1, "cpu", "gloo")),
        ({}, 4, (4, "cuda", "nccl")),
        ({"processes": 2}, 0, (2, "cpu", "gloo")),
        ({"processes": 2}, 4, (2, "cuda", "nccl")),
        ({"gpus_per_node": 2}, 0, (2, "cuda", "nccl")),
        ({"gpus_per_node": 0, "processes": 3}, 4, (3, "cpu", "gloo")),
        ({"gpus_per_node": 0}, 4, (1, "cpu", "gloo")),
        ({"nodes": 3, "gpus_per_node": 2}, 8, (2, "cuda", "nccl")),
    ],
)
def test_processes(compute: dict[str, int], gpus: int, expected: tuple[int, str, str]) -> None:
    plan = make_plan(config(compute=compute), 100, gpus=gpus)
    assert (plan.processes_per_node, plan.device, plan.backend) == expected
    assert (
        plan.world_size
        == plan.nodes * plan.processes_per_node
        == compute.get("nodes", 1) * expected[0]
    )


def test_a_rank_that_runs_knows_its_world() -> None:
    plan = make_plan(
        config(compute={"nodes": 2, "gpus_per_node": 8}), 100, world_size=4, device="cpu"
    )
    assert (plan.nodes, plan.processes_per_node, plan.world_size, plan.backend) == (2, 2, 4, "gloo")
    assert make_plan(config(compute={"nodes": 2}), 100, world_size=3).nodes == 1


@pytest.mark.parametrize(
    ("training", "compute", "packing", "parts"),
    [
        (
            {"global_batch_size": 12, "per_device_train_batch_size": 4},
            {"processes": 2},
            False,
            [
                "found 12",
                "4 × 2 processes = 8",
                "global batch of 8 or 16",
                "size 1, 2, 3 or 6",
                "1 or 3 processes",
            ],
        ),
        (
            {"global_batch_size": 3},
            {"processes": 4},
            False,
            ["global batch of 4", "1 or 3 processes", "packing: true"],
        ),
        (
            {"global_batch_size": 3},
            {"processes": 4},
            True,
            ["a global batch of 4 or more", "3 processes or fewer"],
        ),
        (
            {"global_batch_size": 32, "gradient_accumulation_steps": 4},
            {"processes": 2},
            True,
            ["found 32", "1 × gradient_accumulation_steps 4 × 2 processes = 8", "leave out"],
        ),
        (
            {},
            {"processes": 3, "gpus_per_node": 2},
            True,
            ["found 3 with 2 GPUs", "1 to 2", "gpus_per_node: 0"],
        ),
    ],
)
def test_impossible_splits_name_the_possible_ones(
    training: dict[str, int], compute: dict[str, int], packing: bool, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(config(training=training, compute=compute, packing=packing), 100)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16))
def test_what_an_impossible_split_names_is_possible(wanted: int, batch: int, world: int) -> None:
    def plan(wanted: int, batch: int, world: int) -> Plan:
        training = {"global_batch_size": wanted, "per_device_train_batch_size": batch}
        return make_plan(
            config(packing=False, training=training, compute={"processes": world}), 100
        )

    try:
        possible = plan(wanted, batch, world)
    except ConfigError as error:
        ways = (
            str(error).split("possible are ")[1].replace(" or ", " ").replace(",", "").split("; ")
        )
        numbers = [[int(word) for word in way.split() if word.isdigit()] for way in ways]
        for way, listed in zip(ways, numbers, strict=True):
            for number in listed:
                if "global batch" in way:
                    plan(number, batch, world)
                elif "processes" in way:
                    plan(wanted, batch, number)
                else:
                    plan(wanted, number, world)
        assert numbers[0]
    else:
        assert possible.accumulation * batch * world == wanted


def test_epochs_and_steps() -> None:
    training = {
        "global_batch_size": 8,
        "num_train_epochs": 2.5,
        "eval_steps": "epoch",
        "save_steps": 7,
    }
    plan = make_plan(config(training=training, data={"eval": 0.1}), 90, 10)
    assert (plan.steps_per_epoch, plan.num_steps, plan.eval_steps, plan.save_steps) == (
        12,
        30,
        12,
        7,
    )
    assert [step for step in range(31) if plan.is_eval_step(step)] == [12, 24, 30]
    assert [step for step in range(31) if plan.is_save_step(step)] == [7, 14, 21, 28, 30]
    limited = make_plan(config(training=training | {"max_steps": 6}), 90)
    assert (limited.num_steps, limited.num_epochs, limited.eval_steps) == (6, 0.5, 0)


def test_unread_data_leave_the_steps_open() -> None:
    plan = make_plan(config())
    assert (plan.rows, plan.steps_per_epoch, plan.num_steps, plan.save_steps) == (None, 0, 0, 0)
    assert make_plan(config(training={"max_steps": 9})).num_steps == 9
    assert not plan.is_save_step(5)


def test_asking_the_model_before_training_takes_time() -> None:
    def hours(loss: str, **sections: Any) -> float | None:
        preference = {"loss": loss, **sections.pop("preference", {})}
        asked = config(task="preference", preference=preference, data={"eval": 0.1}, **sections)
        plan = make_plan(asked, 100, 50, tokens=3600)
        return reference_hours(asked.task, asked.preference, asked.lora, plan, rate=1.0)

    assert hours("dpo", lora=True) == 1.5 / 2
    assert hours("dpo") == 1.5 / 3
    assert hours("kto", lora=True) == 2 * 1.5 / 2
    assert hours("orpo") is None
    assert hours("dpo", preference={"reference_free": True}) is None


def test_learning_rates_are_those_of_the_task() -> None:
    rates = {task: (config(task=task, lora=True).learning_rate, config(task=task).learning_rate)
             for task in ("causal_lm", "preference", "reward_model")}  # fmt: skip
    assert rates == {
        "causal_lm": (2e-4, 1e-5),
        "preference": (5e-6, 5e-7),
        "reward_model": (1e-4, 1e-5),
    }
    assert (
        config(task="preference", lora=True, training={"learning_rate": 0.1}).learning_rate == 0.1
    )


def test_a_plan_says_how_often_and_what_auto_means() -> None:
    asked = config(data={"eval": 0.1}, lora=True, quantization="auto", training={"save_steps": 1})
    lines = dict(describe(asked, make_plan(asked), None))
    assert lines["evaluation"] == "every epoch, and at the end"
    assert lines["checkpoints"] == "every step, and at the end; 3 kept"
    assert lines["steps"] == "unknown until the data are read (1 epoch)"
    assert "(quantization: auto is none here)" in lines["method"]
    unused = config(training={"metric_for_best_model": "token_accuracy", "eval_steps": 3})
    lines = dict(describe(unused, make_plan(unused), None))
    names = "training.metric_for_best_model and training.eval_steps"
    assert lines["evaluation"] == f"none: no data.eval, so {names} are not used"
    lines = dict(describe(asked, make_plan(asked, 30, 3, gpus=1), None))
    assert lines["evaluation"] == "every 30 steps, and at the end"
    assert ", 8bit base (quantization: auto is 8bit here)" in lines["method"]


def test_texts_that_are_split_are_at_least_as_many_rows() -> None:
    split = config(data={"overlong": "split", "max_length": 128})
    lines = dict(describe(split, make_plan(split, 60), None))
    assert lines["rows"] == "at least 60: texts of more than 128 tokens are split into several"
    assert lines["steps per epoch"].startswith("at least ")


@given(st.integers(1, 10_000), st.integers(1, 64), st.floats(0.01, 20))
def test_steps_cover_every_epoch_and_no_more(rows: int, batch: int, epochs: float) -> None:
    plan = make_plan(
        config(training={"global_batch_size": batch, "num_train_epochs": epochs}), rows
    )
    assert (plan.steps_per_epoch - 1) * batch < rows <= plan.steps_per_epoch * batch
    assert plan.num_steps - 1 < epochs * plan.steps_per_epoch <= plan.num_steps


def test_a_plan_reads_back_equal() -> None:
    plan = make_plan(config(lora={"r": 8}, data={"eval": 0.5}), 100, 100, gpus=2)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ConfigError, match="not a plan written by this version"):
        Plan.from_json("{}")


def test_the_learning_rate_rises_and_falls() -> None:
    def rates(kind: str) -> list[float]:
        training = {
            "max_steps": 10,
            "warmup_steps": 2,
            "lr_scheduler_type": kind,
            "learning_rate": 1.0,
        }
        plan = make_plan(config(training=training))
        return [learning_rate_at(plan, step) for step in range(11)]

    assert rates("constant") == [0.5, *[1.0] * 10]
    assert rates("linear") == pytest.approx(
        [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0]
    )
    cosine = rates("cosine")
    assert cosine[:3] == [0.5, 1, 1]
    assert cosine[6] == pytest.approx(0.5)
    assert cosine[9] == pytest.approx((1 + math.cos(math.pi * 7 / 8)) / 2)
    assert cosine[10] == pytest.approx(0, abs=1e-12)


@given(st.integers(1, 500), st.integers(0, 600), st.sampled_from(["cosine", "linear", "constant"]))
def test_every_step_learns_and_none_more_than_asked(steps: int, warmup: int, kind: str) -> None:
    training = {
        "max_steps": steps,
        "warmup_steps": warmup,
        "lr_scheduler_type": kind,
        "learning_rate": 3e-4,
    }
    plan = make_plan(config(training=training))
    rates = [learning_rate_at(plan, step) for step in range(steps)]
    assert all(0 < rate <= 3e-4 for rate in rates)
    top = min(max(warmup - 1, 0), steps - 1)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_defaults_follow_the_method() -> None:
    assert (make_plan(config()).learning_rate, make_plan(config()).method) == (1e-5, "full")
    lora = make_plan(config(lora={"r": 8}))
    assert (lora.learning_rate, lora.method) == (2e-4, "lora-r8-a16")
    assert lora.grace_seconds == 60
    assert make_plan(config(kubernetes={"image": "x", "grace_seconds": 90})).grace_seconds == 90


def test_the_run_directory_says_what_it_holds() -> None:
    now = datetime(2026, 11, 20, 10, 15)
    assert (
        default_output("Qwen/Qwen3-8B", LoraConfig(), 2048, now)
        == "outputs/Qwen3-8B/lora-r16-a32-len2048-20261120-1015"
    )
    assert (
        default_output("Qwen/Qwen3-8B", None, 2048, now)
        == "outputs/Qwen3-8B/full-len2048-20261120-1015"
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("/models/llama3.2-3b/", "llama3.2-3b"),
        ("/cache/models--meta-llama--Llama-3.2-1B/snapshots/0123abcd", "Llama-3.2-1B"),
        ("/models/my model", "my-model"),
        ("..", "model"),
        ("/", "model"),
    ],
)
def test_short_names_of_models(path: str, name: str) -> None:
    assert model_short_name(path) == name


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("/models/small/model/", "small/model"),
        ("outputs/support/checkpoints/best", "support/best"),
        ("/cache/models--meta-llama--Llama-3.2-1B/snapshots/0123abcd", "meta-llama/Llama-3.2-1B"),
        (f"/cache/registry/team/bot/sha256-{'0' * 64}", "team/bot"),
        ("/", "model"),
    ],
)
def test_labels_of_models_say_which(path: str, label: str) -> None:
    assert model_label(path) == label


def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert visible_gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    for chosen, count in (
        (None, 3),
        ("0", 1),
        ("0,2", 2),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("GPU-8f,GPU-9a", 2),
    ):
        environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
        assert visible_gpus(environ, tmp_path) == count, chosen


def test_nvidia_smi_is_asked_where_there_are_no_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'\necho '  MIG 1g'\necho 'GPU 1: H200 (UUID: GPU-2)'\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}, tmp_path / "dev") == 2
    command.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus({}, tmp_path / "dev") == 0
