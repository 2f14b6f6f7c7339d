"""Shell scripts for `kubetune import`, read as bash runs them; what only a running shell knows is named, never guessed."""

import subprocess
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.errors import ConfigError
from kubetune.plugins.importers import import_config
from kubetune.plugins.importers.shell import read_script

# Each calls `swift` with words that a shell can tell from the script alone.
SURE = {
    "plain": "A=1\nswift sft --a $A --b '$A' --c \"x $A y\"  # a comment",
    "default": "SIZE=${SIZE:-small} B=${C-d}\nswift sft --a ${SIZE} --b $B --c ${SIZE:+is set} --d ${NO:+set}",
    "assigned default": ": ${RANK:=32}\nswift sft --lora_rank $RANK",
    "if": "S=small\nif [ $S = small ]; then M=a; elif [ $S = large ]; then M=b; else M=c; fi\nswift sft --m $M",
    "elif": 'S=large\nif [ "$S" == small ]; then M=a; elif [ "$S" == large ]; then M=b; else M=c; fi\nswift sft --m $M',
    "else": "S=x\nif [[ $S == small ]]; then\n  M=a\nelse\n  M=c\nfi\nswift sft --m $M",
    "nested": "A=1\nif true; then if [ $A -gt 3 ]; then M=a; else M=b; fi; fi\nswift sft --m $M",
    "if false": "if false; then\n  swift sft --m wrong\nfi\nswift sft --m right",
    "negated": 'if ! [ a = b ]; then M=1; fi\nif [ ! -z "$M" ]; then N=2; fi\nswift sft --m $M --n $N',
    "and, or": '[ a = a ] && M=1 || M=2\n[ a = b ] && N=1 || N=2\n[ -z "$M" ] && M=3\nswift sft --m $M --n $N',
    "two conditions": "A=1\nif [ $A = 1 ] && [ $A != 2 ]; then M=1; fi\nif [[ $A == 2 || $A == 1 ]]; then N=2; fi\n"
    "swift sft --m $M --n $N",
    "arithmetic": "A=64 B=4\nN=$((A / B)) M=$(( (A+2) * $B - 1 ))\n(( N > 8 )) && K=big\nswift sft --n $N --m $M --k $K "
    "--j $((7 / 2))",
    "array": 'ARGS=(--a 1\n  --b "x y")  # words\nARGS+=(--c 3)\nswift sft "${ARGS[@]}" --d 4',
    "words in a text": 'EXTRA="--a 1 --b 2"\nEXTRA+=" --c 3"\nswift sft $EXTRA --d "$EXTRA"',
    "exit": 'if [ a = b ]; then\n  echo usage\n  exit 1\nfi\nswift sft --a 1\nexit 0\nswift sft --a 2',
    "subshell": "A=1\n(A=2; cd /; swift sft --a $A)\nswift sft --a $A",
    "heredoc": "A=1\ncat > /dev/null <<END\nA=2\nswift sft --a wrong\nEND\nswift sft --a $A",
    "quotes": "swift sft --a \"it's\" --b 'say \"x\"' --c a\\ b --d \"\\$5\" --e $'x\\ty'",
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
    script = read_script(SURE[name])
    read = []
    for command in script.commands:
        words = [word.text for word in command.words]
        if words[0] == "swift" or ("swift" in words[:-1] and "=" in words[0]):
            assert not command.condition
            assert not any(word.why for word in command.words)
            read.append(words[words.index("swift") + 1 :])
    assert called
    assert read == called


# The lines before a call of `swift sft --model a/b --dataset org/chats … --x $X`, and why its key is not carried over.
UNSURE = {
    "branches": ("if [ -d data ]; then X=1; else X=2; fi", "is set in branches (lines 1)"),
    "one branch": ("X=1\nif [ $NODE = 0 ]; then\n  X=2\nfi", "is set in branches (lines 1, 3)"),
    "list": ("X=1\n[ -d data ] && X=2", "is set in branches (lines 1, 2)"),
    "case": ("case $1 in a) X=1 ;; b) X=2 ;; esac", "may be set in a `case` (line 1), which is not followed"),
    "while": ("X=1\nwhile read line; do X=2; done < file", "may be set in a loop (line 2), which is not followed"),
    "for": ("for X in 1 2; do :; done", "may be set in a loop (line 1), which is not followed"),
    "function": ("f() { X=1; }\nf", "may be set in a function (line 1), which is not followed"),
    "function with a default": ("X=\nf() { : ${X:=1}; }\nf", "may be set in a function (line 2)"),
    "function that reads": ("X=1\nf() { source env.sh; }\nf", "may be set in a function (line 2)"),
    "pattern": ("M=Qwen3\nif [[ $M == Qwen* ]]; then X=1; fi", "is set in branches (line 2)"),
    "unset": ("X=1\nunset X", "is changed by `unset` (line 2)"),
    "command": ("X=1\nX=$(python rank.py)", "is set by a command (line 2)"),
    "command in backticks": ("X=`python rank.py`", "is set by a command (line 1)"),
    "read": ("X=1\nread X", "is set by `read` (line 2)"),
    "source": ("X=1\nsource env.sh", "which `source` may set anew (line 2)"),
    "eval": ('X=1\neval "$SETTINGS"', "which `eval` may set anew (line 2)"),
    "array in a branch": ("X=(1)\n[ -d x ] && X=(2)", "is set in branches (lines 1, 2)"),
    "array or not": ("[ -d x ] && X=(2)", "is set in branches (line 1)"),
    "source in a branch": ("X=1\n[ -f env.sh ] && source env.sh", "is set in branches (line 1)"),
    "argument": ("X=$1", "holds $1, which the file does not set"),
    "not set": ("", "holds $X, which the file does not set"),
    "through another": ("if [ -d x ]; then Y=1; else Y=2; fi\nX=$Y", "is set in branches (line 1)"),
    "calculated": ("if [ -d x ]; then Y=1; else Y=2; fi\nX=$((Y * 2))", "is set by a command (line 2)"),
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
def test_what_branches_decide_is_dropped_by_name(name: str, tmp_path: Path) -> None:
    before, why = UNSURE[name]
    text, notes = dropped(tmp_path / "a.sh", before + CALL)
    assert why.replace("(lines 1)", "(line 1)") in notes["max_length"]
    assert "max_length" not in text.split("Not carried over")[0]


def test_a_branch_that_ends_the_script_decides_nothing(tmp_path: Path) -> None:
    text, notes = dropped(
        tmp_path / "a.sh", 'X=8\nif [ -z "$1" ]; then\n  X=9\n  echo usage\n  exit 1\nfi' + CALL
    )
    assert ("max_length: 8" in text, notes) == (True, {})


def test_branches_that_agree_decide_nothing(tmp_path: Path) -> None:
    text, notes = dropped(tmp_path / "a.sh", "if [ -d x ]; then X=8; else X=8; fi" + CALL)
    assert ("max_length: 8" in text, notes) == (True, {})


def test_options_that_a_branch_adds_are_named(tmp_path: Path) -> None:
    script = (
        "ARGS=(--learning_rate 1e-4 --lora_rank 8)\nif [ $USE_MORE = 1 ]; then\n"
        '  ARGS+=(--learning_rate 3e-4 --packing true)\nfi\nMORE=""\n[ -d x ] && MORE="--max_length 99 --bf16 true"\n'
        'swift sft --model a/b --dataset org/chats --use_hf true --tuner_type lora "${ARGS[@]}" $MORE\n'
    )
    text, notes = dropped(tmp_path / "a.sh", script)
    assert notes.keys() == {"learning_rate", "packing", "max_length", "bf16"}
    assert "is set in branches (lines 1, 3)" in notes["learning_rate"]
    assert "r: 8" in text
    assert "3e-4" not in text
    settings = text.split("Not carried over")[0]
    assert not any(word in settings for word in ("max_length", "packed", "packing", "dtype"))


def test_a_model_that_branches_choose_is_refused_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        "if [ $1 = small ]; then\n  M=a/small\nelse\n  M=a/large\nfi\nswift sft --model $M --dataset org/chats\n"
    )
    with pytest.raises(ConfigError) as caught:
        import_config(file)
    assert (
        "a.sh:6: model: $M holds $M, which is set in branches (lines 2, 4); put its value there"
        in str(caught.value)
    )


def test_a_call_within_a_branch_is_taken_with_a_word(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    call = "swift sft --model a/b --dataset org/chats --use_hf true"
    file.write_text(f"if [ $NODE_RANK = 0 ]; then\n  {call}\nfi\n")
    result = import_config(file)
    notes = {note.key: note.text for note in result.of("approximated")}
    assert "is called only where [ $NODE_RANK = 0 ]" in notes["line 2"]
    file.write_text(f"if [ $NODE_RANK = 0 ]; then\n  {call}\nelse\n  {call} --lora_rank 4\nfi\n")
    with pytest.raises(ConfigError) as caught:
        import_config(file)
    assert "line 2 (where [ $NODE_RANK = 0 ]), line 4 (where not [ $NODE_RANK = 0 ])" in str(
        caught.value
    )
    # The call that is certain counts, whatever stands in branches before it.
    file.write_text(f"if [ $STAGE = 1 ]; then\n  {call} --lora_rank 4\nfi\n{call} --lora_rank 64\n")
    result = import_config(file)
    assert "r: 64" in result.text
    assert "line 2" in {note.key for note in result.of("dropped")}


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ('swift() { command swift "$@" --lora_rank 9; }', "swift"),
        ('function run { "$@" --lora_rank 9; }\nrun \\', "run"),
        ("shopt -s expand_aliases\nalias swift='nice swift'", "swift"),
    ],
)
def test_a_call_of_a_function_is_refused(before: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    call = "swift sft --model a/b --dataset org/chats --use_hf true --lora_rank 4\n"
    file.write_text(f"{before}\n{call}")
    with pytest.raises(ConfigError, match=f"calls `{name}`, a function or an alias"):
        import_config(file)
    # A function named as the subcommand is another one.
    file.write_text(f"sft() {{ echo; }}\n{call}")
    assert "r: 4" in import_config(file).text


def test_options_that_ifs_splits_are_dropped_by_name(tmp_path: Path) -> None:
    script = "IFS=,\nA=--max_length,4,--num_train_epochs,5\n"
    call = "swift sft --model a/b --dataset org/chats --use_hf true $A\n"
    text, notes = dropped(tmp_path / "a.sh", script + call)
    assert {"max_length", "num_train_epochs"} <= notes.keys()
    settings = text.split("Not carried over")[0]
    assert "max_length" not in settings
    assert "epochs" not in settings


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("case a in", "line 1: cannot be parsed"),
        ("die() { exit 1; }\ndie", "line 2: die: ends the script"),
    ],
)
def test_a_script_without_a_call_says_what_stands_before(
    before: str, why: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.sh"
    file.write_text(before + CALL)
    with pytest.raises(ConfigError, match=f"calls no command that is known; .*; {why}"):
        import_config(file)


@pytest.mark.parametrize("rest", ["--lora_rank 4", "trainer.lora_rank=4", "+trainer.lora_rank=4"])
def test_arguments_that_no_shell_joins_are_named(rest: str, tmp_path: Path) -> None:
    """Published scripts have it: `\\` with a comment behind it ends the command."""
    file = tmp_path / "a.sh"
    call = "swift sft --model a/b --dataset org/chats --use_hf true"
    file.write_text(f"{call} \\  # [4, 8]\n  {rest} \\\n --max_length 9\n")
    notes = {note.key: note.text for note in import_config(file).of("approximated")}
    assert notes["line 2"].startswith(f"{rest.split()[0]}: begins a command of its own")


def test_what_is_not_followed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text(
        "N=1\nsource env.sh\nsource .venv/bin/activate\nswift sft --model a/b --dataset org/chats --use_hf true\n"
    )
    notes = {note.key: note.text for note in import_config(file).of("approximated")}
    assert notes["line 2"] == notes["line 3"] == "source: what it sets is not known"


def test_the_last_branch_is_not_taken_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A published script chooses its model by a size that has a default."""
    script = (
        'SIZE=${SIZE:-"7b"}\nif [ "$SIZE" = "7b" ]; then\n  MODEL=lab/model-7B\n  LR=1e-6\nelif [ "$SIZE" = "72b" ]; then\n'
        "  MODEL=lab/model-72B\n  LR=5e-7\nelse\n  exit 1\nfi\n"
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "data.train_files=$HOME/sums.parquet actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.optim.lr=$LR\n"
    )
    (tmp_path / "a.sh").write_text(script)
    assert cli.main(["import", str(tmp_path / "a.sh")]) == 0
    text = capsys.readouterr().out
    assert "model: lab/model-7B" in text
    assert "72B" not in text
    assert "learning_rate: 1e-6" in text
    assert "path: ~/sums.parquet" in text or "train: ~/sums.parquet" in text


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
    assert "there only the last" in notes["loss_scale"]
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
        f"declare -A B\nB[$K]=8\n{VERL} {switch}=True {coefficient}=$(cat coefficient) data.train_batch_size=${{B[$K]}}",
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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train() {\n  local X=$1\nCALL}\ntrain 4", "a function calls it (line 1)"),
        ("for X in 1; do\nCALLdone", "a loop calls it (line 1)"),
        ("case $1 in\n a) CALL ;;\nesac", "a `case` calls it (line 1)"),
    ],
)
def test_a_call_within_what_is_not_followed_is_taken_with_a_word(
    text: str, shown: str, tmp_path: Path
) -> None:
    _, notes = dropped(tmp_path / "a.sh", text.replace("CALL", CALL))
    assert notes.keys() == {"max_length"}
    result = import_config(tmp_path / "a.sh")
    texts = [note.text for note in result.of("approximated")]
    assert any(f"is called only where {shown}" in text for text in texts)
