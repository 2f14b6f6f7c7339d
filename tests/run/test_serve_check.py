"""`kubetune serve --check`: right servers pass, and what is wrong with others is found and named."""

from __future__ import annotations

import copy
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import jsonschema
import pytest
import torch
from peft import PeftModel
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from kubetune.cli import main
from kubetune.config.schema.tracking import HooksConfig
from kubetune.library.results import check_server
from kubetune.result.forms.wanted import WantedExport
from kubetune.result.inference import proof_answers
from kubetune.result.publishing.exporting import export_run
from kubetune.result.served.known_model import known_model
from kubetune.result.served.server_watch import Watched, watch
from kubetune.rundir import metrics
from kubetune.supervisor.observers import prometheus
from kubetune.training.rollouts.servers.vllm_client import Server, ServerTrouble
from tests import toy
from tests.architectures import save_model
from tests.pictures import save_seeing_model, write_questions
from tests.served_model import ServedModel, served

ROOT = Path(__file__).parents[2]
ONE_EPOCH = {"num_train_epochs": 1, "eval_steps": 7, "save_steps": 7}

# Writes BOS, tools, thoughts of all turns and calls, and may close the thought that an answer begins with.
TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}{{- '<call>' + call.function | tojson + '</call>' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think></think>' }}{% endif %}
{%- endif %}
"""


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": name, "description": f"The {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def conversation(number: int) -> dict[str, Any]:
    """Return a record with a system text, several turns, thoughts, and for some a call of one of two tools."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Answer in a word."},
        {"role": "user", "content": f"{number} ping?"},
        {"role": "assistant", "reasoning_content": "one two", "content": "pong"},
        {"role": "user", "content": "again"},
    ]
    record: dict[str, Any] = {"messages": messages}
    if number % 2:
        function = {"name": "weather", "arguments": {"city": "Paris"}}
        call = {"id": "call-0", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "call-0", "content": "yes no"})
        record["tools"] = [tool("weather"), tool("time")]
    # A token of this tokenizer is a part of the last character.
    messages.append({"role": "assistant", "content": "three four ✓"})
    return record


def chat_run(
    inputs: Path,
    family: str = "llama",
    lora: dict[str, Any] | None = None,
    template: str = TEMPLATE,
    **sizes: Any,
) -> Path:
    """Return a run of LoRA on conversations, with an export of its adapter and one of its merged weights."""
    save_model(inputs / "model", family, **sizes)
    settings = inputs / "model" / "tokenizer_config.json"
    changed = {"chat_template": template, "bos_token": "<|endoftext|>"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changed))
    lines = [json.dumps(conversation(number)) for number in range(40)]
    (inputs / "chat.jsonl").write_text("\n".join(lines))
    data = {"train": str(inputs / "chat.jsonl"), "eval": 0.2, "max_length": 512}
    training = {**ONE_EPOCH, "learning_rate": 3e-2}
    sections = {"data": data, "lora": lora or {"r": 4}}
    run_dir = toy.finished(
        inputs / "bot", toy.make_config(inputs, training, name="bot", **sections)
    )
    export_run(run_dir, tell=lambda _: None)
    export_run(run_dir, wanted=WantedExport(merged=True), tell=lambda _: None)
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_run(tmp_path_factory.mktemp("inputs"))


def exported(run_dir: Path) -> Path:
    return next(run_dir.glob("exports/*-adapter"))


def base_model(run_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(run_dir.parent / "model", dtype=dtype).eval()


@cache
def loaded(run_dir: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return base and adapter, as PEFT loads them, and the tokenizer of the export."""
    model = PeftModel.from_pretrained(base_model(run_dir, dtype), exported(run_dir)).eval()
    return model, AutoTokenizer.from_pretrained(exported(run_dir))


def right(run_dir: Path, dtype: torch.dtype = torch.float32) -> ServedModel:
    """Return a server of the run, whose model a test may change."""
    model, tokenizer = loaded(run_dir, dtype)
    return ServedModel(copy.deepcopy(model), tokenizer, names=("base", "bot"))


def changed(**settings: Any) -> Callable[[Path], ServedModel]:
    """Return what makes a right server with other settings."""

    def make(run_dir: Path) -> ServedModel:
        server = right(run_dir)
        for name, value in settings.items():
            assert hasattr(server, name)
            setattr(server, name, value)
        return server

    return make


def with_weights(change: Callable[[str, torch.Tensor], None]) -> Callable[[Path], ServedModel]:
    """Return what makes a server whose weights are changed in place."""

    @torch.no_grad()
    def make(run_dir: Path) -> ServedModel:
        server = right(run_dir)
        for name, parameter in server.model.named_parameters():
            change(name, parameter)
        return server

    return make


def without(part: str) -> Callable[[Path], ServedModel]:
    """Return what makes a server that passes over the adapter on modules with this in their names."""

    def change(name: str, tensor: torch.Tensor) -> None:
        if "lora_B" in name and part in name:
            tensor.zero_()

    return with_weights(change)


def times(factor: float) -> Callable[[Path], ServedModel]:
    """Return what makes a server with another scale of the adapter."""
    return with_weights(lambda name, tensor: tensor.mul_(factor) if "lora_B" in name else None)


def rounded(name: str, tensor: torch.Tensor) -> None:
    """Round the base's layers to 2 bits, in blocks of 16 numbers."""
    if "base_layer" in name and tensor.dim() == 2:
        blocks = tensor.view(-1, 16)
        scale = blocks.abs().amax(1, keepdim=True)
        tensor.copy_(((blocks / scale).round() * scale).view_as(tensor))


def another_base(run_dir: Path) -> ServedModel:
    server = right(run_dir)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in server.model.named_parameters():
            if "lora_" not in name and parameter.dim() == 2:
                parameter.normal_(0, 0.2, generator=generator)
    return server


def base_in_its_place(run_dir: Path) -> ServedModel:
    server = right(run_dir)
    server.model = base_model(run_dir)
    return server


def merged(run_dir: Path) -> ServedModel:
    folder = next(run_dir.glob("exports/*-merged"))
    server = right(run_dir)
    server.model = AutoModelForCausalLM.from_pretrained(folder).eval()
    server.names = ("bot",)
    return server


def another_tokenizer(run_dir: Path) -> ServedModel:
    server = right(run_dir)
    folder = run_dir.parent / "tokenizer"
    if not folder.exists():
        shutil.copytree(exported(run_dir), folder)
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["merges"] = content["model"]["merges"][:-40]
        file.write_text(json.dumps(content))
    server.tokenizer = AutoTokenizer.from_pretrained(folder)
    return server


def checked(
    server: ServedModel, target: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the points by name, and what was printed for people."""
    with served(server) as url:
        code = main(["serve", "--check", url, str(target), "--json", *options])
    printed = capsys.readouterr()
    (report,) = json.loads(printed.out)
    return code, report["points"], printed.err


RIGHT = {
    "float32": right,
    "bfloat16": lambda run: right(run, torch.bfloat16),
    "merged": merged,
    "next tokens alone": changed(tells="next"),
    "llama.cpp": changed(tells="llama.cpp"),
    "quantised": with_weights(rounded),
}


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT.keys())
def test_the_trained_model_passes(
    make: Callable[[Path], ServedModel], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, points, _ = checked(make(run_dir), run_dir, capsys)
    assert {name: point["state"] for name, point in points.items()} == dict.fromkeys(
        points, "right"
    )
    assert code == 0
    assert points["log-probabilities"]["numbers"]["share"] == pytest.approx(1, abs=0.15)
    says_quantised = "quantised" in " ".join(points["log-probabilities"]["lines"])
    assert says_quantised == (make is RIGHT["quantised"])


WRONG = {
    "base": (base_in_its_place, "log-probabilities", "those of the base"),
    "no attention": (without("self_attn"), "log-probabilities", "passes over the adapter on attention:"),
    "no feed-forward": (without("mlp"), "log-probabilities", "passes over the adapter on feed-forward:"),
    "half": (times(0.5), "log-probabilities", "checkpoint, lora_alpha or rsLoRA"),
    "another base": (another_base, "log-probabilities", "another model, or of the adapter on another base"),
    "NaN": (changed(spoil=lambda values: values * torch.nan), "log-probabilities", "NaN"),
    "template": (changed(template=TEMPLATE.replace("|>system", "|> system")), "ids", "template: "),
    "BOS": (changed(adds_bos=True), "ids", "a second BOS"),
    "no BOS": (changed(template=TEMPLATE.replace("{{- bos_token }}", "")), "ids", "no BOS"),
    "thinking": (changed(template_kwargs={"enable_thinking": False}), "ids", 'kwargs \'{"enable_thinking": true}\''),
    "thoughts": (changed(drops_thoughts=True), "ids", "thoughts dropped"),
    "tools": (changed(reverses_tools=True), "ids", "tool order"),
    "calls": (changed(sorts_calls=True), "ids", "key order of calls"),
    "BOS, thinking": (
        changed(adds_bos=True, template_kwargs={"enable_thinking": False}), "ids", "chat template; enable_thinking: "
    ),
    "thinking, thoughts": (
        changed(drops_thoughts=True, template_kwargs={"enable_thinking": False}), "ids", "chat_template_kwargs; thoughts"
    ),
    "tokenizer": (another_tokenizer, "ids", "tokenizer: "),
    "EOS": (changed(stops_at=()), "end of answers", "goes on behind <|im_end|>"),
    "context": (changed(context=40), "context", "training took 512; raise --max-model-len"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "point", "words"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named(
    make: Callable[[Path], ServedModel],
    point: str,
    words: str,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, points, said = checked(make(run_dir), run_dir, capsys)
    assert [name for name, finding in points.items() if finding["state"] == "wrong"] == [point]
    assert code == 5
    assert words in points[point]["text"]
    assert words in said


def test_a_base_in_fewer_bits_than_any_limit_is_no_other_model(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def round_far(values: torch.Tensor) -> torch.Tensor:
        """Move a row by as much with the adapter as without."""
        return values + torch.randn(
            len(values), generator=torch.Generator().manual_seed(len(values))
        )

    code, points, said = checked(changed(spoil=round_far)(run_dir), run_dir, capsys)
    assert (code, points["log-probabilities"]["state"]) == (5, "unknown")
    assert "quantised to very few bits, or another" in points["log-probabilities"]["text"]
    assert "not proved" in said


def test_sampling_that_differs_is_said_and_passes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, points, _ = checked(changed(sampling={"top_k": 2})(run_dir), run_dir, capsys)
    assert (code, points["sampling"]["state"]) == (0, "differs")
    assert "its own default of top_k;" in points["sampling"]["text"]


def test_what_llama_cpp_tells_of_its_sampling_is_said(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"temperature": 0.8, "repeat_penalty": 1.1}
    server = changed(tells="llama.cpp", sampling=sampling)(run_dir)
    code, points, _ = checked(server, run_dir, capsys)
    assert (code, points["sampling"]["state"]) == (0, "differs")
    assert "of temperature (0.8) and repetition_penalty (1.1);" in points["sampling"]["text"]


def test_a_context_shorter_than_rows_of_training_is_said_and_passes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, points, _ = checked(changed(context=500)(run_dir), run_dir, capsys)
    assert (code, points["context"]["state"]) == (0, "differs")


def test_a_missing_adapter_is_named_with_its_rank(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = changed(names=("base", "other"))(run_dir)
    code, points, _ = checked(server, run_dir, capsys, "--model=bot")
    assert (code, list(points)) == (5, ["names"])
    assert "no bot; it has base, other" in points["names"]["text"]
    assert "rank is 4" in points["names"]["text"]


def test_the_first_difference_is_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(changed(drops_thoughts=True)(run_dir)) as url:
        assert main(["serve", "--check", url, str(run_dir)]) == 5
        said = capsys.readouterr().out
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        assert main(["serve", "--check", url, str(run_dir)]) == 5
        on_terminal = capsys.readouterr().out
    assert "⟨\x1b[32m<think>one" in on_terminal
    assert "⟨\x1b[31mpong" in on_terminal
    before = r"<|im_start|>assistant\n"
    assert re.search(rf"training .*{re.escape(before)}⟨<think>one", said)
    assert re.search(rf"server   .*{re.escape(before)}⟨pong", said)
    # Each conversation has the same cause, so one of them is shown.
    assert len(re.findall(r"^ +training ", said, re.M)) == 1


def test_the_run_keeps_what_is_asked_and_the_export_does_not(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = proof_answers.read(next((run_dir / "exports").glob("*.proof.safetensors")))
    assert set(answers.models) == {"trained", "base", "without attention", "without feed-forward"}
    kept = json.loads((run_dir / "conversations.json").read_text())["conversations"]
    assert any(one["tools"] for one in kept)
    names = {path.name for path in exported(run_dir).iterdir()}
    assert not any("proof" in name or "conversations" in name for name in names)
    code, _, _ = checked(right(run_dir), exported(run_dir), capsys)
    assert code == 0


def test_what_an_older_run_or_a_lone_export_lacks_is_said(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = tmp_path / "older"
    shutil.copytree(run_dir, older, symlinks=True)
    (older / "conversations.json").unlink()
    next((older / "exports").glob("*.proof.safetensors")).unlink()
    for target in (older, Path(shutil.copytree(exported(run_dir), tmp_path / "lone"))):
        code, points, said = checked(right(run_dir), target, capsys)
        states = {name: point["state"] for name, point in points.items()}
        assert states.pop("log-probabilities") == "unknown"
        assert set(states.values()) == {"right"}
        assert code == 5
        assert "so it is not proved" in said
        assert "of kubetune itself" in points["ids"]["text"]
    assert "kubetune export" in said or "name the run" in points["log-probabilities"]["text"]


def test_a_model_that_was_trained_whole_is_told_from_its_base(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = run_dir.parent
    data = {"train": str(inputs / "chat.jsonl"), "eval": 0.2, "max_length": 512}
    config = toy.make_config(inputs, {**ONE_EPOCH, "learning_rate": 1e-3}, name="bot", data=data)
    whole = toy.finished(tmp_path / "whole", config.model_copy(update={"lora": None}))
    folder = export_run(whole, tell=lambda _: None).path
    trained = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    code, points, _ = checked(ServedModel(trained, tokenizer, names=("bot",)), whole, capsys)
    assert (code, points["log-probabilities"]["state"]) == (0, "right")
    server = ServedModel(base_model(run_dir), tokenizer, names=("bot",))
    code, points, _ = checked(server, whole, capsys)
    assert code == 5
    assert "those of the base" in points["log-probabilities"]["text"]


def test_a_damaged_record_is_refused(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy, symlinks=True)
    file = next((copy / "exports").glob("*.proof.safetensors"))
    content = file.read_bytes()
    for damaged in (content[:-4], b"", content.replace(b'"trained"', b'"trainad"')):
        file.write_bytes(damaged)
        assert main(["serve", "--check", "http://127.0.0.1:1", str(copy)]) == 3
        assert f"{file} is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, b"<html>Sign in</html>"), "is not JSON: <html>Sign in</html>"),
        ((200, [{"id": "bot"}]), "is no object"),
        ((200, {"models": []}), "no list of models"),
        ((401, {"error": "Unauthorized"}), "VLLM_API_KEY"),
        ((307, b""), "it leads to None"),
        ((407, b"Proxy"), "answered 407"),
    ],
)
def test_an_address_that_will_not_become_a_server_is_not_waited_for(
    answer: tuple[int, Any], words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = changed(broken={"/v1/models": answer})(run_dir)
    with served(server) as url:
        assert main(["serve", "--check", url, str(run_dir)]) == 3
    said = capsys.readouterr().err
    assert words in said
    assert "--timeout" not in said
    assert len(server.calls) == 1


def test_what_a_server_does_not_answer_is_said(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = changed(broken={"/tokenize": (200, b"<html>Home</html>")})(run_dir)
    code, points, _ = checked(server, run_dir, capsys)
    assert (code, points["ids"]["state"]) == (0, "unknown")
    assert "is not JSON: <html>Home</html>" in points["ids"]["text"]
    server.broken = {"/v1/completions": (401, {"error": "Unauthorized"})}
    code, points, _ = checked(server, run_dir, capsys)
    assert code == 5
    assert "Set the variable VLLM_API_KEY" in points["log-probabilities"]["text"]
    server.broken = {"/v1/completions": (500, {"error": {"message": "EngineCore died"}})}
    code, points, _ = checked(server, run_dir, capsys)
    assert (code, points["ids"]["state"]) == (5, "right")
    assert "EngineCore died" in points["log-probabilities"]["text"]
    server.broken = {"/v1/completions": (200, {"choices": []})}
    code, points, _ = checked(server, run_dir, capsys)
    assert code == 5
    assert 'a form that is not known: {"choices": []}' in points["log-probabilities"]["text"]


def test_what_passes_is_asked_again(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = right(run_dir)

    def busy_at_times(path: str) -> None:
        server.broken.clear()
        if len(server.calls) % 7 == 6:
            server.broken[path] = (429, {"error": {"message": "Rate limit"}})

    server.on_call = busy_at_times
    code, _, _ = checked(server, run_dir, capsys)
    assert code == 0


def test_a_server_that_cannot_write_nan_has_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = right(run_dir)

    def fail(path: str) -> None:
        server.broken.clear()
        _, request = server.calls[-1]
        if path == "/v1/completions" and "echo" in request:
            message = "Out of range float values are not JSON compliant: nan"
            server.broken[path] = (400, {"error": {"message": message}})

    server.on_call = fail
    code, points, _ = checked(server, run_dir, capsys)
    assert code == 5
    assert "are NaN or infinite" in points["log-probabilities"]["text"]


def test_nan_is_found_where_the_likeliest_tokens_have_null(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = with_weights(lambda name, tensor: tensor.mul_(torch.nan))(run_dir)
    server.tells = "llama.cpp"
    code, points, _ = checked(server, run_dir, capsys)
    assert (code, points["log-probabilities"]["state"]) == (5, "wrong")
    assert "are NaN or infinite" in points["log-probabilities"]["text"]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


ASKED = ["/v1/models", "/tokenize", "/v1/completions"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((0, b""), "broke off"),
        ((502, b"<html>Bad Gateway</html>"), "answered 502"),
    ],
)
def test_a_server_that_breaks_at_any_call_ends_the_check(
    path: str,
    answer: tuple[int, Any],
    words: str,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = changed(broken={path: answer})(run_dir)
    with served(server) as url:
        assert main(["serve", "--check", url, str(run_dir), "--timeout", "6"]) == 3
    said = capsys.readouterr().err
    assert words in said
    assert path in said


@pytest.mark.parametrize("tokens", [[2**40], [-5], [float("inf")], ["a"]])
def test_ids_that_no_token_has_leave_the_ids_unknown(
    tokens: list[Any], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = changed(broken={"/tokenize": (200, {"tokens": tokens, "count": 1})})(run_dir)
    _, points, _ = checked(server, run_dir, capsys)
    assert points["ids"]["state"] == "unknown"
    assert "in a form that is not known" in str(points["ids"])


@contextmanager
def server_that_sends(piece: bytes) -> Iterator[Server]:
    """Yield a server that begins a good answer, and then sends a piece now and then, until the block is left."""
    ended = threading.Event()

    def answer(listener: socket.socket) -> None:
        connected, _ = listener.accept()
        with connected, suppress(OSError):
            connected.sendall(b"HTTP/1.1 200 OK\r\n")
            while not ended.wait(0.05):
                connected.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener,), daemon=True)
        answering.start()
        try:
            yield Server(f"http://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            ended.set()
            answering.join()


def test_headers_that_never_end_are_waited_for_until_the_time_is_up() -> None:
    with (
        server_that_sends(b"x") as server,
        pytest.raises(ServerTrouble, match=r"did not answer /v1/models, and the time is up"),
    ):
        server.models(time.monotonic() + 1)


def test_json_that_is_too_deep_is_no_answer() -> None:
    body = b"[" * 100_000
    whole = b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    with (
        server_that_sends(whole) as server,
        pytest.raises(ServerTrouble, match=r"answered /v1/models with what is not JSON"),
    ):
        server.models(time.monotonic() + 60)


@pytest.mark.parametrize("path", ASKED)
def test_a_silent_server_ends_the_check_in_time(
    path: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    server = right(run_dir)

    def wait(called: str) -> None:
        if called == path:
            ended.wait(60)

    server.on_call = wait
    with served(server) as url:
        code = main(["serve", "--check", url, str(run_dir), "--timeout", "3"])
        ended.set()
    assert code == 3
    assert f"{path}" in capsys.readouterr().err


def test_a_server_that_is_gone_or_behind_a_key(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["serve", "--check", url, str(run_dir), "--timeout", "1"]) == 3
    assert "it had 1 s (--timeout)" in capsys.readouterr().err

    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", "http://me:password@proxy.example:3128")
    assert main(["serve", "--check", url, str(run_dir), "--timeout", "1"]) == 3
    output = capsys.readouterr().err
    assert "The proxy of the environment was not asked" in output
    assert "password" not in output
    monkeypatch.delenv("http_proxy")

    server = changed(key="secret")(run_dir)
    with served(server) as url:
        assert main(["serve", "--check", url, str(run_dir)]) == 3
    assert "VLLM_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    code, _, _ = checked(server, run_dir, capsys)
    assert code == 0


def test_a_server_that_is_loading_is_waited_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = changed(broken={"/v1/models": (503, {"error": {"message": "Loading model"}})})(run_dir)

    def load(path: str) -> None:
        if len(server.calls) > 2:
            server.broken.clear()

    server.on_call = load
    code, _, _ = checked(server, run_dir, capsys)
    assert code == 0


def test_a_watch_tells_hooks_and_prometheus_what_has_changed(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    heard = tmp_path / "heard"
    script = tmp_path / "hook.sh"
    script.write_text(f"cat >> {heard}")
    server = right(run_dir)
    whole = server.model
    addresses: list[str] = []
    started = prometheus.started

    def noted(port: int, *more: Any) -> Any:
        return started(0, *more)

    monkeypatch.setattr(prometheus, "started", noted)
    monkeypatch.setattr("sys.stderr", Lines(addresses))
    with served(server) as url:
        settings = HooksConfig(on_event=f"sh {script}")
        model = Watched(known_model(run_dir), url, None, 60, settings)
        news = watch([model], 0.001)

        def break_soon(path: str) -> None:
            """Let the server be right for two rounds, which are no news."""
            listed = [called for called, _ in server.calls if called == "/v1/models"]
            if len(listed) > 2:
                server.model = base_model(run_dir)

        server.on_call = break_soon
        assert "those of the base" in next(news)["reason"]
        (address,) = [word for line in addresses for word in line.split() if "/metrics" in word]
        with urlopen(address, timeout=20) as reply:
            text = reply.read().decode()
        assert 'kubetune_served_is_model{model="bot"} 0.0' in text
        ratio = re.search(r'kubetune_served_effect_ratio{model="bot"} (\S+)', text)
        assert ratio is not None
        assert abs(float(ratio[1])) < 0.01
        server.on_call = lambda path: None
        server.broken = {"/v1/models": (404, {})}
        assert "answered 404" in next(news)["reason"]
        server.broken = {}
        server.model = whole
        assert next(news)["ok"]
        with urlopen(address, timeout=20) as reply:
            assert 'kubetune_served_is_model{model="bot"} 1.0' in reply.read().decode()
        news.close()
    events = [json.loads(line) for line in heard.read_text().splitlines()]
    assert [event["ok"] for event in events] == [False, False, True]
    assert "those of the base" in events[0]["reason"]
    # What it tells is what the schema of events says.
    schema = json.loads((ROOT / "docs" / "events.schema.json").read_text())
    for event in events:
        jsonschema.validate(event, schema)


def test_another_fault_of_a_watched_server_is_news(run_dir: Path) -> None:
    server = changed(broken={"/v1/completions": (404, {"detail": "Not Found"})})(run_dir)
    with served(server) as url:
        model = Watched(known_model(run_dir), url, None, 60, HooksConfig())
        event = model.look()
        assert event is not None
        assert "not proved" in event["reason"]
        server.broken = {}
        server.model = base_model(run_dir)
        event = model.look()
        assert event is not None
        assert "those of the base" in event["reason"]
        assert model.look() is None


class Lines:
    """A stream that keeps what is written."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def write(self, text: str) -> None:
        self._lines.append(text)

    def flush(self) -> None:
        pass


def test_a_watch_runs_no_command_that_nobody_allowed(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    received = tmp_path / "received"
    shutil.copytree(run_dir, received, symlinks=True)
    file = received / "resolved.json"
    config = json.loads(file.read_text())
    config["hooks"]["on_event"] = "rm -r /nothing"
    file.write_text(json.dumps(config))
    assert main(["serve", "--check", "http://127.0.0.1:1", str(received), "--watch=1"]) == 2
    assert "hooks has code run that nobody allowed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--check=http://h", "RUN", "--timeout=0"], "--timeout is 0; expected more than 0"),
        (["--check=http://h", "RUN", "--watch=-1"], "--watch is -1; expected more than 0"),
        (["--check=http://h", "a", "b", "--model=c"], "put NAME= in front of each"),
        (["--check=http://h", "RUN", "--gpus=2"], "--gpus: means nothing with --check"),
        (["--render", "acme/bot", "--timeout=3"], "--timeout: means something only with --check"),
        (["--check=http://h", "nowhere"], "nowhere: expected a run directory"),
        (["--check=h:8000", "RUN"], "address is h:8000; expected one such as http://"),
        (["--check=http://h:99999", "RUN"], "address is http://h:99999; expected one such as"),
        (["--check=http://h:port", "RUN"], "address is http://h:port; expected one such as"),
        (["--check=http://h h", "RUN"], "address is http://h h; expected one such as"),
        (
            ["--check=http://me:word@h", "RUN"],
            "expected one such as http://localhost:8000, without a password",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], problem: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(run_dir) if word == "RUN" else word for word in words]
    assert main(["serve", *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_server_of_the_plain_api_is_asked_as_far_as_it_answers(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {
        "/tokenize": (404, {"detail": "Not Found"}),
        "/v1/completions": (404, {"detail": "Not Found"}),
    }
    code, points, said = checked(changed(broken=gone)(run_dir), run_dir, capsys)
    states = {name: point["state"] for name, point in points.items()}
    assert (states.pop("names"), states.pop("context")) == ("right", "right")
    assert set(states.values()) == {"unknown"}
    assert code == 5
    assert "not proved" in said


def test_ollama_is_asked_by_texts_for_single_tokens(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = changed(tells="ollama", names=("base", "bot"))(run_dir)
    code, points, _ = checked(server, run_dir, capsys, "--model=Bot")
    states = {name: point["state"] for name, point in points.items()}
    assert (states.pop("names"), states.pop("log-probabilities")) == ("right", "right")
    assert set(states.values()) == {"unknown"}
    assert code == 0
    assert "bot:latest" in points["names"]["text"]
    server.model = base_model(run_dir)
    code, points, _ = checked(server, run_dir, capsys)
    assert code == 5
    assert "those of the base" in points["log-probabilities"]["text"]
    server.broken = {"/api/generate": (0, b"")}
    with served(server) as url:
        assert main(["serve", "--check", url, str(run_dir)]) == 3
    assert "broke off /api/generate" in capsys.readouterr().err


def test_a_token_that_llama_cpp_cannot_write_is_left_out(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = changed(tells="llama.cpp")(run_dir)

    def fail_at_times(path: str) -> None:
        server.broken.clear()
        if len(server.calls) % 3 == 0 and "logprobs" in (server.calls[-1][1] or {}):
            message = (
                "The model produced output that does not match the expected Content-only format"
            )
            server.broken[path] = (500, {"error": {"code": 500, "message": message}})

    server.on_call = fail_at_times
    code, points, _ = checked(server, run_dir, capsys)
    assert (code, points["log-probabilities"]["state"]) == (0, "right")
    server.model = base_model(run_dir)
    code, points, _ = checked(server, run_dir, capsys)
    assert (code, points["log-probabilities"]["state"]) == (5, "wrong")


def test_experts_that_a_server_passes_over_are_named(tmp_path: Path) -> None:
    run_dir = chat_run(tmp_path, "qwen3_moe", moe_intermediate_size=48)
    server = right(run_dir)
    with served(server) as url:
        check = check_server(run_dir, url, timeout=60)
        assert check.is_proved, check
        assert check.reason_against is None
        with torch.no_grad():
            for name, parameter in server.model.named_parameters():
                if "lora_B" in name and "experts" in name:
                    parameter.zero_()
        check = check_server(run_dir, url, timeout=60)
    assert not check.is_proved
    assert "passes over the adapter on experts" in str(check.reason_against)


def test_a_model_that_sees_is_compared_by_its_texts(tmp_path: Path) -> None:
    save_seeing_model(tmp_path / "model")
    write_questions(tmp_path, "train", 64, 1)
    write_questions(tmp_path, "eval", 16, 2)
    settings = {"data": {"max_length": 128}, "lora": {"r": 4}, "task": "vision_language"}
    training = {**ONE_EPOCH, "learning_rate": 1e-2}
    config = toy.make_config(tmp_path, training, name="bot", **settings)
    run_dir = toy.finished(tmp_path / "bot", config)
    export_run(run_dir, tell=lambda _: None)
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(exported(run_dir))
    trained = PeftModel.from_pretrained(base, exported(run_dir)).eval()
    server = ServedModel(trained, tokenizer, names=("bot",))
    with served(server) as url:
        check = check_server(run_dir, url, timeout=60)
        assert check.is_proved, check
        assert check.points["images"].state == "unknown"
        server.model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").eval()
        assert "those of the base" in str(check_server(run_dir, url, timeout=60).reason_against)


def test_embeddings_that_a_server_passes_over_are_named(tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["embed_tokens"]}
    run_dir = chat_run(tmp_path, lora=lora)
    # vLLM loads no adapter with whole modules, so no base is beside it.
    server = changed(names=("bot",))(run_dir)
    with served(server) as url:
        assert check_server(run_dir, url, timeout=60).is_proved
        for module in server.model.modules():
            if isinstance(module, AuxiliaryTrainingWrapper):
                module.enable_adapters(False)
        reason = str(check_server(run_dir, url, timeout=60).reason_against)
    assert "passes over the adapter on embeddings" in reason


def test_without_a_run_the_newest_is_asked_about(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--check", "http://127.0.0.1:1"]) == 2
    assert "last: there is no run below outputs" in capsys.readouterr().err
    newest = tmp_path / "outputs" / "bot"
    shutil.copytree(run_dir, newest, symlinks=True)
    metrics.record_event(newest, "launch")
    with served(right(run_dir)) as url:
        assert main(["serve", "--check", url]) == 0
    assert "last: outputs/bot" in capsys.readouterr().err
