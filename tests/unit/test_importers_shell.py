"""A value that a script's walk calls certain is the one that bash gives, whatever the script does: bash is asked."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kubetune.plugins.importers.shell import UnreadableError, is_known, read_script

BASH = shutil.which("bash")
TRAINING = "train --learning_rate $LR"

# Each sets LR before the training, in a way that reads easily wrong.
SCRIPTS = [
    "[[ $HOME == /root ]] && LR=1e-3 || LR=2e-3",
    'if [ "$HOME" = /root ]; then LR=1e-3; else LR=2e-3; fi',
    'if [ "$USER" = bob ]; then LR=1e-3; else LR=2e-3; fi',
    "case $PWD in /tmp*) LR=1e-3;; *) LR=2e-3;; esac",
    "LR=1e-3\nif (( EUID == 0 )); then LR=2e-3; fi",
    "LR=1e-3\nif [ $UID -eq 0 ]; then LR=2e-3; fi",
    "LR=1e-3\n[[ $OSTYPE == linux* ]] && LR=2e-3",
    "LR=1e-3\n[ $# -gt 0 ] && LR=$1",
    "LR=1e-3\nnvidia-smi\n[ $? -eq 0 ] && LR=2e-3",
    "LR=$'é\\x4a\\ea\\cx\\u41'",
    "# LR=1\\\nLR=2",
    "LR=1\\\\\nLR=2",
    "LR=1\\\\\\\n2",
    "LR=1\ncat <<'E'\na\\\nE\nLR=2\nE\n",
    "LR=1\ncat <<E\na\\\nE\nLR=2\nE\n",
    "LR=${A:-1\\\n2}",
    "LR=$((1\\\n2))",
    "LR=1\\\n",
    "LR=8\nlet LR/=2",
    "LR=8\nlet LR*=2",
    "LR=8\nlet LR+=2",
    "LR=8\nlet 'LR = LR / 2'",
    "LR=8\n((LR/=2))",
    "LR=8\n((LR>>=1))",
    "LR=8\ndeclare -n ref=LR\nref=6",
    "LR=8\nf(){ local -n r=$1; r=6; }\nf LR",
    "LR=8\nf(){ declare -g LR=6; }\nf",
    "LR=8\ntypeset LR=6",
    "declare -i LR\nLR=4+4",
    "readonly LR=8\nLR=9",
    "declare -l LR\nLR=1E-3",
    "LR=8\ntrap 'LR=7' DEBUG",
    'LR=8\nX=LR\neval "$X=7"',
    "LR=8\nprintf -v LR 7",
    "LR=8\nX=LR\nprintf -v $X 7",
    "LR=8\nread LR <<< 7",
    "LR=8\nread -r LR <<E\n7\nE",
    "for ((LR=1; LR<5; LR++)); do :; done",
    "LR=1\nwhile [ $LR -lt 5 ]; do LR=$((LR+1)); done",
    "set -- 5 6\nLR=$2",
    "set -- 5 6\nshift\nLR=$1",
    "LR=8\ngetopts x: LR",
    "LR=8\nunset LR\nLR=${LR:-3}",
    "LR=\n: ${LR:=5}",
    "A=5\nX=A\nLR=${!X}",
    "shopt -s expand_aliases\nalias s='LR=9;'\nLR=8\ns true",
    "LR=8\nf(){ return 0; LR=9; }\nf",
    "LR=8\nf(){ [ -f x ] && return 0; LR=9; }\nf",
    "LR=8\nfor i in 1; do [ -f x ] && break; LR=9; done",
    "LR=8\nfor i in 1 2; do [ $i = 2 ] && continue; LR=$i; done",
    "LR=8\necho a | { read x; LR=9; }",
    "shopt -s lastpipe\nLR=8\necho 9 | read LR",
    "LR=8\n( LR=9 )",
    "LR=8\n{ LR=9; } &",
    "LR=8\nf(){ LR=9; }\nif [ -f x ]; then f(){ LR=10; }; fi\nf",
    "LR=8\nf(){ LR=9; }\nunset -f f\nf",
    "LR=8\ntrap 'LR=9' ERR\nfalse",
    "LR=8\nset -u",
    "LR=8\nLR=9 true",
    "LR=8\nf(){ X=$LR; }\nLR=9 f\nLR=$X",
    "LR=8\nexport LR=9",
    "A=(1 2 3)\nA[1]=9\nLR=${A[1]}",
    "declare -A A=([x]=1 [y]=2)\nK=y\nLR=${A[$K]}",
    "X=abc1e-3\nLR=${X:3}",
    "X=1e_3\nLR=${X/_/-}",
    "shopt -s nocasematch\nLR=8\n[[ ABC == abc ]] && LR=9",
    "shopt -s nocasematch\nM=ABC\ncase $M in abc) LR=9;; *) LR=8;; esac",
    "shopt -s extglob\nM=7b\ncase $M in +([0-9])b) LR=9;; *) LR=8;; esac",
    "M=7b\nif [[ $M == @(7|8)b ]]; then LR=9; else LR=8; fi",
    "M=7b\ncase $M in [[:digit:]]*) LR=9;; *) LR=8;; esac",
    "if [[ 10 < 9 ]]; then LR=9; else LR=8; fi",
    "if [[ 1+1 -eq 2 ]]; then LR=9; else LR=8; fi",
    "if [ a = a -a b = c ]; then LR=9; else LR=8; fi",
    "if [ ! a = b ]; then LR=9; else LR=8; fi",
    "E=\nif [ $E = a ]; then LR=9; else LR=8; fi",
    "E=\nif [ -n $E ]; then LR=9; else LR=8; fi",
    "LR=$((010))",
    "if [[ -v LR ]]; then LR=9; else LR=8; fi",
    "if [[ -v CI ]]; then LR=9; else LR=8; fi",
    "IFS=,\nX=1,2\nset -- $X\nLR=$2",
    'if [ -n "$BASH_VERSION" ]; then LR=9; else LR=8; fi',
    "if [[ $PATH == *conda* ]]; then LR=9; else LR=8; fi",
    "if [[ $LANG == C ]]; then LR=9; else LR=8; fi",
    "true(){ return 1; }\nif true; then LR=9; else LR=8; fi",
    "test(){ return 1; }\nif test a = a; then LR=9; else LR=8; fi",
    "LR=8\n. ./env.sh",
    "LR=8\nbuiltin source ./env.sh",
    "LR=8\ncommand . ./env.sh",
    "LR=1\nuntil (( LR > 4 )); do (( LR++ )); done",
    "LR=8 # LR=9",
    "LR=8\n: \\\nLR=9",
    "LR=8\nmapfile LR < f",
    "LR=8\nreadarray -t LR < f",
    'X=LR\nLR=8\ndeclare "$X=9"',
    'X=LR\nLR=8\nexport "$X=9"',
    'LR=8\nf(){ declare -g "$1=$2"; }\nf LR 9',
    "X=LR\nLR=8\n(( $X=9 ))",
    "LR=8\n: $((LR=9))",
    "LR=8\nA=(1 2)\n: ${A[LR=1]}",
    "LR=8\nf(){ LR=9; }\nf | cat",
    "LR=8\nf(){ LR=9; }\nX=$(f)",
    "LR=8\nf() ( LR=9 )\nf",
    "LR=8\nf(){ false; }\nf || LR=9",
    "LR=8\ntime LR=9",
    "LR=8\n! LR=9",
    "LR=8\nif echo a | grep -q b; then LR=9; fi",
    "LR=8\ncommand -v nvidia-smi >/dev/null && LR=9",
    "LR=8\nf(){ LR=9; }\nf &",
    "BS=32; GPUS=8; (( BS /= GPUS )); LR=$BS",
    "shopt -s nocasematch; M=7B; case $M in 7b) LR=9;; *) LR=8;; esac",
    'LR=8; setup(){ [ -n "$FAST" ] && return; LR=64; }; setup',
    "LR=8; for i in 1; do if [ -f x ]; then continue; fi; LR=9; done",
    "f(){ shift; LR=$1; }; f 8 9",
    "LR=8; f(){ if true; then return; fi; LR=9; }; f",
    "while true; do LR=3; break; LR=4; done",
    "E=; [[ -n $E ]] && LR=9 || LR=8",
    "LR=8; [ ! a = b ] && LR=9",
    "LR=8\nE=\n[ $E != a ] && LR=9",
    "LR=8\nE='a b'\n[ $E != c ] && LR=9",
    "LR=\nf(){ : ${LR:=9}; }\nf",
    "LR=8\nf(){ . ./env.sh; }\nf",
    "LR=8\nf(){ exit 0; }\nif [ -f x ]; then f; fi",
    "LR=8\nfor LR in 1 2; do :; done",
    "LR=8\nselect LR in a b; do break; done",
    "LR=8\nf(){ unset LR; }\nf\nLR=${LR:-3}",
    'LR=8\nX=LR\nunset "$X"\nLR=${LR:-3}',
    'f(){ unset "$1"; }\nLR=8\nf LR\nLR=${LR:-3}',
    "LR=8; N=LR; unset $N; LR=${LR-5}",
    'LR=8; if [ "$LR" = "8" -o -f x ]; then LR=9; fi',
    "LR=$(expr 10/2)",
    "LR=$((9223372036854775807 / 3))",
    "LR=$((9223372036854775807 + 1))",
    "A=(1 2); A[0]=5; LR=$A",
    "LR=(5); LR+=6",
    "LR=(5); LR+=(6)",
    "LR=(5); [ -d / ] && LR=(6)",
    "LR=(); LR=${LR-3}",
    "LR=5; LR+=(6)",
    'LR=8; e="read LR"; $e <<< 5',
    "LR=8; if LR=$(false); then LR=9; else LR=10; fi",
    'LR="8\\\n9"',
    "LR=8; trap 'LR=9' USR1; kill -USR1 $$",
    "LR=8; trap 'LR=9' CHLD; /bin/true",
    "LR=8; RANDOM=1; LR=$RANDOM",
    "UID=5; LR=$UID",
    'IFS=5; A="151"; LR=$A',
    "LR=$((-7 / 2))",
    "LR=$(((3 - 10) / 2))",
    "LR=$(((3 - 10) % 4))",
    # Patterns, numbers in another base, words of a value.
    "LR=2e-5; M=7B-x; if [[ $M == 7B* ]]; then LR=3e-5; fi",
    'LR=2e-5; M=lora; [[ $M == "lo"* ]] && LR=3e-5',
    "LR=2e-5; M=lora; S=lo; [[ $M == ${S}* ]] && LR=3e-5",
    "LR=2e-5; M=1.5b; [[ $M != 1* ]] || LR=3e-5",
    "LR=2e-5; P='a*'; [[ ab == $P ]] && LR=3e-5",
    'LR=2e-5; case abc in "a*") LR=3e-5;; esac',
    "LR=2e-5; case abc in a*) LR=3e-5;& b) LR=4e-5;; esac",
    "LR=2e-5; LR=$((16#a))e-6",
    "LR=2e-5; [[ 010 -eq 8 ]] && LR=3e-5",
    "LR=2e-5; [[ 010 -eq 10 ]] && LR=3e-5",
    "LR=2e-5; X=' a'; [ $X = a ] && LR=3e-5",
    "LR=2e-5; [a = a] && LR=3e-5",
    # Assignments that take place otherwise than they look.
    "LR=2e-5; IFS=: read a LR <<< 1:3e-5",
    "LR=2e-5; export A=3e-5 LR=$A",
    "LR=2e-5; declare X=1 Y=$((X+1)); LR=${Y}e-5",
    "LR=2e-5; local LR=3e-5 2>/dev/null",
    "LR=2e-5; LR[0]=3e-5",
    "LR=(2e-5 3e-5)",
    # Names that an option holds.
    "LR=8; printf -vLR 7",
    "LR=8; read -raLR <<< 7",
    "O=-v; LR=8; printf $O LR 7",
    'O=-vLR; LR=8; printf "$O" 7',
    'F="%s"; LR=8; printf "$F" "$LR"',
    "O=$(echo -v); LR=8; printf ${O} LR 7",
    "LR=8; mapfile -C 'LR=7 #' -c 1 A <<< x",
    # What is read and not run.
    "LR=8; set -n",
    "LR=8; set -eo noexec; LR=9",
    "LR=8; sleep 0 & wait -npLR; LR=${LR:+7}",
    # Calculations where none is written.
    "LR=8; S=abcdefghij; X=${S:LR=7:1}",
    "LR=8; S=abcdefghij; X=${S:0:LR=7}",
    "LR=8; S=abcdefghij; X=${S: LR++ :1}",
    "LR=8; set -- a b; X=${@:LR=1}",
    'LR=8; declare -i K="LR=7"',
    "LR=8; declare -i K; K=LR=7",
    'LR=8; declare -i K; S="LR=7"; K=$S',
    # What stays in a shell that keeps to POSIX.
    "set -o posix; LR=8; LR=7 :",
    "set -o posix; LR=8; LR=7 export A=1",
    'set -o posix; A=1 LR=8; LR=7 set -- "$A"',
    "set -o posix; A=151; IFS=5 :; LR=$A",
    # Ends that are not `exit`.
    "LR=8; [ -f x ] || { LR=9; die; }; die() { exit 1; }",
    "die() { return; exit 1; }; LR=8; die; LR=9",
]
# Of these everything is certain.
PLAIN = [
    "LR=8",
    "LR=8; LR=9",
    "A=8; LR=$A",
    'LR=8; [ -z "$1" ] || echo usage; f(){ if [ -z "$1" ]; then return 1; fi; }; f x',
    "set -e; set -x; trap 'echo bye' EXIT; LR=8",
    "f(){ X=$1; }; f 9; for M in a b; do Y=$M; done; LR=8",
    "shopt -s nullglob; LR=8",
    "LR=$(expr 64 / 4)",
    "trap 'echo bye' EXIT INT; LR=8",
    "LR=1e-\\\n4",
    "LR=1e-\\\n\\\n4",
    'A=1\nLR="${A}\\\n5\\\n6"',
    "L\\\nR=1e-4",
    "A=5\nAB=6\nLR=$A\\\nB",
    "exec 2>/dev/null; LR=8",
    "A=1 LR=8\nexport B=2",
    'B=7; N=$((B * 2)); S="LR=7"; X=${S:0:1} Y=${Z:-LR=7}; LR=8',
    "die() { echo $1; exit 1; }; [ -d . ] || die no; LR=8",
    "LR=8; printf '%s' $LR",
    "set -euo pipefail; set -- -n; LR=8",
    "A=1 B=2  # two\nLR=1\ncase a in b) A=2;; esac",
    "A=1 LR=2\nB=3 true",
    "A=1 B=2\nLR=3\nLR=4 true",
]


# Arguments of one command, behind a line that sets variables.
SET = "A=1; AB=2; S=' a b '; N="
WORDS = [
    "'a\\\nb'",
    "$'a\\\nb'",
    "$'a\\tb\\\\c'",
    "$'é'",
    '"a\\\n b"',
    '"a \\\nb"',
    '"$A\\\n $A \\\n$A"',
    "\"a\\\n$(echo 'b\\\nc')\"",
    "a\\\n#'b\\\nc' # d\\",
    "a\\\n' b\\\nc'\\\n\"d\\\ne\"",
    "a\\\n\\\n\\\nb c \\\n d\\\n",
    "a\\\\\\\nb",
    "--lr=1e-\\\n4 --bf\\\n16",
    "$A\\\nB ${A\\\nB} ${A\\\n:-3}",
    "x$S x\"$S\" $S$S y$S'z' ${S}w",
    "$N x$N $N$N $N'' x$N'y' $N$S ''",
    "'{a,b}' \"{a,b}\" \\{a,b\\} {a} {} x{}y '{\"a\":1,\"b\":2}' {'a,b'}",
]


def certain_value(script: str) -> str | None:
    """Return what is read of --learning_rate; None if that is not certain."""
    try:
        result = read_script(f"{script}\n{TRAINING}\n")
    except UnreadableError:
        return None
    words = [word for command in result.commands if not command.problem for word in command.words]
    if "train" not in words or words[-1] == "--learning_rate":
        return None
    return words[-1] if is_known(words[-1]) else None


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("script", SCRIPTS)
def test_no_value_is_certain_that_bash_does_not_give(script: str, tmp_path: Path) -> None:
    told = certain_value(script)
    if told is not None:
        assert told == value_of_bash(script, tmp_path)


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("script", PLAIN)
def test_plain_scripts_stay_certain(script: str, tmp_path: Path) -> None:
    assert certain_value(script) == value_of_bash(script, tmp_path)


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("written", WORDS)
def test_words_are_those_of_bash(written: str, tmp_path: Path) -> None:
    [command] = read_script(f"{SET}\ntrain {written}\n").commands
    words = list(command.words[1:])
    script = f"{SET}\nprintf '%s\\0' {written}\n"
    done = subprocess.run([str(BASH), "-c", script], capture_output=True, text=True, timeout=60)
    by_bash = done.stdout.split("\0")[:-1]
    assert words == by_bash or any(not is_known(word) for word in words)


@pytest.mark.parametrize(
    "word", ["data/{a,b}.jsonl", "{q,v}_proj", "1e-{4,5}", "{1..3}", "x{$A,b}"]
)
def test_braces_that_stand_for_several_words_are_a_problem_of_the_call(word: str) -> None:
    (command,) = read_script(f"trl sft --learning_rate {word} --x y\n").commands
    assert command.problem == f"{word} stands for several words of a shell"


def test_a_word_goes_on_in_the_next_line() -> None:
    """Lines keep their numbers, so that messages name those of the file."""
    script = "train --lr 1e-\\\n4 \\\n  --bf\\\n16\nexec other\n"
    first, second = read_script(script).commands
    assert list(first.words) == ["train", "--lr", "1e-4", "--bf16"]
    assert (first.line, second.line) == (1, 5)


def value_of_bash(script: str, folder: Path) -> str:
    """Return LR behind a script that runs in an empty folder."""
    (folder / "script.sh").write_text(f"{script}\nprintf '<<%s>>' $LR >&3\n")
    command = f"{BASH} script.sh 3>value >/dev/null 2>/dev/null </dev/null"
    subprocess.run(command, shell=True, cwd=folder, timeout=60, check=False)
    return (folder / "value").read_text().removeprefix("<<").removesuffix(">>")
