"""Other tools' files of GRPO as run files: the loss, the drawing, the rewards, and batches counted in prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubetune.config.load import load_config
from kubetune.errors import ConfigError
from kubetune.plugins.importers import Imported, import_config

AXOLOTL = (
    "base_model: a/b\nrl: grpo\nlearning_rate: 1e-5\nmicro_batch_size: 8\ngradient_accumulation_steps: 4\n"
    "datasets: [{path: org/sums}]\n"
)
TRL = "model_name_or_path: a/b\ndataset_name: org/sums\nper_device_train_batch_size: 16\n"
SWIFT = (
    "NPROC_PER_NODE=2 \\\nswift rlhf --rlhf_type grpo \\\n --model a/b --dataset org/sums --tuner_type lora "
    "--use_hf true "
)

# File name, text, prompts of a step, settings of grpo that differ from ours, rewards.
CASES: dict[str, tuple[str, str, int, dict[str, Any], list[dict[str, Any]]]] = {
    "trl": (
        "a.sh",
        "accelerate launch --num_processes 2 trl/scripts/grpo.py --model_name_or_path a/b --dataset_name org/sums "
        "--reward_funcs accuracy_reward my.rewards.short --reward_weights 1.0 0.5 --num_generations 4 --beta 0.04 "
        "--loss_type dr_grpo --epsilon_high 0.28 --scale_rewards false --max_completion_length 256 --use_vllm "
        "--vllm_mode colocate --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --steps_per_generation 4 "
        "--top_k -1 --log_completions\n",
        8,
        {
            "num_generations": 4, "beta": 0.04, "loss_type": "dr_grpo", "epsilon_high": 0.28, "scale_rewards": "none",
            "max_completion_length": 256, "steps_per_generation": 2,
        },
        [
            {"name": "accuracy_reward", "column": "solution"},
            {"file": "my/rewards.py", "function": "short", "weight": 0.5},
        ],
    ),
    "trl by its keys": (
        "a.yaml",
        f"{TRL}reward_funcs: [think_format_reward]\nnum_generations: 8\ntemperature: 0.7\nepsilon: 0.1\nloss_type: sapo\n",
        2,
        {"temperature": 0.7, "loss_type": "sapo"},
        [{"name": "think_format_reward"}],
    ),
    "trl's rewards by their module": (
        "a.yaml",
        f"{TRL}reward_funcs: [reasoning_accuracy_reward, trl.rewards.accuracy_reward, "
        "trl.rewards.format_rewards.think_format_reward]\nreward_weights: [1.0, 2.0, 1.0]\n",
        2,
        {},
        [
            {"name": "reasoning_accuracy_reward", "column": "solution"},
            {"name": "accuracy_reward", "column": "solution", "weight": 2.0},
            {"name": "think_format_reward"},
        ],
    ),
    "axolotl with trl's rewards": (
        "a.yml",
        f"{AXOLOTL}trl:\n  num_generations: 16\n  reward_funcs: [trl.rewards.accuracy_reward, r1.form]\n",
        2,
        {"num_generations": 16},
        [{"name": "accuracy_reward", "column": "solution"}, {"file": "r1.py", "function": "form"}],
    ),
    "axolotl": (
        "a.yml",
        f"{AXOLOTL}trl:\n  beta: 0.001\n  num_generations: 16\n  use_vllm: true\n  max_completion_length: 128\n"
        "  reward_funcs: [r1.correct, r1.form]\n  reward_weights: [2.0, 1.0]\n  importance_sampling_level: sequence\n",
        2,
        {
            "beta": 0.001, "num_generations": 16, "max_completion_length": 128, "use_bias_correction_kl": False,
            "importance_sampling_level": "sequence",
        },
        [{"file": "r1.py", "function": "correct", "weight": 2.0}, {"file": "r1.py", "function": "form"}],
    ),
    "swift": (
        "a.sh",
        f"{SWIFT}--reward_funcs accuracy format soft_overlong --soft_cache_length 64 --max_completion_length 256 "
        "--num_generations 4 --per_device_train_batch_size 4 --overlong_filter true\n",
        2,
        {
            "loss_type": "grpo", "beta": 0.04, "temperature": 0.9, "num_generations": 4, "max_completion_length": 256,
            "use_bias_correction_kl": False, "mask_truncated_completions": True,
        },
        [
            {"name": "accuracy_reward"},
            {"name": "format", "settings": {"pattern": r"<think>.*?</think>\s*<answer>.*?</answer>"}},
            {
                "name": "get_soft_overlong_punishment",
                "settings": {"max_completion_len": 256, "soft_punish_cache": 64},
            },
        ],
    ),
    "swift by the cosine of the length": (
        "a.sh",
        f"{SWIFT}--reward_funcs cosine repetition --cosine_min_len_value_correct 0.0 --cosine_max_len_value_wrong -0.25 "
        "--max_completion_length 256 --repetition_n_grams 4\n",
        2,
        {
            "loss_type": "grpo", "beta": 0.04, "temperature": 0.9, "max_completion_length": 256,
            "use_bias_correction_kl": False,
        },
        [
            {
                "name": "get_cosine_scaled_reward",
                "settings": {
                    "max_len": 256.0, "min_value_wrong": -0.5, "max_value_wrong": -0.25, "min_value_correct": 0.5,
                    "max_value_correct": 0.0,
                },
            },
            {"name": "repetition", "settings": {"ngram_size": 4.0, "max_penalty": -1.0}},
        ],
    ),
    "verl": (
        "a.sh",
        "python3 -m verl.trainer.main_ppo \\\n algorithm.adv_estimator=grpo data.train_files=$HOME/sums.parquet \\\n "
        "data.train_batch_size=1024 data.max_response_length=256 actor_rollout_ref.model.path=a/b \\\n "
        "actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.use_kl_loss=True "
        "actor_rollout_ref.actor.kl_loss_coef=0.002 actor_rollout_ref.actor.kl_loss_type=low_var_kl "
        "actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm trainer.save_freq=20 "
        "trainer.logger=['console','wandb'] custom_reward_function.path=my.py $@\n",
        256,
        {
            "num_generations": 5, "beta": 0.002, "max_completion_length": 256, "steps_per_generation": 4, "delta": 3.0,
            "use_bias_correction_kl": False,
        },
        [{"file": "my.py", "function": "compute_score"}],
    ),
    "verl's yaml": (
        "a.yaml",
        "algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}\ndata: {train_files: a.parquet, "
        "train_batch_size: 64, prompt_key: question}\nactor_rollout_ref:\n  model: {path: a/b, lora_rank: 8}\n"
        "  actor: {ppo_mini_batch_size: 64, loss_agg_mode: seq-mean-token-mean, clip_ratio_high: 0.3}\n"
        "  rollout: {n: 8, temperature: 1.0}\nreward_model: {enable: false}\n",
        64,
        {"loss_type": "grpo", "epsilon_high": 0.3, "delta": 3.0, "scale_rewards": "none"},
        [{"name": "numeric"}],
    ),
}  # fmt: skip


def imported(folder: Path, name: str, text: str) -> Imported:
    path = folder / name
    path.write_text(text)
    return import_config(path)


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_grpo_becomes_a_run_file(case: str, tmp_path: Path) -> None:
    name, text, prompts, settings, rewards = CASES[case]
    result = imported(tmp_path, name, text)
    file = tmp_path / "run.yaml"
    file.write_text(result.text)
    config = load_config(file)
    assert config.task == "grpo"
    assert config.training.global_batch_size == prompts
    assert config.grpo.model_dump(include=config.grpo.changed_keys) == settings
    assert [reward.model_dump(exclude_defaults=True) for reward in config.rewards] == rewards
    unknown = [note.key for note in result.notes if "not known to" in note.text]
    assert not unknown


SERVERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trl": (
        "a.yaml",
        f"{TRL}use_peft: true\nreward_funcs: [a.b]\nuse_vllm: true\nvllm_mode: server\nvllm_server_port: 8001\n"
        "vllm_importance_sampling_cap: 2.0\nvllm_group_port: 51000\n",
        {
            "servers": {"urls": ("http://localhost:8001",)},
            "importance_sampling_correction": "sequence_mask", "importance_sampling_clip_max": 2.0,
        },
    ),
    "trl by address, uncorrected": (
        "a.yaml",
        f"{TRL}use_peft: true\nreward_funcs: [a.b]\nuse_vllm: true\nvllm_mode: server\nvllm_server_port: 8001\n"
        "vllm_server_base_url: http://0.0.0.0:9/\nvllm_importance_sampling_correction: false\n",
        {"servers": {"urls": ("http://localhost:9",)}, "importance_sampling_correction": "none"},
    ),
    "axolotl": (
        "a.yml",
        f"{AXOLOTL}adapter: lora\nlora_target_linear: true\ntrl:\n  reward_funcs: [r1.f]\n  use_vllm: true\n"
        "  vllm_mode: server\n  vllm_server_host: vllm\n  vllm_importance_sampling_mode: token_mask\n",
        {"servers": {"urls": ("http://vllm:8000",)}, "importance_sampling_correction": "token_mask"},
    ),
    "swift": (
        "a.sh",
        f"{SWIFT}--reward_funcs accuracy --use_vllm true --vllm_mode server --vllm_server_host 10.0.0.7 10.0.0.8 "
        "--vllm_server_port 8000 8001 --async_generate true --rollout_importance_sampling_mode sequence_truncate\n",
        {
            "servers": {"urls": ("http://10.0.0.7:8000", "http://10.0.0.8:8001"), "lag": 1},
            "importance_sampling_correction": "geometric_truncate", "importance_sampling_clip_max": 2.0,
        },
    ),
    "swift, uncorrected": (
        "a.sh",
        f"{SWIFT}--reward_funcs accuracy --use_vllm true --vllm_mode server --vllm_server_host 10.0.0.7\n",
        {"servers": {"urls": ("http://10.0.0.7:8000",)}, "importance_sampling_correction": "none"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVERS)
def test_servers_that_draw_are_carried_with_the_correction(case: str, tmp_path: Path) -> None:
    name, text, settings = SERVERS[case]
    result = imported(tmp_path, name, text)
    file = tmp_path / "run.yaml"
    file.write_text(result.text)
    grpo = load_config(file).grpo
    values = grpo.model_dump(include=settings.keys(), exclude_unset=True)
    assert values == settings
    near = [note.text for note in result.of("approximated") if "grpo.servers.urls" in note.text]
    assert len(near) == 1
    assert "stock `vllm serve --enable-lora` has to answer at these addresses" in near[0]
    assert not result.of("dropped")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"use_peft: true\n": ""}, "stock vLLM servers take adapters"),
        ({"use_peft: true": "use_peft: true\nuse_dora: true"}, "no adapter with lora.use_dora"),
        ({"port: 8001": "host: $HOST"}, "depends on vllm_server_host"),
        ({"mode: server": "mode: colocate"}, "the model draws its answers itself"),
    ],
)
def test_servers_that_could_not_draw_are_dropped_with_the_reason(
    wrong: dict[str, str], words: str, tmp_path: Path
) -> None:
    text = SERVERS["trl"][1]
    for theirs, other in wrong.items():
        assert theirs in text
        text = text.replace(theirs, other)
    result = imported(tmp_path, "a.yaml", text)
    assert any(words in note.text for note in result.of("dropped"))
    assert "servers:" not in result.text
    assert "importance_sampling_correction:" not in result.text


def test_arguments_in_arrays_of_a_script_are_read(tmp_path: Path) -> None:
    script = """
    MODEL=a/b
    DATA=(
        # the sums
        data.train_files=$HOME/sums.parquet   # of both tools
        data.train_batch_size=64 data.max_response_length=128
    )
    ACTOR=(actor_rollout_ref.model.path=$MODEL
           actor_rollout_ref.actor.ppo_mini_batch_size=64)
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
        "${DATA[@]}" ${ACTOR[@]} "${MISSING[@]}" "$@"
    """
    result = imported(tmp_path, "a.sh", script)
    file = tmp_path / "run.yaml"
    file.write_text(result.text)
    config = load_config(file)
    assert (config.model.path, config.data.train[0].path) == ("a/b", "~/sums.parquet")
    assert config.training.global_batch_size == 64
    assert config.grpo.max_completion_length == 128


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", f"{TRL}num_generations: 8\n", "names no reward that kubetune has"),
        (
            "a.yaml",
            f"{TRL}reward_funcs: [a.b]\nloss_type: gmpo\n",
            "gmpo is a loss that kubetune does not have",
        ),
        ("a.yml", AXOLOTL.replace("grpo", "gdpo"), "rl: is gdpo"),
        (
            "a.sh",
            "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=a/b\n",
            "gae, its default",
        ),
        ("a.sh", "trl rloo --model_name_or_path a/b --dataset_name org/sums\n", "runs `rloo`"),
        (
            "a.sh",
            f"{SWIFT}--reward_funcs accuracy --freeze_vit false\n",
            "GRPO asks about texts alone",
        ),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    name: str, text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        imported(tmp_path, name, text)


def test_ms_swift_is_recognised_by_its_keys(tmp_path: Path) -> None:
    text = (
        "model: a/b\nrlhf_type: grpo\nreward_funcs: [accuracy, format]\ntuner_type: lora\n"
        "dataset: [org/sums]\nnum_generations: 8\n"
    )
    assert imported(tmp_path, "a.yaml", text).peer == "ms-swift"


def test_rewards_that_are_not_here_name_the_tool(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"read as a file of TRL, it names no reward .* name the tool by --from"
    ):
        imported(tmp_path, "a.yaml", f"{TRL}reward_funcs: [cosine]\nnum_generations: 8\n")


# A step of TRL and axolotl learns from 16 × 2 answers.
@pytest.mark.parametrize(("key", "value", "steps"), [
    ("generation_batch_size", 32, 1),
    ("generation_batch_size", 64, 2),
    ("steps_per_generation", 2, 1),
    ("steps_per_generation", 4, 2),
])  # fmt: skip
@pytest.mark.parametrize("tool", ["trl", "axolotl"])
def test_answers_that_are_drawn_together_are_counted_in_steps(
    tool: str, key: str, value: int, steps: int, tmp_path: Path
) -> None:
    text = f"{TRL}gradient_accumulation_steps: 2\nreward_funcs: [a.b]\nnum_generations: 8\n{key}: {value}\n"
    if tool == "axolotl":
        text = (
            "base_model: a/b\nrl: grpo\nlearning_rate: 1e-5\nmicro_batch_size: 16\ngradient_accumulation_steps: 2\n"
            "datasets: [{path: org/sums}]\n"
            f"trl: {{reward_funcs: [a.b], num_generations: 8, {key}: {value}}}\n"
        )
    file = tmp_path / "run.yaml"
    file.write_text(imported(tmp_path, "a.yaml", text).text)
    config = load_config(file)
    assert config.training.global_batch_size == 4
    assert config.grpo.steps_per_generation == steps


def test_steps_of_verl_are_optimizer_steps_here(tmp_path: Path) -> None:
    text = (
        "algorithm: {adv_estimator: grpo}\ndata: {train_files: a.parquet, train_batch_size: 64}\n"
        "actor_rollout_ref:\n  model: {path: a/b, lora_rank: 8}\n"
        "  actor: {ppo_mini_batch_size: 16, ppo_epochs: 2, optim: {lr_warmup_steps: 3}}\n  rollout: {n: 8}\n"
        "trainer: {total_training_steps: 100, save_freq: 20, test_freq: -1}\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text(imported(tmp_path, "a.yaml", text).text)
    training = load_config(file).training
    assert (training.max_steps, training.save_steps, training.warmup_steps) == (800, 160, 24)
    assert "eval_steps" not in training.changed_keys
