"""What the JSON files of a run directory hold, as far as pages, lists and verbs rely on it.

A run that was received holds JSON that anybody may have written. So what is parsed is compared with these shapes before
anything is made from it. Keys that are not named here may hold anything, and any key may be missing unless it is
`Required`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Required

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic brings it, and takes no other before Python 3.12

from kubetune.base.files import read_object
from kubetune.errors import EnvironmentFault

_STRICT: Final = ConfigDict(strict=True, extra="allow")
# A larger number than any that a run counts could not be written as a float.
_LARGEST: Final = 2**63

Count = Annotated[int, Field(ge=0, lt=_LARGEST)]
Number = Annotated[float, Field(allow_inf_nan=False)]
MaybeNumber = Number | None
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]
# Lowest and highest length, and how many rows. JSON has lists where Python has tuples.
Bar = Annotated[list[Count], Field(min_length=3, max_length=3)]


@with_config(_STRICT)
class _Source(TypedDict, total=False):
    path: Required[str]
    records: Required[Count]
    rows: Required[Count]
    overlong: Required[Count]
    truncated: Required[Count]
    no_label: Required[Count]
    unusable: Count
    tokens: Required[Count]
    trained_tokens: Required[Count]
    longest: Required[Count]


@with_config(_STRICT)
class _Split(TypedDict, total=False):
    sources: Required[list[_Source]]
    records: Count
    rows: Count
    overlong: Count
    truncated: Count
    no_label: Count
    unusable: Count
    tokens: Count
    trained_tokens: Count
    longest: Count
    lengths: list[Bar] | None
    classes: dict[str, Count]


@with_config(_STRICT)
class _Finding(TypedDict, total=False):
    severity: Required[str]
    line: Required[str]
    id: str
    split: str | None
    sentence: str
    count: Count


@with_config(_STRICT)
class _Data(TypedDict, total=False):
    fingerprint: str
    splits: dict[str, _Split] | None
    findings: list[_Finding] | None


@with_config(_STRICT)
class _Evaluation(TypedDict, total=False):
    confusion: list[list[Count]] | None
    names: list[str]
    checkpoint: str | None
    data: str | None


def _square(values: _Evaluation) -> _Evaluation:
    counts = values.get("confusion") or []
    lengths = {len(row) for row in counts}
    if counts and lengths | {len(values.get("names", []))} != {len(counts)}:
        raise ValueError("confusion: expected a row and a column for each of `names`")
    return values


@with_config(_STRICT)
class _Compared(TypedDict, total=False):
    metric: Required[str]
    before: Required[MaybeNumber]
    after: Required[MaybeNumber]
    before_interval: Interval
    after_interval: Interval
    gained: Count
    lost: Count
    p_value: Number
    test: str


@with_config(_STRICT)
class _Turned(TypedDict, total=False):
    prompt: Required[str]
    reference: Required[str]
    before: Required[str]
    answer: Required[str]
    messages: list[dict[str, Any]]
    tools: list[str]


@with_config(_STRICT)
class _Check(TypedDict, total=False):
    holds: Required[bool]
    message: Required[str]


@with_config(_STRICT)
class _Gate(TypedDict, total=False):
    passed: Required[bool]
    checks: Required[list[_Check]]


@with_config(_STRICT)
class _Verdict(TypedDict, total=False):
    step: Count | None
    base: dict[str, MaybeNumber] | None
    best: dict[str, MaybeNumber] | None
    answers: list[_Compared] | None
    turned: dict[str, dict[str, list[_Turned]]] | None
    lengths: dict[str, list[Bar]] | None
    gate: _Gate | None


@with_config(_STRICT)
class _Benchmarks(TypedDict, total=False):
    step: Count | None
    compared: list[_Compared] | None


@with_config(_STRICT)
class _Throughput(TypedDict, total=False):
    tokens_per_second: MaybeNumber
    trained_tokens_per_second: MaybeNumber
    tflops_per_device: MaybeNumber
    peak_tflops: MaybeNumber
    peak_source: str | None
    mfu: MaybeNumber
    counted: str


def _explained(speed: _Throughput) -> _Throughput:
    # The sentence on a share says what it is a share of.
    if speed.get("mfu") is not None:
        missing = [
            key
            for key in ("tflops_per_device", "peak_tflops", "peak_source")
            if speed.get(key) is None
        ]
        if missing:
            raise ValueError(f"mfu: expected {' and '.join(missing)} beside it")
    return speed


@with_config(_STRICT)
class _ActualMemory(TypedDict, total=False):
    forecast_bytes: Required[Count | None]
    measured_bytes: Required[Count]
    relative_error: Required[MaybeNumber]


@with_config(_STRICT)
class _ActualHours(TypedDict, total=False):
    forecast: Required[MaybeNumber]
    step_hours: Required[Number]
    total_hours: Required[Number]
    relative_error: Required[MaybeNumber]
    source: Required[str]


@with_config(_STRICT)
class _ActualPrice(TypedDict, total=False):
    forecast: Required[MaybeNumber]
    steps: Required[Number]
    total: Required[Number]
    relative_error: Required[MaybeNumber]
    per_device_hour: Required[Number]


@with_config(_STRICT)
class _Actuals(TypedDict, total=False):
    memory: _ActualMemory | None
    hours: _ActualHours | None
    price: _ActualPrice | None


@with_config(_STRICT)
class _Preflight(TypedDict, total=False):
    forecast_bytes: Count | None
    measured_bytes: Required[Count]
    tokens: Required[Count]


@with_config(_STRICT)
class _Runaway(TypedDict, total=False):
    first: Required[Number]
    last: Required[Number]
    steps: Required[Count]


@with_config(_STRICT)
class _NothingLearnt(TypedDict, total=False):
    answers: Required[Count]
    reward: Required[MaybeNumber]
    unjudged: bool


@with_config(_STRICT)
class _Report(TypedDict, total=False):
    steps: Count
    seconds: MaybeNumber
    tokens: Count
    trained_tokens: Count
    peak_memory_bytes: Count | None
    throughput: Annotated[_Throughput, AfterValidator(_explained)] | None
    loss_runaway: _Runaway | None
    nothing_learnt: _NothingLearnt | None
    data_fingerprint: str
    config_sha256: str
    versions: dict[str, str] | None
    finished: str
    preflight: _Preflight | None
    actuals: _Actuals | None


@with_config(_STRICT)
class _Experts(TypedDict, total=False):
    steps: Required[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    layers: Required[dict[str, Annotated[list[Count], Field(min_length=1)]]]
    dropped_tokens: Count | None


@with_config(_STRICT)
class _Plan(TypedDict, total=False):
    num_steps: Count


@with_config(_STRICT)
class _BaseEvaluation(TypedDict, total=False):
    # A metric of a model that has not learned yet may be infinite.
    metrics: Required[dict[str, float | None]]
    functions: str


@with_config(_STRICT)
class _Tracking(TypedDict, total=False):
    uri: Required[str]
    run_id: str
    claim: str


@with_config(_STRICT)
class _State(TypedDict, total=False):
    step: Required[Count]
    samples: Count
    tokens: Count
    trained_tokens: Count
    seconds: Number
    saved_step: Count
    evaluated_step: Count
    best_step: Count | None
    best_value: float | None
    evaluations_without_improvement: Count
    steps_above_threshold: Count
    loss_scale: Number
    steps_since_overflow: Count
    data_fingerprint: str
    global_batch_size: Count
    global_batch_tokens: Count | None


@with_config(_STRICT)
class _Hang(TypedDict, total=False):
    rank: Count
    phase: str
    step: Count | None
    seconds: Number
    time: str


@with_config(_STRICT)
class _Machine(TypedDict, total=False):
    gpus: list[Any] | None
    cores: int | None
    memory_bytes: Count | None
    git_commit: str | None
    versions: dict[str, Any] | None


@with_config(_STRICT)
class _Question(TypedDict, total=False):
    messages: Required[list[dict[str, Any]]]
    tools: list[str]


@with_config(_STRICT)
class _KeptRows(TypedDict):
    origin: Required[str]
    turns: Required[dict[str, _Question]]


@with_config(_STRICT)
class _Conversation(TypedDict):
    messages: Required[list[dict[str, Any]]]
    tools: Required[list[Any]]


@with_config(_STRICT)
class _KeptConversations(TypedDict):
    conversations: Required[list[_Conversation]]


@with_config(_STRICT)
class _Event(TypedDict, total=False):
    node: int
    nodes: Count
    processes: Count
    step: int | None
    steps: int | None
    code: int | None
    reason: str
    error: str | None
    machine: _Machine | None


@with_config(_STRICT)
class _GpuLoad(TypedDict, total=False):
    index: Required[int]
    percent: MaybeNumber
    memory_bytes: MaybeNumber


@with_config(_STRICT)
class _Load(TypedDict, total=False):
    step: Required[int]
    cpu_percent: MaybeNumber
    memory_bytes: MaybeNumber
    gpus: list[_GpuLoad]


# By the name of the file.
_FILES: Final[dict[str, TypeAdapter[Any]]] = {
    "conversations.json": TypeAdapter(_KeptConversations),
    "data.json": TypeAdapter(_Data),
    "evaluation.json": TypeAdapter(Annotated[_Evaluation, AfterValidator(_square)]),
    "verdict.json": TypeAdapter(_Verdict),
    "benchmarks.json": TypeAdapter(_Benchmarks),
    "report.json": TypeAdapter(_Report),
    "experts.json": TypeAdapter(_Experts),
    "hang.json": TypeAdapter(_Hang),
    "plan.json": TypeAdapter(_Plan),
    "base_evaluation.json": TypeAdapter(_BaseEvaluation),
    "tracking.json": TypeAdapter(_Tracking),
    "state.json": TypeAdapter(_State),
}
_EVENT: Final = TypeAdapter(_Event)
# What lies in the header of a safetensors file of a run, by what it belongs to.
_HEADERS: Final[dict[str, TypeAdapter[Any]]] = {
    "kept rows": TypeAdapter(_KeptRows),
    # Start and length of each.
    "optimizer shards": TypeAdapter(
        list[Annotated[list[Count], Field(min_length=2, max_length=2)]],
        config=ConfigDict(strict=True),
    ),
}
_LOAD: Final = TypeAdapter(_Load)


def read(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file of a run. Raise EnvironmentFault, also where it holds what no run writes."""
    values = read_object(path)
    shape = _FILES.get(path.name)
    if shape is None:
        return values
    problem = _problem(shape, values)
    if problem is not None:
        raise EnvironmentFault(
            f"{path} is damaged ({problem}); expected what kubetune wrote. Put it back from a copy, such as a mirror's"
        )
    return values


def is_event(line: object) -> bool:
    """True if a line of events.jsonl has the shape of one."""
    return _fits(_EVENT, line)


def is_load(line: object) -> bool:
    """True if a line of load.jsonl has the shape of one."""
    return _fits(_LOAD, line)


def problem_of_header(kind: str, values: object) -> str | None:
    """Return what is wrong with the values in a header of this kind, None where nothing is."""
    return _problem(_HEADERS[kind], values)


def _fits(shape: TypeAdapter[Any], values: object) -> bool:
    return _problem(shape, values) is None


def _problem(shape: TypeAdapter[Any], values: object) -> str | None:
    """Return the place of the first problem and what is wrong: `findings.0.severity: Field required`."""
    try:
        shape.validate_python(values)
    except RecursionError:
        return "it is nested too deeply"
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        return f"{place[:200]}: {problem['msg']}" if place else problem["msg"]
    return None
