"""The data that a run learns from, and how they become rows: `data`."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kubetune.config.hub_names import todays_names
from kubetune.config.schema.base import AsTuple, Section, section_of


class SourceConfig(Section):
    """A source of records: a file, folder or hub data set, how it is read, and its share of an epoch."""

    path: str = Field(
        min_length=1,
        description="File, folder or hub data set; `path#500` takes 500 seeded samples.",
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="How often this source appears in each epoch: 0.5 is a seeded half, 2 is twice. An evaluation has the "
        "same mix of sources.",
    )
    format: Literal[
        "auto",
        "messages",
        "prompt_completion",
        "text",
        "sharegpt",
        "alpaca",
        "question_answer",
        "labelled",
    ] = Field("auto", description="Shape of the records; `auto` looks at the first one.")
    # Headers of tables have blanks at their ends, as `question , answer` has.
    columns: dict[str, Annotated[str, StringConstraints(strip_whitespace=False)]] = Field(
        default_factory=dict,
        description="Expected name: name in the file, such as `{prompt: question}`.",
    )
    subset: str | None = Field(
        None,
        description="Configuration name of a hub data set, such as `sst2` of `glue`; `path: glue/sst2` says both.",
    )
    split: str = Field(
        "train", description="Split of a hub data set; slices such as `train[:1%]` work."
    )
    range: Annotated[tuple[int, int] | None, AsTuple] = Field(
        None, description="Rows `[first, end)` of the source after shuffling with the data seed."
    )

    @model_validator(mode="before")
    @classmethod
    def _named_as_today(cls, value: Any) -> Any:
        return todays_names(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _range_holds_rows(self) -> SourceConfig:
        if self.range and not 0 <= self.range[0] < self.range[1]:
            raise ValueError(
                f"range {list(self.range)} holds no row; expected [first, end) with 0 <= first < end"
            )
        return self


as_source = section_of("path")


def _as_sources(value: Any) -> Any:
    if isinstance(value, (str, dict)):
        value = [value]
    return tuple(map(as_source, value)) if isinstance(value, (list, tuple)) else value


def _as_eval(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float)) else _as_sources(value)


SourcesAsWritten = str | SourceConfig | tuple[str | SourceConfig, ...]
Sources = Annotated[
    tuple[SourceConfig, ...],
    BeforeValidator(_as_sources, json_schema_input_type=SourcesAsWritten),
    Field(min_length=1),
]
Share = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(Section):
    """Data to learn from and to evaluate on, and how they become rows."""

    # What is learned from, and what is evaluated on.
    train: Sources = Field(description="One source or a list of sources.")
    eval: Annotated[
        Share | tuple[SourceConfig, ...] | None,
        BeforeValidator(_as_eval, json_schema_input_type=Share | SourcesAsWritten | None),
    ] = Field(
        None, description="Share of `train` to hold out (`0.05`, seeded), or separate sources."
    )
    # What becomes of records that do not fit.
    max_length: int = Field(2048, ge=8, le=10_000_000, description="Longest sequence in tokens.")
    overlong: Literal["drop", "truncate", "split", "error"] = Field(
        "drop",
        description="What becomes of rows longer than `max_length`; `truncate` by default for classifiers. `split`: a plain "
        "text becomes several rows and loses nothing; a long row of another kind is refused.",
    )
    max_lost_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Stop before training when more than this share of the rows would be left out.",
    )
    unusable_pairs: Literal["error", "drop"] = Field(
        "error",
        description="What becomes of pairs whose answers are equal, empty, or to different prompts: refused, with their "
        "lines, or left out and counted (`max_lost_share`).",
    )
    # How rows share micro-batches. Neither changes losses or gradients.
    packing: bool = Field(
        True,
        description="Fill micro-batches with whole sequences up to `per_device_train_batch_size × max_length` tokens. The "
        "sequences stay isolated, so the loss is the same. `false`: every micro-batch has the same number of sequences.",
    )
    share_prefixes: Literal["auto", False] = Field(
        "auto",
        description="Compute the beginning that several rows of a micro-batch share once; loss and gradients stay the "
        "same. `auto`: where packed rows share at least 2 % of their tokens and the model allows it; `false`: never.",
    )
    # How texts become ids and labels.
    train_on: Literal["assistant", "all"] = Field(
        "assistant", description="`assistant`: loss on answers only. `all`: loss on every token."
    )
    add_special_tokens: bool = Field(
        True,
        description="Let the tokenizer add its own BOS (and the like) to `text` and `prompt`+`completion` rows.",
    )
    date: str | None = Field(
        None,
        description="Day for chat templates that write today's date, such as `2026-11-22`. Left out: the day of the run's "
        "first start, which later starts keep.",
    )
    # Where and by how many processes rows are prepared.
    num_proc: int | None = Field(
        None, ge=1, description="Processes that tokenise; left out: all cores."
    )
    cache: str | None = Field(
        None, description="Folder of the prepared data; left out: `~/.cache/kubetune`."
    )

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                datetime.date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"found {value!r}; expected a day such as 2026-11-22") from None
        return value


def data_of_task(data: Any, info: ValidationInfo) -> Any:
    """Let classifiers truncate long texts by default, so that an evaluation counts every row."""
    if info.data.get("task") != "sequence_classification" or not isinstance(data, dict):
        return data
    return {"overlong": "truncate", **data}
