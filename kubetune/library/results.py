"""The result of a run: evaluated, asked, exported, reported. Models are loaded in this process, anew by each call."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.files import StrPath
from kubetune.config.load import read_config
from kubetune.errors import ConfigError
from kubetune.library.functions import Metric
from kubetune.library.runs import RunLike, folder_of, folders_of

if TYPE_CHECKING:
    from kubetune.result.inference.evaluate import Evaluation
    from kubetune.result.publishing.export import Export

CLASSIFIER = "sequence_classification"

Messages = Sequence[dict[str, Any]]


def evaluate(
    run: RunLike,
    *,
    checkpoint: str | int = "best",
    data: StrPath | None = None,
    predictions: StrPath | None = None,
    model: StrPath | None = None,
    metrics: Sequence[Metric] = (),
    trust_code: str | None = None,
) -> Evaluation:
    """Every metric of the task, on the run's evaluation data or on `data`; also written to evaluation.json.

    `checkpoint`: best, last or a step. `data`: a path, or as text what a run file may have as `data.train`.
    `predictions`: where to write what a classifier says of each row; left out, predictions.jsonl of the run.
    `model`: the base, where that lies elsewhere here. `trust_code`: the digest of code that the run brings, which its
    refusal names, to have it run here from now on. `metrics`: functions of yours that judge the model's answers,
    `function(prompt, answer, reference, record) -> float`; they are called here, so any one with a name will do.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, no evaluation data, or metrics that do
            not fit or raise.
        DataError: bad records, or data that are nowhere.
        ModelError: the base cannot be had.
        EnvironmentFault: the disk is full.
    """
    from kubetune.result.inference.evaluate import evaluate_run
    from kubetune.scoring import own_functions

    to = Path(predictions) if predictions else None
    functions = own_functions.named(metrics)
    return evaluate_run(
        folder_of(run), str(checkpoint), _text(data), to, model=_text(model), functions=functions,
        trust_code=trust_code,
    )  # fmt: skip


def generate(
    run: RunLike,
    prompts: Sequence[str | Messages],
    *,
    images: Sequence[Sequence[StrPath]] | None = None,
    checkpoint: str | int = "best",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    model: StrPath | None = None,
    trust_code: str | None = None,
) -> list[str]:
    """One answer for each prompt, in order: a text, which is the user's turn for a chat model, or a list of messages.

    `images`: for each prompt, the paths of those that it is about. Answers are greedy at temperature 0, else drawn from
    the `top_p` likeliest share. `checkpoint`, `model` and `trust_code` are those of `evaluate`. The model is loaded once
    a call: better one call with many prompts than many calls.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, a classifier, or numbers without sense.
        DataError: prompts that cannot be asked, each with its number. Nothing is answered then.
        ModelError: the base cannot be had.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts: found one text; expected a list of them, such as [text]")
    if images is not None and len(images) != len(prompts):
        raise ConfigError(
            f"images: found {len(images)} lists for {len(prompts)} prompts; expected one for each"
        )
    require_sampling(max_new_tokens, temperature, top_p)
    folder = folder_of(run)
    if read_config(folder).classifies:
        raise ConfigError(
            f"{folder} is a classifier, which writes no answers; kubetune.classify asks it"
        )
    from kubetune.result.inference.generate import Sampling, answer, load_run

    loaded = load_run(folder, str(checkpoint), model=_text(model), trust_code=trust_code)
    paths = [[str(path) for path in own] for own in images] if images is not None else None
    answers = answer(
        loaded,
        prompts,
        Sampling(max_new_tokens, temperature, top_p, seed),
        images=paths,
        batch_size=batch_size,
    )
    for number, prompt in enumerate(prompts, 1):
        for unseen in loaded.left_out(prompt)[:1]:
            warnings.warn(f"prompt:{number}: {unseen}, which the model does not see", stacklevel=2)
    return answers


def require_sampling(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    written: Callable[[str], str] = lambda name: name,
) -> None:
    """Raise ConfigError for numbers that make no sense. `written`: the name of an argument as the user knows it."""
    problems = []
    if max_new_tokens < 1:
        problems.append(f"{written('max_new_tokens')} is {max_new_tokens}; expected at least 1")
    if not 0 <= temperature < math.inf:
        problems.append(f"{written('temperature')} is {temperature:g}; expected 0 or more")
    if not 0 < top_p <= 1:
        problems.append(f"{written('top_p')} is {top_p:g}; expected more than 0 and at most 1")
    if problems:
        raise ConfigError(problems)


def classify(
    run: RunLike,
    texts: Sequence[str | tuple[str, str] | Mapping[str, Any]],
    *,
    checkpoint: str | int = "best",
    model: StrPath | None = None,
    trust_code: str | None = None,
) -> list[dict[str, Any]]:
    """Verdict of a classifier on each text, or pair of texts: `predicted`, and `probabilities` by label.

    Of a reward model, the `reward` of each answer: a prompt with it, or a record with `messages`.

    `checkpoint`, `model` and `trust_code` are those of `evaluate`.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, or a run that is no classifier.
        DataError: what a reward model is given is no answer to a prompt.
        ModelError: the base cannot be had.
    """
    if isinstance(texts, str):
        raise ConfigError("texts: found one text; expected a list of them, such as [text]")
    folder = folder_of(run)
    if not (config := read_config(folder)).classifies:
        raise ConfigError(
            f"{folder} is a run of task {config.task}, no classifier; kubetune.generate asks it"
        )
    from kubetune.result.inference.classify import answer_record, classify_texts, score_answers

    if config.task == CLASSIFIER:
        pairs: list[tuple[str, str | None]] = []
        for text in texts:
            if isinstance(text, Mapping):
                raise ConfigError(
                    "texts: found a record; expected texts, or pairs of them, as in training"
                )
            pairs.append((text, None) if isinstance(text, str) else (text[0], text[1]))
        return classify_texts(folder, str(checkpoint), pairs, _text(model), trust_code)
    records = []
    for number, answer in enumerate(texts, 1):
        if isinstance(answer, str):
            raise ConfigError(
                f"texts: number {number} is one text; expected a prompt and its answer, which is scored"
            )
        record = (
            dict(answer) if isinstance(answer, Mapping) else answer_record(folder, config, *answer)
        )
        records.append((f"texts:{number}", record))
    return [
        {"reward": reward}
        for reward in score_answers(folder, str(checkpoint), records, _text(model), trust_code)
    ]


def export(
    run: RunLike,
    *,
    checkpoint: str | int = "best",
    merged: bool = False,
    dtype: str | None = None,
    out: StrPath | None = None,
    device: str | None = None,
    max_shard_size: str = "5GB",
    model: StrPath | None = None,
    trust_code: str | None = None,
    quiet: bool = False,
) -> Export:
    """Write the result as a folder that transformers, PEFT and vLLM load, and prove that it is the same model.

    `merged` puts an adapter into the base's weights. `dtype` is that of the weights; left out, the base's own.
    `out`: left out, a folder below `exports` of the run. `quiet`: what goes on is not printed. `checkpoint`,
    `model` and `trust_code` are those of `evaluate`.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, or what makes no sense.
        ModelError: the proof failed, or the base cannot be had. Nothing is written then.
        EnvironmentFault: the disk is full, or another export of the run goes on.
    """
    from kubetune.result.publishing.export import export_run

    return export_run(
        folder_of(run), str(checkpoint), merged=merged, dtype=dtype, out=out, device=device,
        max_shard_size=max_shard_size, model=_text(model), trust_code=trust_code, tell=(lambda _: None) if quiet else _tell,
    )  # fmt: skip


def report(runs: RunLike | Sequence[RunLike], out: StrPath | None = None) -> Path:
    """Write one HTML file on a run, or on several side by side, that needs no network; returns where it is.

    `out`: left out, report.html in the run directory, or comparison.html in the current folder.

    Raises:
        ConfigError: no run, or a folder that is none.
        EnvironmentFault: the page cannot be written.
    """
    from kubetune.reporting import write_report

    folders = folders_of(runs)
    if not folders:
        raise ConfigError("report of which run? Nothing was written.")
    default = Path("comparison.html") if len(folders) > 1 else folders[0] / "report.html"
    return write_report(folders, Path(out) if out is not None else default)


def _text(path: StrPath | None) -> str | None:
    return None if path is None else str(path)


def _tell(text: str) -> None:
    print(f"… {text}", flush=True)
