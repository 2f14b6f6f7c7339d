"""`kubetune render`: the Kubernetes manifests of a run, to the terminal or into a folder. Asks no cluster for anything.

A folder gets one file per object and a kustomization.yaml, so that it can be kept in git and changed by overlays; what
overlays rename stays consistent by the kustomizeconfig.yaml beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kubetune.base.files import write_atomic
from kubetune.base.humanize import visible
from kubetune.base.provenance import Tree, dotted
from kubetune.config.code_files import modules_beside
from kubetune.config.load import read_tree
from kubetune.config.schema import Config, RewardConfig
from kubetune.config.schema.evaluation import OwnMetricsConfig
from kubetune.errors import OK, ConfigError
from kubetune.k8s.lint.config import lint
from kubetune.k8s.manifests import KINDS, dump, local_files, render, secret_templates
from kubetune.k8s.manifests.kustomize import CONFIGURATION, configuration
from kubetune.k8s.manifests.mistakes import Mistake, advice
from kubetune.k8s.manifests.run_spec import Manifest, RunSpec, plan_without_data, spec_of
from kubetune.k8s.manifests.smoke_manifests import smoke_config, testing
from kubetune.k8s.manifests.user_patches import effects
from kubetune.supervisor.command_line import add_run_arguments, config_from_args, run_file

SMOKE_HELP = "the run's smoke test instead, as RUN-smoke: pods like those of the run test ranks, links and volumes"
# The beginning of each file that `render` and `serve` write, by which they know their own.
MARK = "# Made by kubetune "
HEADER = f"{MARK}render; change the run file and render again.\n"
SECRETS_HEADER = (
    "# The Secrets that the pods refer to, not part of the kustomization. Fill in the values in a copy that stays out\n"
    "# of git, and apply that once.\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_run_arguments(parser)
    target = parser.add_argument_group("manifests")
    target.add_argument("--kind", dest="kubernetes.kind", choices=KINDS, help="what runs the pods")
    target.add_argument(
        "-n",
        "--namespace",
        dest="kubernetes.namespace",
        metavar="NAME",
        help="namespace of all objects",
    )
    target.add_argument("--smoke", action="store_true", help=SMOKE_HELP)
    target.add_argument(
        "-o", "--to", default="-", metavar="DIR", help="one file per object; - prints them all"
    )
    target.add_argument("--strict", action="store_true", help="treat advice as errors")


def rendered(
    args: argparse.Namespace, *, strict: bool
) -> tuple[Config, dict[str, str], list[Manifest], list[list[str]]]:
    """Return config, files to carry along, objects of the run, and which of these each patch changes.

    Raise ConfigError with all errors.
    """
    # Variables of this machine are left out: the same file gives the same manifests everywhere.
    config = config_from_args(args, environ={})
    if args.smoke:
        config = smoke_config(config)

    files = local_files(config)
    plan = plan_without_data(config)
    objects = render(config, plan, files)
    if args.smoke:
        objects = testing(objects, plan)

    changed = _effects(config, files)
    findings = lint(RunSpec.of(config, plan, files), objects)
    findings += _patches_without_effect(changed)
    findings += _imported_beside(config.evaluation.metrics, config.rewards, files)
    report(findings, run_file(args), strict=strict)
    return config, files, objects, changed


def _effects(config: Config, files: dict[str, str]) -> list[list[str]]:
    """Return the objects that each of the config's patches changes."""
    kubernetes = config.kubernetes
    if kubernetes is None or not kubernetes.patches:
        return []
    without_patches = kubernetes.model_copy(update={"patches": ()})
    plain = config.model_copy(update={"kubernetes": without_patches})
    objects = render(plain, plan_without_data(plain), files)
    return list(effects(objects, kubernetes.patches))


def _patches_without_effect(effects_of_patches: Sequence[Sequence[str]]) -> Iterator[Mistake]:
    for number, changed in enumerate(effects_of_patches):
        if not changed:
            key = f"kubernetes.patches.{number}"
            yield advice(key, "changes nothing: all it asks for is so already; leave it out")


def _imported_beside(
    metrics: OwnMetricsConfig | None, rewards: Sequence[RewardConfig], files: Mapping[str, str]
) -> Iterator[Mistake]:
    """Yield what the Python files that travel import from their folders, which do not travel."""
    code = {}
    if metrics is not None:
        code["evaluation.metrics.file"] = metrics.file
    for number, reward in enumerate(rewards):
        if reward.is_code and reward.file is not None:
            code[f"rewards.{number}.file"] = reward.file
    for key, file in code.items():
        modules = modules_beside(Path(file))
        if modules and file in files:
            names = " and ".join(module.name for module in modules)
            yield advice(
                key,
                f"{Path(file).name} imports {names} from its folder, but travels alone; put all into one file, or put "
                "the folder on a volume and name the file there",
            )


def run(args: argparse.Namespace) -> int:
    """Render, lint, and write only what has no errors. Raise ConfigError with all of them."""
    config, files, objects, effects_of_patches = rendered(args, strict=args.strict)
    # Only templates: values of secrets are in no file that this writes.
    secrets = secret_templates(spec_of(config))
    if args.to == "-":
        sys.stdout.write(HEADER + dump(objects))
    else:
        names = write_folder(Path(args.to), objects, secrets, HEADER)
        print(
            f"kubetune: wrote {len(names)} files to {args.to}; apply: kubectl apply --server-side -k {args.to}"
        )

    # What the manifests do not show goes to standard error, so that a pipe to kubectl stays clean.
    for path in files:
        print(visible(f"kubetune: {path} travels along in a ConfigMap"), file=sys.stderr)
    for number, changed in enumerate(effects_of_patches):
        names_of_objects = ", ".join(changed) or "nothing"
        line = f"kubetune: kubernetes.patches[{number}] changes {names_of_objects}"
        print(line, file=sys.stderr)
    for secret in secrets:
        name = secret["metadata"]["name"]
        keys = ", ".join(secret["stringData"])
        line = f"kubetune: Secret {name} (key {keys}) must exist before the pods start"
        print(line, file=sys.stderr)
    return OK


def origins(path: Path | None) -> Tree:
    """Return the place of each key of the run file, or of the organisation's defaults, for messages."""
    tree, _ = read_tree(path)
    return tree


def report(findings: Sequence[Mistake], path: Path | None, *, strict: bool) -> None:
    """Print the advice, or raise ConfigError when something is wrong, with the lines of the run file."""
    if not findings:
        # Reading the file for its line numbers takes as long as rendering it.
        return
    tree = origins(path)
    problems = []
    advices = []
    for finding in findings:
        # Names of labels and annotations may have dots.
        has_dots = finding.key.startswith(("kubernetes.labels.", "kubernetes.annotations."))
        most_splits = -1
        if has_dots:
            most_splits = 2
        key = []
        for part in finding.key.split(".", most_splits):
            key.append(int(part) if part.isdigit() else part)
        path_of_key = tuple(key)
        word = "advice: "
        if finding.fatal:
            word = ""
        line = f"{tree.origin(path_of_key)}: {dotted(path_of_key)}: {word}{finding.text}"
        if finding.fatal or strict:
            problems.append(line)
        else:
            advices.append(line)
    if problems:
        raise ConfigError([*problems, *advices, "Nothing was written."])
    for line in advices:
        print(f"kubetune: {line}", file=sys.stderr)


def write_folder(
    folder: Path, objects: Sequence[Manifest], secrets: Sequence[Manifest], header: str
) -> list[str]:
    """Write one file per object, kustomization.yaml with its configuration, secrets.template.yaml; returns their names.

    `header`: the first line of each, which begins with MARK. Files of an earlier call that are no longer needed are
    removed. Raise ConfigError, before anything is written, if a file in the way has no such line.
    """
    texts = {}
    for manifest in objects:
        name = f"{manifest['kind'].lower()}-{manifest['metadata']['name']}.yaml"
        texts[name] = header + dump([manifest])

    # The files in the order in which the objects are to be applied.
    kustomization: Manifest = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(texts),
        "configurations": [CONFIGURATION],
    }
    texts[CONFIGURATION] = header + dump([configuration(objects)])
    texts["kustomization.yaml"] = header + dump([kustomization])
    if secrets:
        texts["secrets.template.yaml"] = header + SECRETS_HEADER + dump(secrets)

    # Files that begin with the mark are ours to replace or remove. Others are somebody's work.
    rendered_before = set()
    foreign = set()
    # A folder that does not exist holds none.
    for path in folder.glob("*.yaml"):
        if path.read_bytes().startswith(MARK.encode()):
            rendered_before.add(path.name)
        else:
            foreign.add(path.name)
    in_the_way = sorted(foreign & texts.keys())
    if in_the_way:
        raise ConfigError(
            f"{folder}: {', '.join(in_the_way)} was not made by kubetune and would be lost; choose another "
            "folder. Nothing was written."
        )

    for name, text in texts.items():
        write_atomic(folder / name, text)
    for name in rendered_before - texts.keys():
        os.unlink(folder / name)
    return list(texts)
