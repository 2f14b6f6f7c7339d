"""Shell scripts for `kubetune import`, read as bash runs them; what only a running shell knows is named, never guessed."""

import subprocess
from pathlib import Path

import pytest

from kubetune.errors import ConfigError
from kubetune.plugins.importers import import_config
from kubetune.plugins.importers.shell import read_script

# Each calls `swift` with words that a shell can tell from the script alone.
SURE = {
    "plain": "A=1\nswift sft --a $A --b '$A' --c \"x $A y\"  # a comment",
    "default": "SIZE=${SIZE:-small} B=${C:-d}\nswift sft --a ${SIZE} --b $B",
    "arithmetic": "A=64 B=4\nN=$((A / B)) M=$(( (A+2) * $B - 1 ))\nswift sft --n $N --m $M --e $(expr $A / 4)",
    "array": 'ARGS=(--a 1\n  --b "x y")  # words\nswift sft "${ARGS[@]}" --d 4',
    "words in a text": 'EXTRA="--a 1 --b 2"\nEXTRA="$EXTRA --c 3"\nswift sft $EXTRA --d "$EXTRA"',
    "exit": 'if [ a = b ]; then\n  echo usage\n  exit 1\nfi\nswift sft --a 1\nexit 0\nswift sft --a 2',
    "quotes": "swift sft --a \"it's\" --b 'say \"x\"' --c a\\ b --d \"\\$5\"",
    "continued": "swift sft \\\n  --a 1 \\\n  --b 2 2>&1 | tee /dev/null",
    "prefix": "A=1 B=2 swift sft --a x",
    "printed": "echo swift sft --a wrong > /dev/null\nswift sft --a right",
}  # fmt: skip


@pytest.mark.parametrize("name", SURE)
def test_what_is_certain_is_what_bash_does(name: str, tmp_path: Path) -> None:
    swift = tmp_path / "swift"
    swift.write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\nprintf '\\n\\0'\n")
    swift.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", SURE[name]], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )  # fmt: skip
    called = [text.split("\0")[:-1] for text in done.stdout.split("\n\0") if text]
    read = []
    for command in read_script(SURE[name]).commands:
        words = list(command.words)
        if "swift" in words[:-1] and (words[0] == "swift" or "=" in words[0]):
            assert command.condition == command.problem == ""
            read.append(words[words.index("swift") + 1 :])
    assert called
    assert read == called


# The lines before a call of `swift sft --model a/b --dataset org/chats … --x $X`, and why its key is not carried over.
UNSURE = {
    "if": ("X=1\nif [ $NODE = 0 ]; then\n  X=2\nfi", "is set in line 3 within an `if` (line 2), which is not followed"),
    "list": ("X=1\n[ -d data ] && X=2", "is set in line 2 behind `[ -d data ] &&`, which is not followed"),
    "case": ("case $1 in a) X=1 ;; b) X=2 ;; esac", "is set in line 1 within a `case` (line 1)"),
    "while": ("X=1\nwhile true; do X=2; done", "is set in line 2 within a loop (line 2)"),
    "for": ("for X in 1 2; do :; done", "is set in line 1 within a loop (line 1)"),
    "function": ("f() { X=1; }\nf", "is set in line 1 within a group or a function (line 1)"),
    "subshell": ("X=1\n(X=2)", "is set in line 2 within a group or a function (line 2)"),
    "pipeline": ("X=1\nX=2 | cat", "is set in line 2 in a pipeline"),
    "added": ("X=1\nX+=2", "is set in line 2 by +=, which is not followed"),
    "command": ("X=1\nX=$(python rank.py)", "$(python rank.py)"),
    "command in backticks": ("X=`python rank.py`", "$(python rank.py)"),
    "source": ("X=1\nsource env.sh", "may be set anew by `source` (line 2)"),
    "eval": ('X=1\neval "$SETTINGS"', "may be set anew by `eval` (line 2)"),
    "array in a branch": ("X=(1)\n[ -d x ] && X=(2)", "is set in line 2 behind `[ -d x ] &&`"),
    "argument": ("X=$1", "holds $1, which the file does not set"),
    "not set": ("", "holds $X, which the file does not set"),
    "through another": ("if [ -d x ]; then Y=1; else Y=2; fi\nX=$Y", "holds $Y, which is set in line 1 within an `if`"),
    "calculated": ("if [ -d x ]; then Y=1; else Y=2; fi\nX=$((Y * 2))", "$((Y * 2))"),
}  # fmt: skip
CALL = "\nswift sft --model a/b --dataset org/chats --use_hf true --max_length $X\n"


def dropped(path: Path, text: str) -> tuple[str, dict[str, str]]:
    """Return the run file, and the notes of keys that are dropped."""
    path.write_text(text)
    result = import_config(path)
    assert {note.key for note in result.notes if note.kind == "carried"}.isdisjoint(
        {note.key for note in result.notes if note.kind == "dropped"}
    )
    return result.text, {note.key: note.text for note in result.of("dropped")}


@pytest.mark.parametrize("name", UNSURE)
def test_what_is_not_followed_is_dropped_by_name(name: str, tmp_path: Path) -> None:
    before, why = UNSURE[name]
    text, notes = dropped(tmp_path / "a.sh", before + CALL)
    assert why in notes["max_length"]
    assert "put its value there" in notes["max_length"]
    assert "max_length" not in text.split("Not carried over")[0]


REFUSED = {
    "options in a branch": (
        'ARGS=(--lora_rank 8)\nif [ $USE_MORE = 1 ]; then\n  ARGS=(--packing true)\nfi\nCALL "${ARGS[@]}"',
        'line 5: "${ARGS[@]}" holds options (line 3), but ARGS is set in line 3 within an `if` (line 2), which is not '
        "followed; write the command there with its values",
    ),
    "options that are added": (
        'A="--max_length 4"\nA+=" --lora_rank 8"\nCALL $A',
        "line 3: $A holds options (line 2), but A is set in line 2 by +=, which is not followed; write the command",
    ),
    "read": ("read X\nCALL", "line 1: `read X` may set variables in a way that is not read; take that out, or write"),
    "IFS": ("IFS=,\nCALL", "line 1: `IFS=,` may set variables"),
    "unset": ('for V in A; do unset "$V"; done\nCALL', "line 1: `unset \"$V\"` may set variables"),
    "a default that is set": ("f() { : ${X:=1}; }\nCALL", "line 1: `: ${X:=1}` may set variables"),
    "a source in a function": ("f() { source env.sh; }\nCALL", "line 1: `source env.sh` may set variables"),
    "a calculation": ("X=8\n(( X /= 2 ))\nCALL", "line 2: `((` is not read"),
    "a here-document": ("cat <<END\nEND\nCALL", "line 1: `<<` is not read"),
    "an argument that no shell joins": (
        "CALL \\  # [4, 8]\n  --lora_rank 4", "line 2: --lora_rank begins a command of its own, since a backslash",
    ),
    "braces": ("CALL --target_modules {q,v}_proj", "line 1: {q,v}_proj stands for several words of a shell; write"),
    "a quotation": ("X='a\nCALL", "line 1: a quotation or a bracket is not closed; take that out"),
    "a case": ("case a in\nCALL", "line 1: a `case` is not closed"),
    "the model": (
        "if [ $1 = small ]; then\n  M=a/small\nfi\nswift sft --model $M --dataset org/chats",
        "a.sh:4: model: $M holds $M, which is set in line 2 within an `if` (line 1), which is not followed; put its value",
    ),
    "several branches": (
        "if [ $STAGE = 1 ]; then\n  CALL\nelse\n  CALL --lora_rank 4\nfi",
        "line 2 (stands within an `if` (line 1), which is not followed), line 4 (stands within an `if`",
    ),
    "a function": ('swift() { nice "$@"; }\nCALL', "line 2: `swift` is a function (line 1); write the command"),
    "an alias": ("alias swift='nice swift'\nCALL", "line 1: `alias swift='nice swift'` may set variables"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_nobody_knows_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    script, why = REFUSED[name]
    file = tmp_path / "a.sh"
    file.write_text(script.replace("CALL", CALL.strip().replace(" --max_length $X", "")) + "\n")
    with pytest.raises(ConfigError) as caught:
        import_config(file)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train() {\n  X=$1\nCALL}\ntrain 4", "a group or a function (line 1)"),
        ("for X in 1; do\nCALLdone", "a loop (line 1)"),
        ("case $1 in\n a) CALL ;;\nesac", "a `case` (line 1)"),
        ("X=${1:-$2}\nif [ $NODE_RANK = 0 ]; then\nCALLfi", "an `if` (line 2)"),
        ("X=$1\n[ -d x ] && \\\n CALL", "`[ -d x ] &&`"),
    ],
)
def test_a_call_within_what_is_not_followed_is_taken_with_a_word(
    text: str, shown: str, tmp_path: Path
) -> None:
    _, notes = dropped(tmp_path / "a.sh", text.replace("CALL", CALL.lstrip()))
    assert notes.keys() == {"max_length"}
    texts = [note.text for note in import_config(tmp_path / "a.sh").of("approximated")]
    assert any(f"{shown}, which is not followed; taken as if" in text for text in texts)


def test_the_call_that_is_certain_counts(tmp_path: Path) -> None:
    call = "swift sft --model a/b --dataset org/chats --use_hf true"
    text, notes = dropped(
        tmp_path / "a.sh",
        f"if [ $STAGE = 1 ]; then\n  {call} --lora_rank 4\nfi\n{call} --lora_rank 64\n",
    )
    assert ("r: 64" in text, notes.keys()) == (True, {"line 2"})


def test_a_value_that_is_set_behind_a_function_is_not_certain_in_it(tmp_path: Path) -> None:
    _, notes = dropped(tmp_path / "a.sh", f"X=1\nrun() {{{CALL}}}\nX=2\nrun")
    assert "is set behind the call too" in notes["max_length"]


def test_sources_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        "N=1\nsource env.sh\nsource .venv/bin/activate\nswift sft --model a/b --dataset org/chats --use_hf true\n"
    )
    notes = {note.key: note.text for note in import_config(file).of("approximated")}
    assert notes["line 2"] == notes["line 3"] == "source: what it sets is not known"


VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet "
    "actor_rollout_ref.model.path=a/b "
)


def test_a_step_of_verl_has_no_more_prompts_than_are_asked(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        f"{VERL} data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=256"
    )
    result = import_config(file)
    assert "global_batch_size: 64" in result.text
    assert "steps_per_generation" not in {note.key for note in result.of("approximated")}
    file.write_text(f"{VERL} data.train_batch_size=64")
    assert "global_batch_size: 64" in import_config(file).text


def test_prompts_with_images_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(f"{VERL} data.image_key=images")
    with pytest.raises(ConfigError, match=r"a\.sh:1: data\.image_key: is of prompts with images"):
        import_config(file)


@pytest.mark.parametrize("scale", ["last_round", "last_round+ignore_empty_think"])
def test_answers_that_are_not_trained_there_are_named(tmp_path: Path, scale: str) -> None:
    file = tmp_path / "a.sh"
    file.write_text(f"swift sft --model a/b --dataset org/chats --loss_scale {scale}\n")
    notes = {note.key: note.text for note in import_config(file).of("approximated")}
    assert "in ms-swift only the last" in notes["loss_scale"]
    assert ("weighs the same" in notes["loss_scale"]) == ("+" in scale)


def test_the_key_of_trained_messages_is_known_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    text = (
        "base_model: a/b\nsequence_len: 512\n"
        "datasets: [{path: y, type: chat_template, message_field_training: NAME}]\n"
    )
    file.write_text(text.replace("NAME", "train"))
    notes = {note.key: note.text for note in import_config(file).of("unneeded")}
    assert "`train` in a message" in notes["datasets[0].message_field_training"]
    file.write_text(text.replace("NAME", "learn_it"))
    with pytest.raises(ConfigError) as caught:
        import_config(file)
    assert (
        "a.yml:3: datasets[0].message_field_training: messages of the data say under `learn_it`"
        in str(caught.value)
    )


def test_limits_of_images_say_that_the_model_sees(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "stage: dpo\nmodel_name_or_path: a/b\ndataset: d\nfinetuning_type: lora\nimage_max_pixels: 262144\n"
        "freeze_vision_tower: true\n"
    )
    notes = [note.text for note in import_config(file).notes]
    assert (
        any("preference.images: true" in text for text in notes)
        or "images: true" in import_config(file).text
    )
    assert not any("nothing here says that the model sees" in text for text in notes)


# Options of a script with values that only a running shell knows, and the settings that no default may stand for then.
OPEN = {
    "--max_length ${M[$K]}": "max_length",
    "--warmup_steps $(cat steps) --warmup_ratio 0.1": "warmup",
    "--warmup_ratio ${W%%.*}": "warmup",
    "--per_device_train_batch_size ${B[0]}": "gradient_accumulation_steps",
    "--gradient_accumulation_steps $(nproc | head -1)": "gradient_accumulation_steps",
    "--save_steps `cat steps`": "save_steps",
    "--gradient_accumulation_steps $(expr 64 / $GPUS)": "gradient_accumulation_steps",
    "--max_epochs $(cat epochs) --num_train_epochs ${E[$K]}": "num_train_epochs",
    "--learning_rate $(cat rate) --lr_scheduler_type constant": "learning_rate",
    "--report_to ${T[$K]}": "tracking",
    "--deepspeed ${Z[$K]}": "parallelism",
    "--loss_scale ${!L}": "train_on",
    "--target_modules ${T[@]}": "target_modules",
}


@pytest.mark.parametrize("options", OPEN)
def test_a_value_that_only_a_shell_knows_costs_its_own_key(options: str, tmp_path: Path) -> None:
    call = (
        "swift sft --model a/b --dataset org/chats --use_hf true --tuner_type lora --lora_rank 4 "
    )
    text, notes = dropped(tmp_path / "a.sh", call + options)
    keys = {word.removeprefix("--") for word in options.split() if word.startswith("--")}
    assert notes.keys() == keys - {"lr_scheduler_type"}
    settings = text.split("Not carried over")[0]
    assert "r: 4" in settings
    assert OPEN[options] not in settings


def test_a_key_that_depends_on_an_unknown_one_is_dropped_with_it(tmp_path: Path) -> None:
    coefficient = "actor_rollout_ref.actor.kl_loss_coef"
    switch = "actor_rollout_ref.actor.use_kl_loss"
    text, notes = dropped(
        tmp_path / "a.sh",
        f"B[$K]=8\n{VERL} {switch}=True {coefficient}=$(cat coefficient) data.train_batch_size=${{B[$K]}}",
    )
    # The file sets it, in a form that is not followed.
    assert "does not set" not in notes["data.train_batch_size"]
    assert notes[switch] == f"depends on {coefficient}, whose value only a running shell knows"
    assert "only a running shell knows" in notes[coefficient]
    settings = text.split("Not carried over")[0]
    assert "beta:" not in settings
    assert "batch_size" not in settings


def test_prompts_of_a_step_are_not_counted_from_an_unknown_number(tmp_path: Path) -> None:
    call = (
        "swift rlhf --rlhf_type grpo --model a/b --dataset org/chats --use_hf true --reward_funcs "
    )
    options = " --per_device_train_batch_size ${B[$K]} --gradient_accumulation_steps 4"
    text, notes = dropped(tmp_path / "a.sh", f"{call}accuracy{options}")
    assert "set training.global_batch_size" in notes["gradient_accumulation_steps"]
    assert "batch_size:" not in text.split("Not carried over")[0]
    (tmp_path / "b.sh").write_text(f"{call}$(cat rewards)")
    with pytest.raises(ConfigError, match=r"b\.sh:1: reward_funcs: .* only a running shell knows"):
        import_config(tmp_path / "b.sh")


def test_a_metric_that_evaluations_do_not_have_is_dropped(tmp_path: Path) -> None:
    call = "swift sft --model a/b --dataset org/chats --use_hf true --split_dataset_ratio 0.1"
    metric = "--greater_is_better true --metric_for_best_model"
    text, notes = dropped(tmp_path / "a.sh", f"{call} {metric} rouge-l")
    assert notes.keys() == {"metric_for_best_model", "greater_is_better"}
    assert "evaluations have no such metric" in notes["metric_for_best_model"]
    text, notes = dropped(tmp_path / "a.sh", f"{call} {metric} eval_token_accuracy")
    assert ("metric_for_best_model: eval_token_accuracy" in text, notes) == (True, {})


def test_the_loss_of_routers_that_do_not_learn_is_dropped(tmp_path: Path) -> None:
    call = "megatron sft --model a/b --dataset org/chats --use_hf true --lr 1e-4 --moe_aux_loss_coeff 1e-3"
    text, notes = dropped(tmp_path / "a.sh", f"{call} --tuner_type lora")
    assert notes.keys() == {"moe_aux_loss_coeff"}
    assert "router" not in text.split("Not carried over")[0]
    text, notes = dropped(tmp_path / "a.sh", f"{call} --tuner_type full")
    assert ("router_aux_loss_coef: 0.001" in text, notes) == (True, {})


def test_words_of_a_command_that_belong_to_no_option_are_named(tmp_path: Path) -> None:
    stray = '~trainer.logger $MORE "${ARGS[@]}"'
    _, notes = dropped(tmp_path / "a.sh", f'{VERL} {stray} --config-name mine "$@"')
    words = {"word ~trainer.logger", "word $MORE", "word ${ARGS[@]}", "word $@"}
    assert notes.keys() == words | {"config_name"}
    # What the script is called with is no value of the option before it.
    call = "swift sft --model a/b --dataset org/chats --use_hf true --lora_rank 8"
    text, notes = dropped(tmp_path / "a.sh", f'{call} "${{@:2}}"')
    assert ("r: 8" in text, notes.keys()) == (True, {"word ${@:2}"})


def test_assignments_behind_the_file_of_a_command_count(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: a/b\ndataset: d\nstage: sft\nlearning_rate: 1.0e-4\nlora_rank: 4\n"
    )
    text, notes = dropped(
        tmp_path / "a.sh",
        "llamafactory-cli train run.yaml learning_rate=2e-5 lora_rank=$(cat rank)",
    )
    assert "learning_rate: 2e-5" in text
    assert "only a running shell knows" in notes["lora_rank"]
    assert not any(key.startswith("word") for key in notes)
