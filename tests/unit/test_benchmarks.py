"""The benchmarks' arithmetic: rows, FLOPs, statistics, tables, and what the harness makes of a driver's output."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import answers, flops, harness, scaling, sft, summary, table
from benchmarks.cases import CASES, QUICK, TRAINERS, Job
from benchmarks.corpus import (
    EOS,
    Corpus,
    Pair,
    lengths,
    text_rows,
    token_pairs,
    token_rows,
    word,
    write_pairs,
    write_tokens,
)
from benchmarks.models import SHAPES
from benchmarks.results import Results
from benchmarks.summary import Spread
from kubetune.rundir.machine import slug

MACHINE = {
    "cpu": "Some CPU",
    "cores": 2,
    "memory_gib": 24,
    "instructions": ["avx512f"],
    "gpu": None,
}


def measurement(trainer: str, repeat: int, seconds: list[float], **facts: object) -> dict:
    return {
        "suite": "sft", "case": "tiny", "trainer": trainer, "threads": 1, "processes": 1, "repeat": repeat,
        "tokens_per_epoch": 1000, "epoch_seconds": seconds, "epoch_cpu_seconds": seconds, "first_step_seconds": 2.0,
        "losses": [4.0, 3.0, 2.0, 1.0], "peak_bytes": 300 * 2**20, "peak_above_start_bytes": 100 * 2**20, **facts,
    }  # fmt: skip


def results_of(*measurements: dict) -> Results:
    data = {
        "started": "2026-01-02T03:04:05+00:00",
        "machine": MACHINE,
        "source": "x",
        "measurements": [],
    }
    return Results(Path("unused.json"), {**data, "measurements": list(measurements)})


def test_answers_are_set_beside_ours() -> None:
    result = results_of(
        *({"suite": "answers", "case": "choices", "way": way, "repeat": 0, "cpu_seconds": seconds}
          for way, seconds in (("harness", 6.0), ("kubetune", 2.0)))
    )  # fmt: skip
    lines = answers.render(result).splitlines()
    assert [line.rstrip("| ").rpartition("| ")[2] for line in lines[4:]] == ["3.00 ×", "2.00"]


def test_lengths_are_log_normal_and_the_same_every_time() -> None:
    corpus = Corpus(rows=2_000)
    result = lengths(corpus)
    assert result == lengths(corpus)
    assert min(result) == 16
    assert max(result) == 1024
    assert 190 < sum(result) / len(result) < 202
    assert lengths(replace(corpus, sigma=0.0, longest=77, rows=3)) == [77, 77, 77]


def test_rows_end_and_hide_their_prompt(tmp_path: Path) -> None:
    corpus = Corpus(rows=50, longest=100)
    rows = token_rows(corpus, vocab_size=500)
    write_tokens(tmp_path / "rows.jsonl", rows)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for row, line, length in zip(rows, lines, lengths(corpus), strict=True):
        assert len(row.ids) == length
        assert row.ids[-1] == EOS
        assert max(row.ids) < 500
        assert 0.25 * length - 1 <= row.prompt <= 0.65 * length
        assert line["labels"].count(-100) == row.prompt
        assert f"{line['prompt']} {line['completion']}".split() == [
            word(token) for token in row.ids
        ]


def test_pairs_are_rows_with_a_second_answer(tmp_path: Path) -> None:
    corpus = Corpus(rows=50, longest=100)
    pairs = token_pairs(corpus, vocab_size=500)
    rows = token_rows(corpus, vocab_size=500)
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    lines = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert sum(len(pair.rejected) for pair in pairs) == pytest.approx(
        sum(len(pair.chosen) for pair in pairs), rel=0.1
    )
    for pair, row, line in zip(pairs, rows, lines, strict=True):
        chosen, rejected = pair.sequences
        assert (chosen.ids, chosen.prompt, chosen.ids[-1], rejected.ids[-1]) == (
            row.ids,
            row.prompt,
            EOS,
            EOS,
        )
        assert chosen.ids != rejected.ids
        assert len(rejected.ids) <= corpus.max_length
        assert chosen.ids[: row.prompt] == rejected.ids[: rejected.prompt]
        assert Pair(**line["ids"]) == pair
        assert f"{line['prompt']}{line['rejected']}".split() == [
            word(token) for token in rejected.ids
        ]


def test_fully_labelled_rows_keep_one_token_as_prompt() -> None:
    rows = token_rows(CASES["qwen3-8b-4096"].corpus, 151_936)
    assert {(len(row.ids), row.prompt) for row in rows} == {(4096, 1)}


def test_text_rows_are_reproducible_and_zipfian() -> None:
    rows = list(text_rows(Corpus(rows=200)))
    assert rows == list(text_rows(Corpus(rows=200)))
    words = [w for row in rows for w in (row["prompt"] + row["completion"]).split()]
    commonest = max(words.count(w) for w in set(words[:500]))
    assert 0.05 < commonest / len(words) < 0.15


def test_flops_of_one_token_by_hand() -> None:
    shape = flops.Shape(4, 2, 6, 2, 1, 2, vocab_size=10)
    linear = 2 * (4 * 4 + 4 * 2 + 4 * 2 + 4 * 4 + 3 * 4 * 6)
    assert flops.linear_parameters(shape) == linear
    lora = 2 * 16 * ((4 + 4) + (4 + 2) + (4 + 2) + (4 + 4))
    assert flops.lora_parameters(shape, "attention") == lora
    assert flops.lora_parameters(shape, "all-linear") == lora + 2 * 16 * 3 * (4 + 6)
    pair = 12 * 2 * 2 * 2
    head = 4 * 10
    assert (
        flops.training_flops(shape, "attention", [1], 1) == 4 * linear + 6 * lora + pair + 4 * head
    )
    assert flops.training_flops(shape, "full", [1], 1) == 6 * linear + pair + 6 * head
    # Two sequences of 3 have 2 × 6 pairs, one of 6 has 21; everything else is the same.
    assert (
        flops.training_flops(shape, "full", [6], 0) - flops.training_flops(shape, "full", [3, 3], 0)
        == 9 * pair
    )


def test_flops_match_the_parameters_of_a_real_model() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    with torch.device("meta"):
        config = transformers.Qwen3Config(**vars(SHAPES["qwen3-8b"]))
        model = transformers.Qwen3ForCausalLM(config)
    linear = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear))
    assert flops.linear_parameters(SHAPES["qwen3-8b"]) == linear
    assert model.lm_head.weight.numel() == 4096 * 151_936


def test_peak_is_known_by_a_part_of_the_name() -> None:
    assert flops.peak_flops("NVIDIA H200") == 989e12
    assert flops.peak_flops("some other card") is None


def test_best_epoch_leaves_the_first_out() -> None:
    first = measurement("kubetune", 0, [0.1, 4.0, 2.0])
    assert summary.tokens_per_second(first) == 500
    assert summary.tokens_per_cpu_second(first | {"epoch_cpu_seconds": [0.1, 5.0, 5.0]}) == 200
    assert summary.epoch_losses(measurement("kubetune", 0, [1.0, 1.0])) == (3.5, 1.5)


def test_ratios_pair_runs_of_the_same_repeat() -> None:
    ours = [measurement("kubetune", i, [9.0, s]) for i, s in enumerate((1.0, 2.0, 1.0))]
    theirs = [measurement("hf-best", 1, [9.0, 8.0]), measurement("hf-best", 0, [9.0, 2.0])]
    failed = {"trainer": "hf-best", "repeat": 2, "failed": "no"}
    assert summary.ratios(ours, [*theirs, failed], summary.tokens_per_second) == [2.0, 4.0]
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([]) is None


def test_table_shows_speeds_ratios_and_what_is_missing() -> None:
    result = results_of(
        {"suite": "ceiling", "model": "tiny", "flops_per_second": 2e9},
        measurement("kubetune", 0, [9.0, 1.0]),
        measurement("kubetune", 1, [9.0, 2.0]),
        measurement("hf-best", 0, [9.0, 4.0]),
        measurement("hf-best", 1, [9.0, 4.0]),
        {
            "suite": "sft",
            "case": "tiny",
            "trainer": "trl-default",
            "threads": 1,
            "repeat": 0,
            "missing": "trl",
        },
    )
    text = table.render(result)
    assert "Measured on 2026-01-02: Some CPU, 2 cores, 24 GiB (avx512f)." in text
    lines = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in text.splitlines()
        if line.startswith("| ")
    }
    ours = lines[TRAINERS["kubetune"].label]
    theirs = lines[TRAINERS["hf-best"].label]
    assert "| 750 (500–1,000) |" in ours
    assert "| 250 |" in theirs
    assert "| 3.00× (2.00–4.00) |" in theirs
    assert f"| {table.flops_per_token(CASES['tiny']) * 750 / 2e9:.0%} |" in ours
    assert "| 300 (100) | 2.0 | 3.500 → 1.500 |" in ours
    assert "not measured: trl is not installed" in lines[TRAINERS["trl-default"].label]
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_each_table_is_of_the_newest_results_that_have_it(tmp_path: Path) -> None:
    full = measurement("kubetune", 0, [9.0, 1.0]) | {"case": "q32k-full"}
    for name, measurements in (
        ("2026-01-01-some-cpu-2-cores", [measurement("kubetune", 0, [9.0, 4.0]), full]),
        ("2026-01-02-some-cpu-2-cores", [measurement("kubetune", 0, [9.0, 2.0])]),
        ("2026-01-03-some-cpu-2-cores-quick", [full]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(results_of(*measurements).data))
    assert [
        (results.path.stem, [m["case"] for m in results.measurements])
        for results in table.newest(tmp_path)
    ] == [
        ("2026-01-02-some-cpu-2-cores", ["tiny"]),
        ("2026-01-01-some-cpu-2-cores", ["q32k-full"]),
    ]


def test_a_rival_in_fp32_is_set_beside_ours_in_fp32() -> None:
    seconds = {"kubetune": 1.0, "kubetune-fp32": 2.0, "hf-best": 4.0, "hf-fp32": 5.0}
    text = table.render(
        results_of(*(measurement(name, 0, [9.0, second]) for name, second in seconds.items()))
    )
    lines = {
        name: next(line for line in text.splitlines() if TRAINERS[name].label in line)
        for name in seconds
    }
    assert {name: line.split(" | ")[2].strip() for name, line in lines.items()} == {
        "kubetune": "", "kubetune-fp32": "", "hf-best": "4.00×", "hf-fp32": "2.50×",
    }  # fmt: skip


def test_tables_of_the_other_suites() -> None:
    first = measurement("kubetune", 0, [9.0, 2.0]) | {"suite": "scaling"}
    start = {"suite": "startup", "rows": 10_000, "repeat": 0}
    text = table.render(
        results_of(
            first,
            first | {"processes": 2, "epoch_seconds": [9.0, 1.0]},
            start | {"trainer": "kubetune", "first_step_seconds": 2.94},
            start | {"trainer": "trl-default", "failed": "no | such"},
            {"suite": "startup", "verb": "plan", "repeat": 0, "seconds": 0.412},
            {
                "suite": "tokenize",
                "path": "trl",
                "rows": 100,
                "processes": 1,
                "repeat": 0,
                "seconds": 4.0,
            },
        )
    )
    assert "| 2 | 1 | 1,000 | 2.00× |" in text
    assert "| 10,000 | `kubetune train` | 2.9 |" in text
    assert "failed: no   such" in text
    assert "| `kubetune plan` | 0.41 |" in text
    assert "| trl | 100 | 1 | 25 |" in text


def test_tables_of_preferences() -> None:
    of_pairs = {"suite": "preference", "case": "tiny-pairs"}
    start = {"suite": "preference-start", "rows": 256, "repeat": 0}
    text = table.render(
        results_of(
            measurement("kubetune", 0, [9.0, 1.0]) | of_pairs,
            measurement("dpo-default", 0, [9.0, 5.0]) | of_pairs,
            start | {"trainer": "kubetune", "kept": False, "first_step_seconds": 20.0},
            start
            | {
                "trainer": "kubetune",
                "kept": True,
                "first_step_seconds": 6.04,
                "first_step_cpu_seconds": 4.52,
            },
        )
    )
    assert "### tiny: DPO, LoRA r=16, attention, 1 thread\n\n32 pairs, 16 pairs per step" in text
    assert "| TRL DPOTrainer, defaults | 200 | 5.00× |" in text
    assert "| 256 | `kubetune train` | 20.0 |  | 6.0 | 4.5 |" in text


def test_tables_of_classification() -> None:
    first = {"suite": "sequence_classification", "case": "tiny", "threads": 1, "repeat": 0, "rows": 256,
           "epoch_seconds": [1.0], "peak_bytes": 300 * 2**20, "accuracy": 0.75}  # fmt: skip
    text = table.render(
        results_of(
            first | {"trainer": "kubetune", "epoch_cpu_seconds": [1.0]},
            first | {"trainer": "trainer-padded", "epoch_cpu_seconds": [12.0]},
            first | {"trainer": "trainer-tuned", "failed": "no"},
            {
                "suite": "from_scratch",
                "shape": "small",
                "processes": 2,
                "rows": 9,
                "steps": 7,
                "accuracy": 0.8,
                "f1": 0.5,
            },
        )
    )
    assert "| kubetune, bf16 | 256.0 |  | 300 | 0.750 |" in text
    assert "| Trainer, every row padded to 128, fp32 | 21.3 | 12.00× | 300 | 0.750 |" in text
    assert "length groups | not measured |" in text
    assert "| 2 | 9 | 7 | 0.800 | 0.500 |" in text


def test_table_is_put_between_the_marks_of_the_page() -> None:
    page = table.PAGE.read_text()
    filled = table.fill(page, "the table")
    assert f"{table.BEGIN}\n\nthe table\n{table.END}" in filled
    assert table.fill(filled, "another") == table.fill(page, "another")
    with pytest.raises(ValueError, match="lacks the marks"):
        table.fill("# Performance", "the table")


def test_measurements_survive_an_interruption(tmp_path: Path) -> None:
    results = replace(results_of(), path=tmp_path / "results.json")
    job = Job(CASES["tiny"], "kubetune")
    assert results.find("sft", job.key) is None
    results.add("sft", job.key, {"failed": "no"})
    again = Results(results.path, json.loads(results.path.read_text()))
    assert again.find("sft", job.key) == {"suite": "sft", **job.key, "failed": "no"}
    assert again.find("sft", replace(job, repeat=1).key) is None
    assert again.find("scaling", job.key) is None


def test_a_step_has_equally_many_sequences_for_all() -> None:
    for case in [*CASES.values(), QUICK]:
        for processes in (1, 2):
            job = Job(case, "hf-best", processes=processes)
            assert job.accumulation * case.batch * processes == case.sequences_per_step
        packed = Job(case, "trl-best").settings()
        mean = sum(lengths(case.corpus)) / case.corpus.rows + case.corpus.shared
        held = packed["batch"] * packed["accumulation"] * case.pack_length / mean
        assert held == pytest.approx(case.sequences_per_step, rel=0.2)


def test_a_peer_at_its_best_runs_with_its_fastest_batch() -> None:
    seconds = {1: 2.0, 2: 1.5, 4: 1.6}
    tried = [
        measurement("hf-best", 0, [9.0, second], batch=batch) | {"suite": "batch"}
        for batch, second in seconds.items()
    ]
    failed = measurement("hf-best", 0, [], batch=8, failed="no memory") | {"suite": "batch"}
    results = results_of(*tried, failed)

    batches = sft.best_batches([CASES["tiny"]], ["hf-best", "kubetune", "hf-default"], results)

    assert batches == {("tiny", "hf-best"): 2}
    jobs = sft.plan_jobs([CASES["tiny"]], ["hf-best", "kubetune"], 1, [1], batches)
    assert {job.trainer: job.batch for job in jobs} == {"hf-best": 2, "kubetune": None}
    case = CASES["tiny"]
    step = [Job(case, "hf-best", batch=batch).accumulation * batch for batch in sft.BATCHES]
    assert step == [case.sequences_per_step] * 4
    text = table.render(results_of(measurement("hf-best", 0, [9.0, 1.5], batch=2)))
    assert f"{TRAINERS['hf-best'].label}; batch 2, its fastest" in text


def test_trainers_take_turns_within_a_repeat() -> None:
    jobs = list(sft.plan_jobs([CASES["q152k-attention"]], None, 2, [1], {}))
    names = list(CASES["q152k-attention"].trainers)
    assert [(job.trainer, job.repeat) for job in jobs] == [(n, r) for r in (0, 1) for n in names]
    two = list(sft.plan_jobs([CASES["q32k-attention"]], ["kubetune"], 1, [1, 2], {}))
    assert [job.threads for job in two] == [1, 2]
    assert {(job.processes, job.threads) for job in scaling.plan_jobs(QUICK, 1)} == {
        (1, 1),
        (1, 2),
        (2, 1),
    }


def test_report_of_a_driver_is_read_and_failures_are_named() -> None:
    assert harness.read_report('noise\nRESULT {"tokens": 1}\nmore\n', 0) == {"tokens": 1}
    assert harness.read_report('RESULT {"missing": "trl"}\n', 0) == {"missing": "trl"}
    assert harness.read_report("Traceback\nValueError: bad\n\n", 1) == {"failed": "ValueError: bad"}
    assert "memory" in harness.read_report("", -9)["failed"]


def test_nothing_of_this_machine_but_its_processor_is_told() -> None:
    assert slug(MACHINE) == "some-cpu-2-cores"
    assert slug(MACHINE | {"gpu": "NVIDIA H200"}) == "nvidia-h200"
    assert str(Path.home()) not in harness.redact(f"no file {Path.home()}/models/x")
    assert str(harness.ROOT) not in harness.redact(f"no file {harness.ROOT}/benchmarks/.work/x")


@pytest.mark.slow
def test_a_missing_library_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real driver process in which LLaMA-Factory cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['llamafactory'] = None\n")
    monkeypatch.setattr(harness, "WORK", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    order = harness.Order("m", "d", "attention", 16, 1, 1, 1, 8, 8, {}, 0.0)
    assert harness.execute("llamafactory", "ours", order) == {"missing": "llamafactory"}


STANDS_FOR_PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; fi
"""


def test_one_command_makes_the_environments_and_measures_every_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scripts themselves, in a checkout elsewhere, with an interpreter that only notes what it is asked for."""
    peers = ("venv", "requirements.txt", "requirements-llamafactory.txt")
    for name in ("scripts/benchmark", *(f"benchmarks/peers/{name}" for name in peers)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(harness.ROOT / name, tmp_path / name)
    made = {".venv/bin/python": STANDS_FOR_PYTHON, "scripts/venv": "#!/bin/sh\n"}
    for name, text in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.delenv("PYTHON", raising=False)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    done = subprocess.run(
        [tmp_path / "scripts" / "benchmark"], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    suites = [call for call in calls if call.startswith("-m benchmarks.")]
    assert suites == [
        f"-m benchmarks.{name}"
        for name in ("sft", "scaling", "startup", "tokenize", "preference", "table --write")
    ]
    environments = [call.split()[-1] for call in calls if call.startswith("-m venv")]
    assert environments == ["../.venv-peers", "../.venv-llamafactory"]
