"""Ways to train a run on given GPUs: which fit, what they change, what would make others fit, and the file written."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kubetune import cli
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.config.schema.quantities import quantity, quantity_bytes
from kubetune.errors import ConfigError
from kubetune.library.gpu_pools import gpu_pool
from kubetune.library.measured_choices import with_measured_choices
from kubetune.library.proposed_changes import write_way
from kubetune.plan.costs import Costs, DataTotals, DeviceFacts, RunWeights, costs_of
from kubetune.plan.devices import device_bytes
from kubetune.plan.fitting import decide_parallelism
from kubetune.plan.forecast import forecast
from kubetune.plan.model_shapes import Weights, shapes_of
from kubetune.plan.plan import Plan, make_plan
from kubetune.plan.proposals import (
    GpuPool,
    Proposals,
    RunToPlace,
    Way,
    least_gpu_bytes,
    least_gpus,
    propose,
)
from kubetune.plan.rank_work import RankWork
from kubetune.rundir import metrics
from kubetune.supervisor.run_folder import create_run_dir
from tests.tiny import train_tokenizer
from tests.unit.test_forecast import QWEN3_8B

WEIGHTS = Weights(shapes_of(QWEN3_8B), QWEN3_8B, stated=False)


def run_of(*overrides: str) -> RunToPlace:
    config = load_config(
        None,
        overrides=[
            "model=org/m",
            "data.train=org/d",
            "data.max_length=2048",
            "training.per_device_train_batch_size=8",
            *overrides,
        ],
    )

    def costs(changed: Config, plan: Plan, gpu_bytes: int) -> Costs:
        device = DeviceFacts(None, gpu_bytes)
        return costs_of(changed, plan, DataTotals(None, None), device, RunWeights(WEIGHTS))

    return RunToPlace(config, partial(make_plan), costs)


def asked(gpus: str, *overrides: str) -> tuple[RunToPlace, Proposals]:
    pool = GpuPool.parse(gpus)
    run = run_of(*overrides)
    return run, propose(run, pool)


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "size"),
    [
        ("24GB", 1, 1, 24 * 10**9),
        ("2x24GB", 1, 2, 24 * 10**9),
        ("4x8x80GiB", 4, 8, 80 * 2**30),
        ("8 x 80G", 1, 8, 80 * 10**9),
    ],
)
def test_gpus_are_read(text: str, nodes: int, gpus: int, size: int) -> None:
    assert GpuPool.parse(text) == GpuPool(nodes, gpus, size)


@pytest.mark.parametrize(
    "text", ["", "2", "24", "2x24", "0x24GB", "2x24GB,1x8GB", "2xH100", "-1x24GB", "2x.GB", "2x0GB"]
)
def test_other_gpus_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 2x24GB"):
        GpuPool.parse(text)


def test_what_fits_comes_first_and_other_results_come_after_the_same_one() -> None:
    _, proposals = asked("2x24GB", "lora.r=16")
    order = [(way.fits, way.gives_same) for way in proposals.ways]
    assert order == sorted(order, reverse=True)
    assert {fits for fits, _ in order} == {True}
    assert proposals.best is not None
    assert "quantization" not in proposals.best.changes


def test_a_way_with_fewer_rows_at_a_time_takes_as_many_rows_a_step() -> None:
    run, proposals = asked("2x24GB", "lora.r=16", "training.gradient_accumulation_steps=2")
    way = proposals.best
    assert way is not None
    before = make_plan(run.config, gpus=2)
    assert way.plan.per_device_train_batch_size < before.per_device_train_batch_size
    assert way.plan.global_batch_size == before.global_batch_size == 32
    twice = {
        **way.changes,
        "training.per_device_train_batch_size": 2 * way.plan.per_device_train_batch_size,
    }
    larger = load_config(
        None,
        overrides=[
            "model=org/m",
            "data.train=org/d",
            "data.max_length=2048",
            "lora.r=16",
            "compute.gpus_per_node=2",
            *(f"{key}={value}" for key, value in twice.items() if value is not None),
        ],
    )
    memory = forecast(RankWork.of(larger, make_plan(larger)), WEIGHTS, 24 * 10**9)
    assert memory is not None
    assert not memory.fits, "it is the largest number of rows that fits, in powers of two"


def test_one_gpu_shares_with_nobody() -> None:
    _, proposals = asked("24GB", "lora.r=16")
    assert {way.config.training.parallelism for way in proposals.ways} == {"ddp"}


def test_a_model_that_is_whole_everywhere_has_no_size_of_a_copy() -> None:
    run = run_of("lora.r=16", "training.parallelism=shard_base", "training.fsdp_size=2")
    proposals = propose(run, GpuPool.parse("4x80GB"))
    assert not proposals.refused
    assert proposals.best is not None
    assert proposals.best.changes["training.parallelism"] == "ddp"
    assert proposals.best.changes["training.fsdp_size"] is None


def test_what_cannot_be_is_named_with_its_reason() -> None:
    _, proposals = asked("2x24GB", "lora=null")
    reasons = [why for changes, why in proposals.refused if changes.get("training.optim")]
    assert any("adamw_8bit" in why for why in reasons)


def test_what_does_not_fit_says_what_it_would_take() -> None:
    run, proposals = asked("2x24GB", "lora=null")
    short = [way for way in proposals.ways if not way.fits]
    assert short, "8 billion parameters with AdamW are 128 GB"
    for way in short:
        _require_it_fits(run, way)
    shared = [way for way in short if way.config.training.parallelism != "ddp"]
    for way in shared:
        more = least_gpus(run, way, proposals.pool)
        assert more is not None
        assert more.samples is None
        on_more = propose(run, GpuPool(more.gpus // 8, 8, proposals.pool.gpu_bytes))
        names = [
            (other.config.training.parallelism, other.config.lora, other.fits)
            for other in on_more.ways
        ]
        assert ("fsdp", None, True) in names
    whole = next(way for way in short if way.config.training.parallelism == "ddp")
    assert least_gpus(run, whole, proposals.pool) is None, (
        "more GPUs do not help who shares nothing"
    )


def test_more_gpus_than_rows_of_a_step_need_a_larger_batch_too() -> None:
    run, proposals = asked("3x24GB", "lora=null", "training.global_batch_size=3")
    way = next(way for way in proposals.ways if way.config.training.parallelism == "fsdp")
    assert not way.fits
    more = least_gpus(run, way, proposals.pool)
    assert more is not None
    assert more.samples is not None
    assert more.samples >= more.gpus
    batch = f"training.global_batch_size={more.samples}"
    _, on_more = asked(f"{more.gpus // 8}x8x24GB", "lora=null", batch)
    assert on_more.best is not None
    assert on_more.best.config.lora is None


def _require_it_fits(run: RunToPlace, way: Way) -> None:
    needed = least_gpu_bytes(run, way)
    on_that = run.costs_of(way.config, way.plan, needed).memory
    assert on_that is not None
    assert on_that.fits
    on_less = run.costs_of(way.config, way.plan, int(0.95 * needed)).memory
    assert on_less is not None
    assert not on_less.fits


def a_run_file(folder: Path, text: str) -> Path:
    model = folder / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_8B))
    rows = [json.dumps({"text": f"row {number}"}) for number in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    file = folder / "run.yaml"
    file.write_text(text.format(model=model, rows=folder / "rows.jsonl"))
    return file


RUN_FILE = """\
# Our first run.
model: {model}  # the large one
data:
  train: {rows}
  max_length: 2048
lora: {{r: 16}}
training:
  # Rows at a time.
  per_device_train_batch_size: 8
  gradient_accumulation_steps: 2
"""


def test_a_way_is_written_in_the_run_file_and_comments_stay(tmp_path: Path) -> None:
    file = a_run_file(tmp_path, RUN_FILE)
    pool = GpuPool.parse("2x24GB")
    config = load_config(file)
    run = run_of()
    way = propose(RunToPlace(config, run.plan_of, run.costs_of), pool).best
    assert way is not None
    write_way(file, way, pool)
    text = file.read_text()
    assert "# Our first run." in text
    assert "# the large one" in text
    assert "# Rows at a time." in text
    assert "gradient_accumulation_steps" not in text
    written = load_config(file)
    assert written.compute.gpus_per_node == 2
    assert written.training.global_batch_size == 32
    assert make_plan(written).per_device_train_batch_size == way.plan.per_device_train_batch_size


def test_a_way_is_written_for_its_gpus_whatever_the_file_had_before(tmp_path: Path) -> None:
    file = a_run_file(tmp_path, RUN_FILE + "compute: {{processes: 4, gpu_memory: 80Gi}}\n")
    pool = GpuPool.parse("2x24564MiB")
    run = run_of()
    way = propose(RunToPlace(load_config(file), run.plan_of, run.costs_of), pool).best
    assert way is not None
    write_way(file, way, pool)
    compute = load_config(file).compute
    assert (compute.gpus_per_node, compute.processes, compute.gpu_memory) == (2, None, "24564Mi")


@pytest.mark.parametrize(
    ("number", "text"),
    [(24 * 10**9, "24G"), (80 * 2**30, "80Gi"), (25_757_220_864, "24564Mi"), (1001, "1001")],
)
def test_bytes_are_written_as_short_as_they_can_be(number: int, text: str) -> None:
    assert quantity(number) == text
    assert quantity_bytes(text) == number


def test_a_file_that_cannot_be_changed_key_by_key_stays(tmp_path: Path) -> None:
    file = a_run_file(tmp_path, RUN_FILE)
    pool = GpuPool.parse("2x24GB")
    run = run_of("lora.r=16")
    way = propose(run, pool).best
    assert way is not None
    before = file.read_text().replace("training:\n", "training: 3\nold:\n")
    file.write_text(before)
    with pytest.raises(ConfigError, match="training is no section"):
        write_way(file, way, pool)
    assert file.read_text() == before


def test_options_of_proposals_stand_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = a_run_file(tmp_path, RUN_FILE)
    assert cli.main(["plan", str(file), "--gpus", "2x24GB"]) == 2
    assert "add that" in capsys.readouterr().err
    assert cli.main(["plan", "--model", "org/m", "--propose", "--write", "data.train=a/b"]) == 2
    assert "no run file" in capsys.readouterr().err


def test_more_gpus_than_a_run_can_have_are_refused_by_their_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = a_run_file(tmp_path, RUN_FILE)
    (tmp_path / "m" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "vocab_size": 9, **QWEN3_8B})
    )
    train_tokenizer(tmp_path / "m")
    assert cli.main(["plan", str(file), "--propose", "--gpus", "100000x24GB"]) == 2
    error = capsys.readouterr().err
    assert error.count("compute.gpus_per_node: Input should be less than or equal to 64") == 1


@pytest.mark.parametrize(
    ("codes", "change", "why"),
    [
        ({"quant_method": "fp8"}, "quantization=4bit", "are quantised already (fp8)"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "lora=null",
            "cannot learn; add a `lora` section",
        ),
    ],
)
def test_codes_of_a_file_are_not_quantised_again_and_do_not_learn(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    codes: dict[str, object],
    change: str,
    why: str,
) -> None:
    file = a_run_file(tmp_path, RUN_FILE)
    facts = {"model_type": "qwen3", "vocab_size": 9, **QWEN3_8B, "quantization_config": codes}
    (tmp_path / "m" / "config.json").write_text(json.dumps(facts))
    train_tokenizer(tmp_path / "m")
    assert cli.main(["plan", str(file), change]) == 2
    assert why in capsys.readouterr().err

    # As the run file has it, it is proposed, and what cannot be is named.
    assert cli.main(["plan", str(file), "--propose", "--gpus", "2x80GB", "--json"]) == 0
    proposed = json.loads(capsys.readouterr().out)
    key, _, value = change.partition("=")
    assert {way["changes"].get(key) for way in proposed["ways"]}.isdisjoint({value})
    if key == "quantization":
        assert any(why in each["why"] for each in proposed["refused"])


def test_without_gpus_somebody_has_to_name_them() -> None:
    config = load_config(
        None, overrides=["model=org/m", "data.train=a/b", "compute.gpus_per_node=0"]
    )
    with pytest.raises(ConfigError, match="give --gpus"):
        gpu_pool(config.compute, None, None, {})
    config = load_config(
        None,
        overrides=[
            "model=org/m",
            "data.train=a/b",
            "compute.gpus_per_node=4",
            "compute.nodes=2",
            "compute.gpu_memory=40G",
        ],
    )
    assert gpu_pool(config.compute, None, None, {}) == GpuPool(2, 4, 40 * 10**9)


@pytest.mark.parametrize(
    ("asked_for", "chosen", "why"),
    [
        ([], "shard_base", "with shard_base"),
        (["compute.gpu_memory=80G"], "ddp", "with ddp"),
        (["lora=null"], "fsdp", ": neither fits"),
        (["lora=null", "compute.gpu_memory=640G"], "ddp", "with ddp"),
        (["compute.gpus_per_node=1"], "ddp", "there is one process"),
        (["compute.gpus_per_node=0", "compute.processes=2"], "shard_base", "compute.memory"),
        (["model=org/unknown"], "shard_base", "org/unknown are not known before"),
    ],
)
def test_auto_is_decided_by_the_memory_of_a_process(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked_for: list[str],
    chosen: str,
    why: str,
) -> None:
    file = a_run_file(tmp_path, RUN_FILE)
    options = ["training.parallelism=auto", "compute.gpus_per_node=2", "compute.gpu_memory=24G"]
    config = load_config(file, overrides=[*options, *asked_for])
    plan = make_plan(config)
    run_dir = tmp_path / "run"
    create_run_dir(config, run_dir, plan)
    assert read_config(run_dir).training.parallelism == chosen
    assert why in capsys.readouterr().out

    # Before its first step a run is chosen for anew, after it what was chosen stays, on whatever GPUs.
    larger = load_config(file, overrides=[*options, *asked_for, "compute.gpu_memory=640G"])
    (run_dir / metrics.METRICS).write_text('{"step": 1}\n')
    create_run_dir(larger, run_dir, plan)
    assert read_config(run_dir).training.parallelism == chosen
    assert "auto" not in capsys.readouterr().out


def test_auto_is_what_is_proposed_first(tmp_path: Path) -> None:
    file = a_run_file(tmp_path, RUN_FILE)
    one_row = "training.per_device_train_batch_size=1"
    options = ["training.parallelism=auto", "compute.gpus_per_node=2", one_row]
    for gpu_memory in ("17G", "20G", "24G", "40G"):
        memory = f"compute.gpu_memory={gpu_memory}"
        config = load_config(file, overrides=[*options, memory])
        run = run_of()
        best = propose(
            RunToPlace(config, run.plan_of, run.costs_of), GpuPool.parse(f"2x{gpu_memory}")
        ).best
        plan = make_plan(config)
        memory_bytes = device_bytes(config.compute, plan)
        chosen, _, _ = decide_parallelism(config, plan, memory_bytes, {})
        assert best is not None
        assert best.config.training.parallelism == chosen
        planned, choices = with_measured_choices(config, plan, None, None, None)
        assert planned.training.parallelism == chosen
        assert f"training.parallelism: auto -> {chosen}, because a process has" in choices[0]


@pytest.mark.slow
def test_the_page_of_what_fits_where_is_what_is_proposed() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", "from fits_page import fits_page; print(fits_page(), end='')"]
    made = subprocess.run(command, cwd=root / "scripts", capture_output=True, text=True, check=True)
    assert (root / "docs" / "fits.md").read_text() == made.stdout, (
        "run: python scripts/fits_page.py"
    )
