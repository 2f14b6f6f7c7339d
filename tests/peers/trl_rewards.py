r"""TRL's own rewards of mathematics, recorded for tests/run/test_grpo_mathematics.py.

    PYTHON -m tests.peers.trl_rewards tests/peers/trl_rewards.json

PYTHON: of an environment that has trl 1.16.0 and math-verify 0.9.0. Each group is a solution with answers to it, each
with a length in tokens. Recorded is what TRL's functions say of the answers, by the settings that ours has too.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
from pathlib import Path
from typing import Any

Group = dict[str, Any]

# Ways to write a solution, and answers that say the same or nearly so.
VALUES = {
    r"\frac{1}{2}": ["0.5", r"\frac12", r"\dfrac{2}{4}", r"50\%", r"\frac{1}{3}", "1/2"],
    "1/2": ["0.5", r"\frac{1}{2}", "2"],
    "42": [
        "42",
        "42.0",
        "42.",
        "6 \\cdot 7",
        "41",
        r"42\text{ apples}",
        "42 cm",
        r"\text{forty-two}",
    ],
    "1,234.5": ["1234.5", "1,234.5", "1{,}234.5", "1234"],
    "$-7$": ["-7", "7", r"\left(-7\right)", r"-\frac{14}{2}"],
    r"x^2 - 1": ["(x-1)(x+1)", "x^2-1", "x^2+1", r"-\left(1-x^2\right)"],
    r"\sqrt{8}": [r"2\sqrt{2}", "2.828427", "2.8284271247461903", r"\sqrt 8"],
    r"\boxed{\pi/4}": [r"\frac{\pi}{4}", "0.785398", r"\arctan 1", "45^\\circ"],
    r"$x = 3$": ["3", "x=3", "x = 4", r"\{3\}"],
    r"\{1, 2, 3\}": ["1, 2, 3", r"\{3, 2, 1\}", r"\{1, 2\}", "1,2 \\text{ and } 3"],
    r"(1, 2)": ["(1,2)", "(2,1)", "[1,2]", "1,2"],
    r"[0, \infty)": [r"[0,\infty)", r"(0,\infty)", r"x \ge 0", r"x > 0"],
    r"x \in (-1, 1)": [r"-1 < x < 1", "(-1,1)", r"-1 \le x \le 1"],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": [
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\begin{bmatrix} 1 & 2 \\ 3 & 5 \end{bmatrix}",
    ],
    r"2 + 3i": ["3i + 2", "2+3i", "2-3i"],
    r"\log_2 8": ["3", r"\frac{\ln 8}{\ln 2}"],
    r"$\text{B}$": ["B", r"\text{B}", r"\textbf{(B)}", "C"],
    r"y = 2x + 1": ["2x+1", "y=2x+1", "y = 1 + 2x", "2x + 1 = y", "y=2x"],
    r"\frac{\sqrt{3}}{3}": [r"\frac{1}{\sqrt 3}", "0.57735", r"\tan 30^\circ"],
    "1e-3": ["0.001", r"10^{-3}", r"\frac{1}{1000}"],
    # What has no formula is not judged.
    "no formula": ["1", "no formula"],
    "": ["1"],
}
# Ways to say an answer; only some mark it so that it is read.
PHRASES = (
    r"So it is $\boxed{%s}$.",
    r"\boxed{%s}",
    "The final answer is $%s$. I hope it is correct.",
    "The answer is %s",
    "$%s$",
    r"First \boxed{99}, but then \boxed{%s}",
    r"<think>Maybe \boxed{99}.</think>Therefore \boxed{%s}",
    r"<think>\boxed{%s}",
    r"<think>Once.</think><think>Twice.</think> \[ %s \]",
    r"Once </think>\boxed{99} and again </think>\boxed{%s}",
    r"It is \boxed{%s}. The final answer is $99$.",
    r"The final answer is $%s$. It is \boxed{\frac{}{}}",
    r"<think>So</think>no, <answer>\boxed{%s}</answer>",
)
DELIMITERS = (None, ["<answer>", "</think>"], ["never"])
LONGEST = 120
COSINES = (
    {"max_len": 100},
    {"max_len": 64, "min_value_wrong": -2.0, "max_value_wrong": 0.0},
    {"max_len": 7, "min_value_correct": 0.25, "max_value_correct": 3.0, "min_value_wrong": -0.125},
)


def groups() -> list[Group]:
    """Return each solution with its answers, said in ways that are drawn, and with lengths."""
    draw = random.Random(0)
    drawn = []
    for solution, values in VALUES.items():
        texts = []
        for value in values:
            for phrase in draw.sample(PHRASES, 4):
                texts.append(phrase % value)
        texts.append("")
        lengths = [draw.randrange(LONGEST) for _ in texts]
        drawn.append({"solution": solution, "texts": texts, "lengths": lengths})
    return drawn


def judged(group: Group) -> Group:
    """Return the group with TRL's rewards of its answers."""
    from trl.rewards import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward

    completions = []
    for text in group["texts"]:
        completions.append([{"role": "assistant", "content": text}])
    solutions = [group["solution"]] * len(completions)
    ids = [[1] * length for length in group["lengths"]]

    reasoning = []
    for delimiters in DELIMITERS:
        reasoning.append(reasoning_accuracy_reward(completions, solutions, delimiters))
    cosine = []
    for settings in COSINES:
        scaled = get_cosine_scaled_reward(**settings)
        cosine.append(scaled(completions, solutions, ids))
    accuracy = accuracy_reward(completions, solutions)
    return {**group, "accuracy": accuracy, "reasoning": reasoning, "cosine": cosine}


def main() -> None:
    """Write the groups, one a line, with the versions that judged them."""
    versions = {}
    for name in ("trl", "math-verify", "latex2sympy2_extended", "sympy"):
        versions[name] = importlib.metadata.version(name)
    lines = []
    for group in groups():
        lines.append(json.dumps(judged(group)))
    head = {"versions": versions, "delimiters": DELIMITERS, "cosines": COSINES}
    text = json.dumps(head)[:-1] + ', "groups": [\n' + ",\n".join(lines) + "\n]}\n"
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
