"""The plan of a run with all that is known before it starts: rows, tokens, memory, hours and price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from kubetune.base.gpus import visible_gpus
from kubetune.base.humanize import counted
from kubetune.config.schema import Config
from kubetune.data.findings.finding import Finding
from kubetune.data.inspect.estimate import is_upper_bound, load_here, makes_data, taken_by
from kubetune.data.inspect.known_findings import known_findings
from kubetune.data.inspect.lengths import Lengths
from kubetune.errors import ConfigError, DataError, KubetuneError, ModelError
from kubetune.library import cost_text, plan_text
from kubetune.library.measured_choices import with_measured_choices
from kubetune.library.plans import DataSize, measure_data
from kubetune.library.verdict.run_problems import (
    problems_of,
    require_none,
    sentences,
    warnings_of,
)
from kubetune.plan.base_model import positions_of
from kubetune.plan.costs import Costs, DataTotals, DeviceFacts, RunWeights, costs_of
from kubetune.plan.devices import device_bytes, gpu_here, missing_gpus
from kubetune.plan.fitting import Remedies, remedies
from kubetune.plan.linears import Trainable, trained_by_part
from kubetune.plan.model_shapes import ModelFiles
from kubetune.plan.plan import Plan, make_plan
from kubetune.rundir.starts import day_of


@dataclass(frozen=True)
class PlanForecast:
    """A plan with all that is known about the run before it starts."""

    config: Config  # with the values that this machine chooses for keys that are `auto`
    plan: Plan
    model_files: ModelFiles
    lengths: Lengths | None
    choices: Sequence[str]  # each of those values, as a sentence
    costs: Costs
    changes: Remedies  # each alone makes a run fit that does not
    findings: tuple[Finding, ...] | None  # about the data; None if some rows were not read
    problems: tuple[str, ...]  # what keeps the run from training, as far as it shows before
    warnings: Sequence[str]  # what it lacks on this machine now: GPUs, servers that nobody reaches
    has_gpus: bool  # False for a run that wants GPUs which this machine has not

    @property
    def is_looked_at(self) -> bool:
        """True unless some rows that are here were not looked at, since there are many."""
        return self.findings is not None or self.lengths is None

    @property
    def is_in_doubt(self) -> bool:
        """True if more of the first rows are left out than all may be: whether it can train, a check of all tells."""
        if self.is_looked_at or self.lengths is None:
            return False
        return self.lengths.lost_share > self.config.data.max_lost_share

    def headline(self) -> str:
        """Return the three things that most people look for: `34 steps · 457 MiB a process · 2 min`."""
        if self.problems:
            return f"not ready to train: {counted(len(self.problems), 'problem')}"
        # As `describe` has it: `at most 34 (1 epoch)`.
        steps = "steps unknown"
        if self.plan.num_steps:
            steps = dict(self.describe())["steps"].partition(" (")[0] + " steps"
        memory = cost_text.memory_word(self.plan.device, self.costs.memory)
        return f"{steps} · {memory} · {cost_text.time_word(self.costs)}"

    def describe(self) -> cost_text.LabelledLines:
        """Yield everything as labelled lines."""
        config = self.config
        positions = positions_of(config.task, self.model_files)
        yield from plan_text.describe(config, self.plan, self.lengths, self.findings, positions)
        for text in self.warnings:
            yield "this machine", f"warning: {text}"
        if config.kubernetes is not None:
            place = plan_text.output_on_cluster(config.name, config.model.path)
            yield "on the cluster", place
        for text in self.choices:
            yield "chosen here", text
        weights = self.model_files.weights
        yield from cost_text.lines(config, self.plan, weights, self.costs, self.changes)
        for text in plan_text.on_data(self.lengths, self.findings, config.data):
            yield "data", text

    def to_json(self) -> dict[str, Any]:
        """Return the same facts as numbers."""
        findings = None
        if self.findings is not None:
            findings = [finding.to_json() for finding in self.findings]
        config = self.config
        made_by_pod = makes_data(config.kubernetes)
        rows_at_most = is_upper_bound(config.data.train, made_by_pod=made_by_pod)
        trained = None
        if self.model_files.weights is not None:
            trainable = Trainable(config.lora, config.sight)
            trained = trained_by_part(trainable, self.model_files.weights)
        return {
            **self.plan.model_dump(mode="json"),
            "problems": list(self.problems),
            "warnings": list(self.warnings),
            "measured": self.choices,
            "rows_at_most": rows_at_most,
            "findings": findings,
            "trained_by_part": trained,
            **self.costs.to_json(),
        }


def forecast_run(config: Config, environ: Mapping[str, str]) -> PlanForecast:
    """Plan a run. This reads data but no weights.

    Raise ConfigError, DataError or ModelError for a run of which no plan can be made. What else keeps it from
    training is in the forecast's `problems`.
    """
    here = config.kubernetes is None
    model_files = ModelFiles(config.model.path, environ)
    problems = problems_of(config, environ, here=here, model_files=model_files)
    # Lengths and findings both need the tokenizer; it is loaded once.
    load_tokenizer = cache(partial(load_here, config.model, config.data, day_of(config.data)))
    refused: list[KubetuneError] = list(problems)
    try:
        # Where all rows are looked at, what is wrong with them is said in the words of `data check`.
        findings = known_findings(config, environ, load_tokenizer)
        errors = [finding.line for finding in findings or () if finding.severity == "error"]
        if errors:
            refused.append(DataError(errors))
        data = measure_data(config, environ, model_files, load_tokenizer)
        # Only the first of many rows were looked at, and no plan can be made from none.
        if findings is None and data.lengths is not None and data.lengths.refusal:
            raise DataError(data.lengths.refusal)
    except (ConfigError, DataError, ModelError) as error:
        # Without these there is no plan, so all problems are said at once.
        if not any(isinstance(known, DataError) for known in refused):
            refused.append(error)
        require_none(refused)
    try:
        return _forecast(config, environ, model_files, data, findings, tuple(sentences(refused)))
    except ConfigError as error:
        # Batches that cannot be.
        require_none([*refused, error])
        raise


def _forecast(
    config: Config,
    environ: Mapping[str, str],
    model_files: ModelFiles,
    data: DataSize,
    findings: tuple[Finding, ...] | None,
    problems: tuple[str, ...],
) -> PlanForecast:
    """Return plan and costs of a run on data of this size."""
    plan = plan_of(data, config, visible_gpus(environ))

    # The choices come after the plan, which says on what device the run is, and before the forecast of memory.
    gpu = gpu_here(plan.device)
    config, choices = with_measured_choices(config, plan, model_files.weights, data.tokens, gpu)
    totals = totals_of(data, config, plan)
    device = DeviceFacts(gpu, device_bytes(config.compute, plan))
    models = RunWeights.of(config, environ, model_files.weights)
    costs = costs_of(config, plan, totals, device, models)
    changes: Remedies = ()
    if device.memory_bytes is not None and costs.memory is not None and not costs.memory.fits:
        changes = remedies(config, plan, models, device.memory_bytes, totals.longest)
    return PlanForecast(
        config=config,
        plan=plan,
        model_files=model_files,
        lengths=data.lengths,
        choices=choices,
        costs=costs,
        changes=changes,
        findings=findings,
        problems=problems,
        warnings=warnings_of(config, environ),
        has_gpus=config.kubernetes is not None or not missing_gpus(config.compute, environ),
    )


def plan_of(data: DataSize, config: Config, gpus: int = 0) -> Plan:
    """Return the plan of a config on data of this size. `gpus`: how many are visible."""
    saved_share = 0.0
    if data.lengths is not None:
        saved_share = data.lengths.saved_share
    return make_plan(
        config, data.rows, data.eval_rows, gpus, tokens=data.tokens, saved_share=saved_share
    )


def totals_of(data: DataSize, config: Config, plan: Plan) -> DataTotals:
    """Return what costs follow from, of data of this size."""
    longest = None
    if data.lengths is not None:
        longest = data.lengths.longest_of(data.rows)
    forget_rows = 0
    for source in config.sources["forget"]:
        forget_rows += taken_by(source, made_by_pod=makes_data(config.kubernetes)) or 0
    return DataTotals(_tokens_of_steps(plan, data.tokens), longest, forget_rows)


def _tokens_of_steps(plan: Plan, tokens_per_epoch: int | None) -> int | None:
    """Return the tokens of all steps, or None if they are not known."""
    if tokens_per_epoch is None or not plan.steps_per_epoch:
        return None
    return round(tokens_per_epoch * plan.num_steps / plan.steps_per_epoch)
