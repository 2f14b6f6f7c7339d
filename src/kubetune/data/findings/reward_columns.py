"""Finds the columns and right answers that reward functions of the user need, by the text of their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kubetune.config.code_files import depends_on, read_code, signature_of
from kubetune.config.schema import RewardConfig, SourceConfig
from kubetune.data.column_words import in_list
from kubetune.data.findings.finding import Finding
from kubetune.data.reading.record_problems import Problems
from kubetune.data.reading.taken import read_taken
from kubetune.data.reward_forms import NOT_HANDED_OVER, RIGHT_ANSWER, columns_of, form_of
from kubetune.errors import ConfigError


def without_columns(
    sources: Sequence[SourceConfig],
    rewards: Sequence[RewardConfig],
    seed: int,
) -> Iterator[Finding]:
    """Yield an error for each function that needs columns which no record of training has together.

    Records are read until each function has found its columns, so mostly the first alone.
    """
    waiting = {}
    for reward in rewards:
        columns = _columns_of(reward)
        if columns:
            waiting[reward.title] = columns
    known: set[str] = set()
    held: set[str] = set()
    for source in sources:
        if not waiting:
            return
        for record in read_taken(source, seed, Problems(0)):
            held |= {*record.value, *source.columns}
            names = {*record.value, *source.columns} - NOT_HANDED_OVER
            known |= names
            for title, columns in list(waiting.items()):
                if names.issuperset(columns):
                    del waiting[title]
            if not waiting:
                return
    # What has the name of an argument is given as that, and not as a column.
    alone = "" if known else " alone"
    for title, columns in waiting.items():
        missing = [name for name in columns if name not in known] or list(columns)
        sentence = (
            f"rewards: {title} needs {in_list(missing)}, and no record of data.train has such a column; they have "
            f"{in_list(sorted(known or held))}{alone}"
        )
        advice = "Name the parameter as the column, or give it a default"
        yield Finding("no_columns", "error", "train", sentence, advice=advice)


def compares(reward: RewardConfig) -> bool:
    """True if a reward compares with the right answer of a record. Of a function its text has to show it."""
    if not reward.is_code:
        return reward.compares
    assert reward.file is not None
    assert reward.function is not None
    try:
        code = read_code("rewards", Path(reward.file).expanduser())
        signature = signature_of(code, reward.function)
        if signature is None:
            return False
        name = RIGHT_ANSWER.get(form_of(signature.parameters, reward.function))
        if name is None or name not in signature.parameters:
            return False
        return depends_on(code, reward.function, name)
    except (ConfigError, ValueError):
        # The verdict on the run file says what is wrong with the file, or the function.
        return False


def _columns_of(reward: RewardConfig) -> tuple[str, ...]:
    """Return the columns that a function needs by the text of its file; nothing where the text leaves it open."""
    if not reward.is_code:
        return ()
    assert reward.file is not None
    assert reward.function is not None
    try:
        code = read_code("rewards", Path(reward.file).expanduser())
        signature = signature_of(code, reward.function)
        return () if signature is None else columns_of(signature, reward.function)
    except (ConfigError, ValueError):
        return ()  # the verdict on the run file says what is wrong with the file, or the function
