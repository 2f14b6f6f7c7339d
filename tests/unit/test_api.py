"""The Python interface: everything it promises can be imported, and importing it costs nothing."""

from __future__ import annotations

import ast
import inspect
import math
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kubetune
from kubetune import errors
from kubetune.library.results import require_sampling
from tests.tiny import pretend_weights


@pytest.mark.parametrize("name", kubetune.__all__)
def test_every_promised_name_exists(name):
    assert getattr(kubetune, name)


def test_no_name_is_that_of_a_module() -> None:
    """Importing the module would put it in the function's place."""
    modules = {module.name for module in pkgutil.iter_modules(kubetune.__path__)}
    assert modules & set(kubetune.__all__) == {"errors"}


def test_readers_of_types_are_told_of_every_name_and_of_no_other() -> None:
    """`import x as x` is what makes a name public to mypy and to editors, which do not run `__getattr__`."""
    tree = ast.parse(Path(kubetune.__file__).read_text())
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    names = {
        alias.asname: f"{node.module}.{alias.name}" for node in block.body for alias in node.names
    }
    assert set(names) | {"__version__"} == set(kubetune.__all__)
    homes = {name: f"kubetune.{home}" for name, home in kubetune._HOMES.items()}
    assert names == {
        name: home if name == "errors" else f"{home}.{name}" for name, home in homes.items()
    }


@pytest.mark.parametrize(
    "name", sorted(set(kubetune.__all__) - {"__version__", "errors", "Config"})
)
def test_every_function_says_what_it_raises(name: str) -> None:
    public = getattr(kubetune, name)
    for function in [public.open, public.series] if name == "Run" else [public]:
        raised = inspect.getdoc(function).partition("Raises:\n")[2]
        named = re.findall(r"^    (\w+):", raised, re.M)
        assert named
        assert all(issubclass(getattr(errors, error), errors.KubetuneError) for error in named)


def test_dir_shows_the_names_before_they_are_used() -> None:
    code = "import kubetune; print(kubetune.__all__ == dir(kubetune))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "True\n"
    )


def test_paths_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "run.yaml").write_text("model: some/model\ndata: {train: train.jsonl}\n")
    config = kubetune.load_config(str(tmp_path / "run.yaml"))
    assert config.data.train[0].path == str(tmp_path / "train.jsonl")
    for call in (kubetune.Run.open, kubetune.evaluate, kubetune.export, kubetune.report):
        for path in (str(tmp_path / "none"), tmp_path / "none"):
            with pytest.raises(errors.ConfigError, match="no such folder"):
                call(path)
    with pytest.raises(errors.ConfigError, match="no such folder"):
        kubetune.generate(tmp_path / "none", ["Hello."])
    model = config.model.model_copy(update={"path": str(pretend_weights(tmp_path / "model"))})
    taken = config.model_copy(update={"output": str(tmp_path), "model": model})
    with pytest.raises(errors.ConfigError, match=r"holds (run.yaml|train.jsonl|model)"):
        kubetune.train(taken)


def test_a_mapping_is_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    (tmp_path / "run.yaml").write_text(
        "model: some/model\ndata: {train: [train.jsonl], eval: 0.25}\nlora: {}\noutput: out\nlearning_rate: 1e-3\n"
    )
    mapping = {
        "model": "some/model",
        "data": {"train": (tmp_path / "train.jsonl",), "eval": 0.25},
        "lora": {},
        "output": Path("out"),
        "learning_rate": 1e-3,  # other tools' names, as in a file
    }
    config = kubetune.load_config(mapping)
    assert config == kubetune.load_config(tmp_path / "run.yaml")
    plans = [
        kubetune.make_plan(settings, gpus=0)
        for settings in (mapping, config, tmp_path / "run.yaml")
    ]
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0].rows, plans[0].eval_rows) == (6, 2)
    assert kubetune.load_config(mapping, overrides=["data.eval=0.5"]).data.eval == 0.5


def test_everything_wrong_in_a_mapping_is_told_with_its_key() -> None:
    wrong = {
        "model": "some/model",
        "data": {"train": {"a.jsonl"}, 1: 2},
        "lora": {"r": -1},
        "lr": 1e-3,
        "training": {"learning_rate": 1e-3},
        "tracking": {"mlflow": {"uri": "https://user:hunter22hunter@host"}},
    }
    with pytest.raises(errors.ConfigError) as caught:
        kubetune.load_config(wrong)
    problems = "\n".join(caught.value.problems)
    assert all(problem.startswith("config: ") for problem in caught.value.problems)
    for part in (
        "data.train: found a value of type set; expected text",
        "data: found the key 1; expected a text",
        "lora.r",
        "training.learning_rate: the same setting as lr; keep one",
    ):
        assert part in problems
    assert "hunter22" not in problems


def test_manifests_come_with_advice_as_warnings_and_errors_raised(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    config = {
        "name": "fit",
        "model": "org/model",
        "data": {"train": tmp_path / "train.jsonl"},
        "compute": {"gpus_per_node": 1, "cpu": 8, "memory": "32Gi"},
    }
    with pytest.raises(errors.ConfigError, match="kubernetes"):
        kubetune.render(config)
    storage = {"cache": {"size": "5Gi"}, "outputs": {"size": "5Gi"}}
    config["kubernetes"] = {"image": "registry.example/kubetune:1.0", "storage": storage}
    objects = kubetune.render(config)
    assert "Job" in [obj["kind"] for obj in objects]
    assert "fit-data" in [obj["metadata"]["name"] for obj in objects]
    config["kubernetes"]["image"] = "registry.example/kubetune:latest"
    with pytest.warns(UserWarning, match=r"^kubernetes.image: "):
        kubetune.render(config)


SCRIPT = """
from pathlib import Path
import kubetune
from kubetune import Config, Run, errors

def sweep(rates: list[float]) -> Run:
    runs: list[Run] = []
    for rate in rates:
        config: Config = kubetune.load_config("run.yaml", overrides=[f"training.learning_rate={rate}"])
        steps: int = kubetune.make_plan(config).num_steps
        try:
            runs.append(kubetune.train(config, quiet=steps > 10))
        except errors.Preempted as stopped:
            print(stopped.step)
    best = min(runs, key=lambda run: kubetune.evaluate(run).metrics["eval_loss"])
    answers: list[str] = kubetune.generate(best, ["a", [{"role": "user", "content": "b"}]])
    path: Path = kubetune.export(best, merged=True).path
    page: Path = kubetune.report(runs, path / answers[0])
    kinds = [manifest["kind"] for manifest in kubetune.render({"model": "m"})]
    print(kinds, page, kubetune.submit("run.yaml").outcome, best.exit_status and best.exit_status.code)
    reveal_type(kubetune.train)
    reveal_type(best.series("loss"))
    return best

kubetune.train(1)
kubetune.generate("run", 5)
kubetune.evaluate("run").nonsense
"""


@pytest.mark.slow
def test_a_program_of_somebody_else_is_checked_with_all_types(tmp_path: Path) -> None:
    """mypy --strict, outside the checkout and without its settings."""
    pytest.importorskip("mypy")
    (tmp_path / "sweep.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-kubetune.*]\nignore_errors = true\n[mypy-torch.*]\nfollow_imports = skip\n"
    )
    # As it is installed here, by a hook, mypy finds no package; a wheel has the same files.
    environ = {**os.environ, "MYPYPATH": str(Path(kubetune.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "sweep.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    wrong = [
        str(number)
        for number, line in enumerate(SCRIPT.splitlines(), 1)
        if line.startswith("kubetune.")
    ]
    assert [line.split(":")[1] for line in lines if ": error: " in line] == wrong, done.stdout
    notes = "\n".join(line for line in lines if ": note: Revealed" in line)
    assert "Any" not in re.sub(r"(Mapping|dict)\[str, Any\]", "", notes)
    assert "-> kubetune.library.run_handle.Run" in notes


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kubetune.__file__).parent / "py.typed").is_file()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kubetune.nonsense


def test_importing_the_package_imports_nothing_heavy():
    """Nor `typing`, before the program listens to signals."""
    heavy = "('torch', 'numpy', 'pydantic', 'typing', 'kubetune.cli')"
    find = f"import sys; sys.path.insert(0, {str(Path(kubetune.__file__).parents[1])!r})"
    code = f"{find}; import kubetune.__main__; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_a_temperature_is_a_number_of_0_or_more(temperature: float) -> None:
    with pytest.raises(errors.ConfigError, match=r"temperature is .*; expected 0 or more"):
        require_sampling(1, temperature, 1.0)
