"""No output of any verb holds a secret of the environment: not what is printed, not a file, not after a failure."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote, quote_plus
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from kubetune.cli import VERBS

TOKEN, PASSWORD = "hf_canary+/=SECRETsecret0123456789", "pass&word/canary=42 +x"
ENVIRON = {
    "HF_TOKEN": TOKEN,
    "MY_API_KEY": TOKEN[::-1],
    "MLFLOW_TRACKING_PASSWORD": PASSWORD,
}
RENDERED = Path(__file__).parents[1] / "golden" / "full.yaml"
CLUSTER = """
kubernetes:
  image: registry.example/kubetune:1
  env: {LOGIN: plain}
  secrets: {HF_TOKEN: {secret: hf-token, key: HF_TOKEN}}
  storage: {outputs: {size: 1Gi, class: shared}}
"""


def forms(secret: str) -> list[bytes]:
    """Return a secret as it is, in base64 at each of three offsets, and in an address."""
    coded = [base64.b64encode(b"x" * n + secret.encode())[4 * (n > 0) + 4 : -4] for n in range(3)]
    return [secret.encode(), *coded, quote(secret, safe="").encode(), quote_plus(secret).encode()]


NEEDLES = [needle for secret in (TOKEN, TOKEN[::-1], PASSWORD) for needle in forms(secret)]


def leaks_in(where: str, content: bytes) -> list[str]:
    return [f"{where}: {needle!r}" for needle in NEEDLES if needle in content]


@pytest.mark.slow
def test_no_verb_tells_a_secret(toy_inputs: Path, tmp_path: Path) -> None:
    model = toy_inputs / "model"
    data = toy_inputs / "train.jsonl"
    file = tmp_path / "run.yaml"
    run_dir = str(tmp_path / "run")
    cache = tmp_path / "cache"
    file.write_text(
        f"name: canary\nmodel: {model}\nlora: {{r: 2}}\n"
        f"data: {{train: {data}, eval: 0.1, max_length: 64, cache: {cache}}}\n"
        "training: {max_steps: 3, save_steps: 1, per_device_train_batch_size: 4}\ncompute: {processes: 1}\n"
        + CLUSTER
    )
    (tmp_path / "env").write_text(f"HF_TOKEN={TOKEN}\n")
    (tmp_path / "bad.jsonl").write_text(f'{{"prompt": "{TOKEN}"}}\n')
    run = str(file)
    always = {
        "init": [["-o", "new.yaml"]],
        "import": [[run]],
        "plan": [
            [run],
            [run, "--json"],
            [run, f"training.sed={TOKEN}"],
            [f"{TOKEN}.yaml"],
            [run, f"token={TOKEN}"],
        ],
        "data": [
            ["check", run],
            ["prepare", run],
            ["check", run, f"data.train={tmp_path}/bad.jsonl"],
        ],
        "train": [
            [run, f"output={run_dir}"],
            [run, f"output={run_dir}-2", f"model={TOKEN}/x"],
            [
                run,
                f"output={run_dir}-3",
                "tracking.mlflow.uri=http://127.0.0.1:9",
                "training.max_steps=1",
            ],
            [run, f"output={run_dir}-4", "logging.level=DEBUG", "training.max_steps=1"],
        ],
        "report": [[run_dir]],
        "evaluate": [[run_dir], [run_dir, "--data", TOKEN]],
        "generate": [[run_dir, "hello", "--max-new-tokens", "2"]],
        "export": [[run_dir, "--output", f"{run_dir}-exported"]],
        "render": [[run], [str(RENDERED)], [str(RENDERED), "--kind=jobset"]],
        "smoke": [["--epochs", "1", "--processes", "1"]],
        "verify-resume": [[run, "--steps", "2", "--stop-at", "1", f"output={run_dir}-5"]],
        "secret": [["set", "HF_TOKEN", run, "--env-file", "env"]],
        "submit": [[run]],
        "status": [["canary"], [run]],
    }
    leaks: list[str] = []
    for verb in VERBS.keys() - {"ui"}:
        for arguments in always.get(verb, [["canary"], [run]]):
            leaks += told_by(verb, arguments, tmp_path)
    leaks += told_by_pages(tmp_path)
    inputs = {file, tmp_path / "env", tmp_path / "bad.jsonl"}
    for path in sorted(tmp_path.rglob("*")):
        if path.is_file() and path not in inputs:
            leaks += leaks_in(str(path), path.read_bytes())
    assert leaks == []
    assert (tmp_path / "run" / "checkpoints" / "last").exists()


def told_by(verb: str, arguments: list[str], folder: Path) -> list[str]:
    """Return the leaks in what one verb prints; without a cluster many verbs fail, never with a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "kubetune", verb, *arguments],
        cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL, capture_output=True, timeout=120,
    )  # fmt: skip
    output = done.stdout + done.stderr
    where = f"{verb} {' '.join(arguments)} (exit code {done.returncode})"
    trace = [f"{where}: {done.stderr.decode()[-2000:]}"] if b"Traceback" in output else []
    return trace + leaks_in(where, output)


def told_by_pages(folder: Path) -> list[str]:
    """Return the leaks in the pages of `kubetune ui` and in what it prints."""
    command = [sys.executable, "-m", "kubetune", "ui", str(folder), "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            address = line.split(" at ")[1].strip()
            browser = build_opener(HTTPCookieProcessor())
            browser.open(
                address
            ).read()  # leads on to the first page, with a cookie in place of the token
            root = address.partition("?")[0]
            pages = [browser.open(root).read()]
            links = {
                link for link in re.findall(rb'href="(/[^"#]*)"', pages[0]) if b"static" not in link
            }
            pages += [
                browser.open(root.rstrip("/") + link.decode().replace("&amp;", "&")).read()
                for link in links
            ]
        finally:
            server.send_signal(signal.SIGINT)
        assert len(pages) > 3
        assert any(b"canary" in page or b"run" in page for page in pages)
        return [
            leak
            for page in (*pages, (line + server.stdout.read()).encode())
            for leak in leaks_in("ui", page)
        ]


def environment(folder: Path) -> dict[str, str]:
    """Return this environment without a cluster, with the secrets."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "MLFLOW"))
    }
    return {**inherited, **ENVIRON, "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
