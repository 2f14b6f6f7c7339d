"""Rewards of your own for examples/grpo.yaml: functions as TRL has them, called with all answers to a prompt."""


def short_last_line(prompts, completions, **columns):
    """Reward an answer whose last line holds nothing but a number."""
    rewards = []
    for completion in completions:
        text = completion[0]["content"]
        lines = text.strip().splitlines()
        rewards.append(float(bool(lines) and lines[-1].strip().isdigit()))
    return rewards
