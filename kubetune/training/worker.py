"""One rank of a run: `python -m kubetune.worker RUN_DIR`, or by hand under torchrun with a config file or flags.

    torchrun --nnodes 2 --nproc-per-node 4 … -m kubetune.worker run.yaml output=/shared/run

Sets up what must come before torch is imported, then trains. Ends with an exit code of errors.py, which is also
written to `logs/rank-N.exit.json`, because torchrun itself answers 1 whatever its children said.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kubetune import errors
from kubetune.base import allocator, files, logs, processes
from kubetune.base.humanize import counted, unused_keys
from kubetune.config.schema import Config
from kubetune.models import fast_import
from kubetune.planning.plan import Plan, make_plan
from kubetune.rundir import checkpoints, exit_status, heartbeat, metrics
from kubetune.supervisor import place
from kubetune.training.stop import StopRequest

if TYPE_CHECKING:
    from kubetune.data.prepared.prepare import Prepared
    from kubetune.distributed.process_group import World
    from kubetune.rundir.checkpoints import State


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code."""
    processes.die_with_parent()
    stop = StopRequest().install()
    rank = int(os.environ.get("RANK", "0"))
    code, reason, step, run_dir, kind = errors.OK, exit_status.DONE, None, None, None
    try:
        config, found = open_run(sys.argv[1:] if argv is None else list(argv), rank)
        with hold(found, rank):
            run_dir = found
            state, remark = work(config, run_dir, stop)
            step, reason = state.step, f"{exit_status.DONE}, but {remark}" if remark else exit_status.DONE
    except errors.Preempted as stopped:
        # Who is stopped before the loop does not know how far an earlier start has come.
        step = stopped.step or (checkpoints.newest_step(run_dir) if run_dir is not None else 0)
        code, reason = stopped.exit_code, str(errors.Preempted(step))
        logs.STEP.info("%s", reason)
    except errors.KubetuneError as error:
        code, reason = error.exit_code, str(error) if run_dir is None else exit_status.reason_of(error)
        kind = type(error).__name__
        logs.ERROR.error("%s", reason)
    except Exception as error:
        if fault := files.fault_of(error):
            code, reason = fault.exit_code, str(fault)
            logs.ERROR.error("%s", reason)
        else:
            code, reason = errors.BUG, f"{type(error).__name__}: {error}"
            logs.family_logger("ERROR").critical("this is a bug in kubetune", exc_info=error)
    if run_dir is not None:
        with suppress(errors.EnvironmentFault):  # a full disk must not hide the exit code it caused
            exit_status.write_rank_exit_status(run_dir, rank, exit_status.ExitStatus(code, reason, step, kind))
    return code


def hold(run_dir: Path, rank: int) -> AbstractContextManager[None]:
    """Keep a second writer out where no agent does; raises EnvironmentFault naming the first."""
    if rank != 0 or processes.AGENT_PID in os.environ:
        return nullcontext()

    return place.hold(run_dir, node=0)


def open_run(argv: list[str], rank: int) -> tuple[Config, Path]:
    """The config and the run directory: one that a launcher made, or a new one from a file or flags.

    Raises ConfigError for what is wrong with them.
    """
    from kubetune.config.flags import add_run_arguments, config_from_args, parse
    from kubetune.config.load import load_resolved

    if len(argv) == 1 and (Path(argv[0]) / "resolved.json").is_file():
        run_dir = Path(argv[0])
        config = load_resolved(run_dir / "resolved.json")
    else:
        from kubetune.supervisor.local import create_run_dir, dated

        logs.configure("INFO", rank=rank)  # for what reading the config has to say
        parser = argparse.ArgumentParser(prog="kubetune.worker", description="One rank of a run.")
        add_run_arguments(parser)
        config = config_from_args(parse(parser, argv), os.environ)
        if config.output is None:
            raise errors.ConfigError("under torchrun every rank must know the run directory: set output=DIR")
        run_dir = Path(config.output)
        config = dated(config, run_dir)
        if rank == 0:
            create_run_dir(config, run_dir)
    logs.configure(config.logging.level, run_dir, rank, progress=_shows_bar(rank))
    return config, run_dir


def _shows_bar(rank: int) -> bool:
    from kubetune.base.progress_bar import is_wanted

    return is_wanted(rank)


def work(config: Config, run_dir: Path, stop: StopRequest) -> tuple[State, str]:
    """Prepare, join the others, train, report; the state at the end and, on rank 0, what is to be said of it."""
    allocator.keep_memory()
    processes.try_threads()
    # Before any process group: ranks that wait here wait for a file lock, not for a collective that times out.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    logs.STEP.info("preparing data" if alone else "opening the prepared data")
    with preparing(config, run_dir) as prepared:
        with fast_import.sparingly(compiles_layers=config.training.compile == "layers"):
            import transformers.generation.utils
            import transformers.modeling_utils  # noqa: F401

            from kubetune.data.prepared.identity import Check
            from kubetune.data.prepared.statistics import record
            from kubetune.distributed import process_group
            from kubetune.planning import actuals
            from kubetune.tasks import task_module
            from kubetune.training import cpu_dtype
            from kubetune.training.loop import train

            task = task_module(config)
        data, config = prepared()
        if config.lora is not None:
            import_peft(config, data)
    # On one rank alone; it reads the base while that is being loaded, and is waited for where weights meet.
    base = Check(config, run_dir) if os.environ.get("RANK", "0") == "0" else None
    if not alone:
        stop.leave_to_kernel()
    logs.STEP.info("joining the other ranks")
    # Ranks that wait have the more patience, so that the one that hangs is the one that says so.
    patience = config.training.timeout_seconds
    with ExitStack() as stack:
        stack.enter_context(heartbeat.watch(run_dir, int(os.environ.get("RANK", "0")), patience))
        heartbeat.beat("joining")
        world = stack.enter_context(process_group.join(timeout_seconds=patience + heartbeat.WAITING_SECONDS))
        heartbeat.beat("starting")
        config = cpu_dtype.decide(config, run_dir, world, width_of(data))
        device: Literal["cuda", "cpu"] = "cuda" if world.device.type == "cuda" else "cpu"
        plan = make_plan(config, **sizes(data), world_size=world.size, device=device)
        log_start(plan, world, data)
        if world.is_main:
            for line in actuals.outlook(config, plan, planned_tokens(plan, data), gpu_name(world)):
                logs.STEP.info("%s", line)
            files.write_atomic(run_dir / "plan.json", plan.to_json(), within=run_dir)
            record(run_dir, config, data)
        state = train(config, plan, run_dir, data, task, world, stop, base)
        heartbeat.beat("report")
        remark = report(config, plan, run_dir, world, data, state)
    return state, remark


def import_peft(config: Config, data: Prepared) -> None:
    """Import PEFT without bitsandbytes, which it takes along wherever that is installed, unless the base needs it."""
    from kubetune.data.text.tokenizer_files import read_json

    is_quantised = "quantization_config" in read_json(data.tokenizer.files.get("config.json"))
    needless = () if is_quantised or config.quantization != "none" else ("bitsandbytes",)
    with fast_import.in_haste(), fast_import.without(*needless):
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available

        is_bnb_available(), is_bnb_4bit_available()  # PEFT remembers the answers


@contextmanager
def preparing(config: Config, run_dir: Path) -> Iterator[Callable[[], tuple[Prepared, Config]]]:
    """Prepare the data in another process while this one imports torch; the function yielded waits for them.

    With the data comes the config whose model is one commit of the hub.

    Forked, and before torch starts threads of its own: that way it costs nothing and shares no lock.
    """
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, mp_context=context, initializer=processes.work_for_parent) as pool:
        folder = pool.submit(_prepare_folder, config, run_dir)
        try:
            yield lambda: _open_prepared(*folder.result())
        except BrokenProcessPool as error:
            raise errors.EnvironmentFault(
                "the process that prepares the data was killed (out of memory, or somebody's kill -9); allow more "
                "memory or set data.num_proc lower, and run the same command again"
            ) from error
        except BaseException:
            processes.kill_children()  # the pool would wait until work is done that nobody wants any more
            raise


def _prepare_folder(config: Config, run_dir: Path) -> tuple[Path, Config]:
    from kubetune.data.prepared.identity import pinned
    from kubetune.data.prepared.prepare import prepare

    config = pinned(config, run_dir)
    return prepare(config).path, config


def _open_prepared(folder: Path, config: Config) -> tuple[Prepared, Config]:
    from kubetune.data.prepared.prepare import load_prepared
    from kubetune.data.text.tokenizer import load_tokenizer

    return load_prepared(folder, load_tokenizer(config.model, date=config.data.date), config), config


def width_of(data: Prepared) -> int | None:
    """Hidden size of the model, from its config.json; None where that names none."""
    from kubetune.data.text.tokenizer_files import read_json
    from kubetune.planning.memory import Shape
    from kubetune.planning.model_shapes import Weights

    shape = Shape.of(Weights({}, read_json(data.tokenizer.files.get("config.json")), stated=False).text_config)
    return shape.hidden if shape is not None and isinstance(shape.hidden, int) else None


def sizes(data: Prepared) -> dict[str, Any]:
    """What the plan needs to know of the prepared data."""
    from kubetune.batching.feed import evaluated, rows_per_epoch, tokens_per_epoch

    return {
        "rows": rows_per_epoch(data.train),
        "eval_rows": len(evaluated(data.eval)) if data.eval is not None else 0,
        "tokens": tokens_per_epoch(data.train),
    }


def planned_tokens(plan: Plan, data: Prepared) -> int:
    """Tokens of all steps planned."""
    return round(float(data.train.lengths.mean()) * (plan.rows or 0) * plan.num_epochs)


def gpu_name(world: World) -> str | None:
    """The name of this rank's GPU, None where it has none."""
    import torch

    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None


def log_start(plan: Plan, world: World, data: Prepared) -> None:
    """The facts that every log should begin with."""
    from kubetune.batching.feed import evaluated
    from kubetune.data.reading.splits import remarks
    from kubetune.distributed import process_group

    environment = " ".join(f"{k}={v}" for k, v in process_group.environment().items()) or "one process"
    logs.DDP.info("%s, device %s", environment, world.device)
    held_out = f", {len(evaluated(data.eval)):,} for evaluation" if data.eval is not None else ""
    logs.DATA.info("%s rows%s, fingerprint %s", f"{len(data.train):,}", held_out, data.fingerprint[:12])
    if data.labels is not None:
        logs.DATA.info("%s", data.labels)
    for split, stats in data.stats.items():
        if found := remarks(stats):
            logs.DATA.info("%s: of %s records %s", split, f"{stats['records']:,}", ", ".join(found))
        if found_keys := unused_keys(stats.get("unused_keys", {})):  # not in data that were prepared before
            logs.DATA.info("%s: %s", split, found_keys)
    logs.DATA.info("%s", plan.batch_line())


def report(config: Config, plan: Plan, run_dir: Path, world: World, data: Prepared, state: State) -> str:
    """Write report.json and say where the result lies; returns what its owner should know of it, mostly nothing."""
    from kubetune.distributed import process_group
    from kubetune.planning import actuals
    from kubetune.training.run_log import peak_memory_bytes

    peak = max(process_group.gather(peak_memory_bytes(world.device), world))
    if not world.is_main:
        return ""
    copy = config.logging.report_json
    if metrics.is_reported(run_dir, state.step) and (copy is None or Path(copy).exists()):
        # A start that found nothing left to train would only spoil the numbers of those that did.
        logs.DONE.info("all %d steps were done before; %s tells of them", state.step, run_dir / metrics.REPORT)
        return _remark(metrics.read_report(run_dir).get("loss_runaway"))
    events = metrics.read_events(run_dir)
    totals = totals_of(run_dir, plan, state)
    found = actuals.compare(
        config,
        plan,
        tokens=planned_tokens(plan, data),
        longest=data.longest,
        peak_memory_bytes=peak,
        step_seconds=totals.seconds,
        events=events,
        until=metrics.now(),
    )
    numbers = metrics.write_report_json(
        run_dir,
        totals,
        world_size=world.size,
        data_fingerprint=data.fingerprint,
        peak_memory_bytes=peak,
        copy_to=Path(copy) if copy else None,
        best_step=state.best_step,
        preflight=next((event for event in reversed(events) if event["event"] == "preflight"), None),
        actuals=found,
    )
    best = "best" if state.best_step is not None else "last"
    if numbers["throughput"] is not None:
        logs.RESULT.info("%s", metrics.throughput_line(numbers["throughput"]))
        speed = numbers["throughput"]["tokens_per_second"]
        actuals.remember(config, plan, tokens_per_second=speed, seconds=totals.seconds, events=events)
    for line in actuals.tell(found):
        logs.RESULT.info("%s", line)
    if remark := _remark(numbers["loss_runaway"]):
        logs.RESULT.warning("%s", remark)
    logs.RESULT.info("%s", run_dir / "checkpoints" / best)
    logs.DONE.info("%s, %s tokens, %.0f s", counted(state.step, "step"), f"{numbers['tokens']:,}", numbers["seconds"])
    return remark


def _remark(runaway: Any) -> str:
    return metrics.runaway_line(runaway) if isinstance(runaway, dict) else ""


def totals_of(run_dir: Path, plan: Plan, state: State) -> metrics.Totals:
    """The sums of the whole run. Those of its checkpoint hold, where the disk has lost lines of the numbers."""
    found = metrics.read_totals(run_dir)
    if found.steps == state.step:
        return replace(found, seconds=state.seconds)
    return replace(
        found,
        samples=state.samples,
        tokens=state.tokens,
        trained_tokens=state.trained_tokens,
        seconds=state.seconds,
        first=found.first if found.first.get("step") == 1 else {},
        last=found.last
        if found.last.get("step") == state.step
        else {"step": state.step, "epoch": state.step / plan.steps_per_epoch},
    )
