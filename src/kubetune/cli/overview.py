"""Text of `kubetune --help` and `kubetune VERB --help`: the verbs in groups, a line on each, and examples of its use.

Imports nothing, since every start of the program reads it.
"""

from __future__ import annotations

# Every verb with a line on it.
GROUPS: dict[str, dict[str, str]] = {
    "Prepare a run": {
        "init": "write a commented run file, made for your data",
        "import": "convert a config of axolotl, LLaMA-Factory, TRL, ms-swift, verl",
        "data": "check, convert or prepare training data",
        "plan": "show batches, steps, memory, hours and price of a run",
    },
    "Run": {
        "train": "train on this machine",
        "sweep": "search for the best settings, by many runs",
        "watch": "show a live view of a run, here or on a cluster",
        "demo": "fine-tune a small built-in model, offline, in a minute",
        "bench": "measure this machine, and choose what is fastest on it",
        "smoke": "test ranks, network, devices and volumes with a tiny run",
        "verify-resume": "test that stop and resume change no bit of a run",
    },
    "Use the result": {
        "runs": "list the runs below a folder",
        "rollouts": "show the answers of a GRPO run and their rewards",
        "ui": "open a page to work in: runs, curves, data, new runs, chat",
        "report": "write an HTML page on one run, or on several side by side",
        "evaluate": "evaluate a run on its own data or on other data",
        "generate": "answer prompts",
        "chat": "chat in the terminal",
        "export": "write a model that other tools load, and prove it is the same",
        "push": "upload to the Hugging Face hub, or to a registry as an image",
        "serve": "write Kubernetes manifests that serve a result with vLLM",
        "sync": "copy a run to an object store, or back",
    },
    "On a cluster": {
        "render": "write the Kubernetes manifests of a run",
        "submit": "start a run",
        "status": "show the state of runs",
        "logs": "print what all pods of a run print",
        "events": "show the events of a run's objects",
        "top": "show CPU, memory and disk use of a run's pods",
        "gpus": "show nvidia-smi of all pods of a run",
        "exec": "run a command in a run's pods",
        "cp": "copy a run's results to this machine",
        "port-forward": "open TensorBoard, the page or JupyterLab of a run",
        "stop": "stop a run with a checkpoint, on a cluster or here",
        "resume": "continue a stopped run",
        "delete": "delete a run",
        "secret": "store a secret in the cluster without showing it",
        "dev": "start idle pods, and train in them with this folder's code",
        "cluster": "create, inspect and delete a cluster with GPUs on Nebius",
    },
    "This installation": {
        "doctor": "check versions, devices, hub, disk and cluster",
        "completion": "print a completion script for bash, zsh, fish or tcsh",
        "mcp": "let agents plan, check, submit and watch runs, by MCP",
    },
}

# The folder beside this file that holds the verbs of each group, a file for each.
FOLDERS = dict(zip(GROUPS, ("prepare", "local", "result", "remote", "installation"), strict=True))

VERBS: dict[str, str] = {verb: line for verbs in GROUPS.values() for verb, line in verbs.items()}

# Command lines of each verb, without `kubetune` before them.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "init": (
        "init train.csv --model Qwen/Qwen3-0.6B -o run.yaml",
        "init -o run.yaml",
        "init --schema -o run.schema.json",
    ),
    "import": ("import axolotl.yaml -o run.yaml", "import train.sh --from ms-swift"),
    "data": (
        "data check run.yaml --html data.html",
        "data check train.jsonl --model Qwen/Qwen3-8B",
        "data convert answers.csv -o train.jsonl --columns prompt=question completion=answer",
        "data prepare run.yaml",
    ),
    "plan": ("plan run.yaml", "plan run.yaml compute.gpus_per_node=8 --json"),
    "train": (
        "train run.yaml",
        "train run.yaml training.learning_rate=1e-4 --seed 1",
        "train --model Qwen/Qwen3-0.6B --data train.jsonl --output outputs/first",
    ),
    "sweep": (
        "sweep run.yaml 'lr=log(1e-5,1e-3)' lora.r=8,16,32 --trials 27",
        "sweep status outputs/sweep-run",
    ),
    "watch": ("watch last", "watch outputs/first", "watch support-bot -n finetune"),
    "demo": ("demo",),
    "bench": ("bench", "bench --minutes 1 -o here.json"),
    "smoke": ("smoke", "smoke --processes 2"),
    "verify-resume": ("verify-resume run.yaml --steps 10 --stop-at 4",),
    "runs": ("runs", "runs --failed", "runs outputs --sort eval_loss"),
    "rollouts": ("rollouts outputs/first", "rollouts outputs/first --step 20 --row 3"),
    "ui": ("ui", "ui outputs --port 8700"),
    "report": (
        "report outputs/first",
        "report --compare outputs/first outputs/second -o comparison.html",
    ),
    "evaluate": ("evaluate outputs/first", "evaluate outputs/first --data test.jsonl --json"),
    "generate": (
        'generate outputs/first "What is a pod?"',
        "generate outputs/first --file prompts.jsonl -o answers.jsonl",
    ),
    "chat": (
        "chat last",
        "chat outputs/first --compare",
        "chat outputs/first --beside outputs/second",
    ),
    "export": ("export outputs/first", "export outputs/first --merge -o model"),
    "push": (
        "push outputs/first ORG/NAME",
        "push outputs/first ORG/NAME --merge --public",
        "push outputs/first oci://registry.example.com/team/first:1",
    ),
    "serve": ("serve outputs/first --render -o manifests",),
    "sync": ("sync outputs/first s3://bucket/first", "sync s3://bucket/first outputs/first"),
    "render": ("render run.yaml", "render run.yaml --kind jobset -o manifests"),
    "submit": ("submit run.yaml", "submit run.yaml --follow", "submit run.yaml --dry-run=server"),
    "status": ("status", "status run.yaml", "status support-bot -n finetune --json"),
    "logs": ("logs -f run.yaml", "logs support-bot --rank 3"),
    "events": ("events run.yaml",),
    "top": ("top run.yaml",),
    "gpus": ("gpus run.yaml",),
    "exec": ("exec run.yaml -- nvidia-smi", "exec run.yaml --all -- df -h /outputs"),
    "cp": ("cp run.yaml", "cp run.yaml 'checkpoints/best/*' -o best"),
    "port-forward": ("port-forward run.yaml tensorboard",),
    "stop": ("stop run.yaml", "stop outputs/first"),
    "resume": ("resume run.yaml",),
    "delete": ("delete outputs/first", "delete run.yaml", "delete run.yaml --volumes --yes"),
    "secret": ("secret set HF_TOKEN run.yaml",),
    "dev": ("dev start run.yaml", "dev run run.yaml", "dev stop run.yaml"),
    "cluster": ("cluster create -f cluster.yaml --dry-run", "cluster status -f cluster.yaml"),
    "doctor": ("doctor", "doctor run.yaml --json"),
    "completion": (
        "completion bash > ~/.local/share/bash-completion/completions/kubetune",
        "completion zsh > ~/.zfunc/_kubetune",
    ),
    "mcp": ("mcp",),
}


def overview() -> str:
    """Return the text that `kubetune --help` prints."""
    width = max(map(len, VERBS)) + 2
    parts = ["usage: kubetune VERB …", "Fine-tune language models from one YAML file."]
    for group, verbs in GROUPS.items():
        lines = [f"{group}:"]
        for verb, line in verbs.items():
            lines.append(f"  {verb:<{width}}{line}")
        parts.append("\n".join(lines))
    parts.append("`kubetune VERB --help` shows the options of a verb, with examples.")
    return "\n\n".join(parts) + "\n"


def examples_of(verb: str) -> str:
    """Return the examples of a verb, for its own help."""
    lines = ["examples:"]
    for example in EXAMPLES[verb]:
        lines.append(f"  kubetune {example}")
    return "\n".join(lines)
