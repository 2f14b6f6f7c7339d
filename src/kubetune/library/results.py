"""The result of a run: evaluate it, ask it, export it, report it.

Every call loads the model in this process.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubetune.base.files import StrPath
from kubetune.config.resolved import read_config
from kubetune.config.vllm import require_address
from kubetune.errors import ConfigError
from kubetune.library.run_handle import RunLike, folder_of, folders_of
from kubetune.library.users_functions import Metric

if TYPE_CHECKING:
    from kubetune.result.inference.evaluate_run import Evaluation
    from kubetune.result.publishing.written_export import Export
    from kubetune.result.served.points import ServerCheck

# The messages of a conversation, each with `role` and `content`.
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
    """Return every metric of the task on the run's evaluation data, or on `data`.

    They are written to evaluation.json too. `checkpoint`: best, last or a step. `data`: a path, or a
    text that a run file may have as `data.train`. `predictions`: where to write a classifier's label
    of each row; by default, predictions.jsonl of the run. `model`: the base, if it is in another place
    on this machine. `trust_code`: the digest of code in the run's folder, to allow it from now on; the
    refusal names the digest. `metrics`: your functions that judge the model's answers,
    `function(prompt, answer, reference, record) -> float`; they are called in this process, so every
    function with a name can be used.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, no evaluation data, or
            metrics that do not fit or raise.
        DataError: bad records, or data that do not exist.
        ModelError: the base cannot be loaded.
        EnvironmentFault: the disk is full.
    """
    from kubetune.result.inference.evaluate_run import evaluate_run
    from kubetune.scoring import own_functions

    predictions_file = None
    if predictions:
        predictions_file = Path(predictions)
    return evaluate_run(
        folder_of(run),
        str(checkpoint),
        _text(data),
        predictions_file,
        model=_text(model),
        functions=own_functions.named(metrics),
        trust_code=trust_code,
    )


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
    """Return one answer for each prompt, in order.

    A prompt is a text, which a chat model gets as the user's turn, or a list of messages. `images`: for
    each prompt, the paths of its images. Answers are greedy at temperature 0; otherwise tokens are
    sampled from the most likely ones, which make up `top_p`. `checkpoint`, `model` and `trust_code` are
    those of `evaluate`. Every call loads the model, so one call with many prompts is faster.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, a classifier, or numbers
            that make no sense.
        DataError: prompts that cannot be asked, each with its number. None is answered then.
        ModelError: the base cannot be loaded.
    """
    # A text is a sequence of letters, each of which would be a prompt.
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
    # torch is imported only after everything that can be wrong without it.
    from kubetune.result.inference.answering import Sampling, answer, load_run

    loaded = load_run(folder, str(checkpoint), model=_text(model), trust_code=trust_code)
    paths = None
    if images is not None:
        paths = [list(map(str, images_of_prompt)) for images_of_prompt in images]
    answers = answer(
        loaded,
        prompts,
        Sampling(max_new_tokens, temperature, top_p, seed),
        images=paths,
        batch_size=batch_size,
    )
    # One warning for each prompt, however many parts of it the model does not see.
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
    """Raise ConfigError for numbers that make no sense.

    `written` returns the name of an argument as the user knows it, such as `--top-p`.
    """
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
    """Return a classifier's `predicted` label and `probabilities` by label, for each text.

    A text is one text, or a pair. A reward model returns the `reward` of each answer: a pair of a prompt
    and an answer, or a record with `messages`. `checkpoint`, `model` and `trust_code` are those of
    `evaluate`.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, or no classifier.
        DataError: a reward model got something else than an answer to a prompt.
        ModelError: the base cannot be loaded.
    """
    if isinstance(texts, str):
        raise ConfigError("texts: found one text; expected a list of them, such as [text]")
    folder = folder_of(run)
    config = read_config(folder)
    if not config.classifies:
        raise ConfigError(
            f"{folder} is a run of task {config.task}, no classifier; kubetune.generate asks it"
        )
    from kubetune.result.inference.classify import answer_record, classify_texts, score_answers

    # A classifier takes texts, or pairs of them.
    if config.task == "sequence_classification":
        pairs = [_pair(text) for text in texts]
        return classify_texts(folder, str(checkpoint), pairs, _text(model), trust_code)

    # A reward model takes an answer with its prompt, as a record of the data that it was trained on.
    records = []
    for number, answer in enumerate(texts, 1):
        if isinstance(answer, str):
            raise ConfigError(
                f"texts: number {number} is one text; expected a prompt and its answer, which is scored"
            )
        if isinstance(answer, Mapping):
            record = dict(answer)
        else:
            source = config.data.train[0]
            record = answer_record(folder, source, config.record_kind, *answer)
        records.append((f"texts:{number}", record))

    rewards = score_answers(folder, str(checkpoint), records, _text(model), trust_code)
    return [{"reward": reward} for reward in rewards]


def _pair(text: str | tuple[str, str] | Mapping[str, Any]) -> tuple[str, str | None]:
    """Return what a classifier reads: a text and None, or a pair. Raise ConfigError for a record."""
    if isinstance(text, Mapping):
        raise ConfigError("texts: found a record; expected texts, or pairs of them, as in training")
    if isinstance(text, str):
        return text, None
    return text[0], text[1]


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
    gguf: str | None = None,
    quantize: str | None = None,
    quiet: bool = False,
) -> Export:
    """Write the result as a folder for transformers, PEFT and vLLM, and prove that it is the same model.

    `merged` adds an adapter to the base's weights. `dtype` is that of the weights; by default, the
    base's. `out`: by default, a folder below `exports` of the run. `quiet`: no progress is printed.
    `gguf`: the type of weights of one GGUF file instead, or `adapter`; `quantize`: `fp8`.
    `checkpoint`, `model` and `trust_code` are those of `evaluate`.

    Raises:
        ConfigError: no such run or checkpoint, another base than in training, or arguments that make
            no sense.
        ModelError: the proof failed, or the base cannot be loaded. Nothing is written then.
        EnvironmentFault: the disk is full, or another export of the run goes on.
    """
    from kubetune.result.forms.wanted import WantedExport
    from kubetune.result.publishing.exporting import export_run

    return export_run(
        folder_of(run),
        str(checkpoint),
        WantedExport(
            merged=merged,
            dtype=dtype,
            out=None if out is None else Path(out),
            max_shard_size=max_shard_size,
            gguf=gguf,
            quantize=quantize,
        ),
        device=device,
        model=_text(model),
        trust_code=trust_code,
        tell=_print_nothing if quiet else _print_progress,
    )


def check_server(
    run: RunLike,
    url: str,
    *,
    name: str | None = None,
    timeout: float = 300.0,
) -> ServerCheck:
    """Return whether the server at an address is the model of a run, or of a folder that `export` wrote.

    `name`: what the server calls it; by default, the run's name. `timeout`: seconds for all questions,
    also to a server that is starting. The check has `is_proved`, `reason_against` and its `points`.

    Raises:
        ConfigError: no such run or export, or an address that is none.
        ModelError: the run's model has no next tokens, as a classifier.
        EnvironmentFault: the server does not answer, or what the run keeps is damaged.
    """
    from kubetune.result.served.known_model import known_model
    from kubetune.result.served.server_check import check_served

    require_address(url)
    return check_served(known_model(folder_of(run)), url, name, timeout)


def report(runs: RunLike | Sequence[RunLike], out: StrPath | None = None) -> Path:
    """Write one HTML file on a run, or on several side by side. Return its path.

    The page needs no network. `out`: by default, report.html in the run directory, or comparison.html
    in the current folder.

    Raises:
        ConfigError: no run, or a folder that is no run directory.
        EnvironmentFault: the page cannot be written.
    """
    from kubetune.reporting import write_report

    folders = folders_of(runs)
    if not folders:
        raise ConfigError("report of which run? Nothing was written.")
    if out is None and len(folders) == 1:
        out = folders[0] / "report.html"
    elif out is None:
        out = "comparison.html"
    return write_report(folders, Path(out))


def _text(path: StrPath | None) -> str | None:
    """Return a path as a text, and None as None."""
    if path is None:
        return None
    return str(path)


def _print_nothing(text: str) -> None:
    """Take a line of progress, and leave it at that."""


def _print_progress(text: str) -> None:
    """Print a line of progress."""
    print(f"… {text}", flush=True)
