"""Data sets and images of the hub, asked for by its real client libraries from a hub on the loopback."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kubetune.data.reading.images import verify_image
from tests.hub import serving

Image = pytest.importorskip("PIL.Image")
datasets = pytest.importorskip("datasets")

# An image that the hub does not have.
LOST = 8


def trajectory(number: int) -> dict[str, Any]:
    image = f"coco/{'train' if number % 4 else 'val'}2017/{number:012d}.jpg"
    turns = [{"role": "student", "type": "response", "value": f"Answer: {number}"}]
    return {"id": f"r{number}", "image": image, "question": "What?", "conversations": turns}


def jpeg(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (30, 20), (number, 0, 0)).save(content, "JPEG")
    return content.getvalue()


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    fire = root / "fire"
    coco = root / "coco"
    fire.mkdir()
    (fire / "FIRE-train.json").write_text(json.dumps([trajectory(n) for n in range(40)]))
    (fire / "FIRE-test.json").write_text(json.dumps([trajectory(n) for n in range(4)]))
    (fire / "README.md").write_text("# FIRE\n")
    (coco / "data").mkdir(parents=True)
    features = datasets.Features({"image": datasets.Image(), "image_id": datasets.Value("int64")})
    for split, kept in (("train", lambda n: n % 4), ("val", lambda n: not n % 4 and n != LOST)):
        ids = [n for n in range(60) if kept(n)]
        rows = {"image": [{"bytes": jpeg(n), "path": None} for n in ids], "image_id": ids}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(str(coco / "data" / f"{split}-00000-of-00001.parquet"))
    return {"PengxiangLi/FIRE": fire, "detection-datasets/coco": coco}


@pytest.fixture
def hub(repos: dict[str, Path], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield the environment that leads to a hub."""
    held = {
        f"datasets/{name}": {
            str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")
        }
        for name, folder in repos.items()
    }
    with serving(held) as address:
        yield {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}


def convert(environ: dict[str, str], *words: Any) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "kubetune",
        "data",
        "convert",
        "fire",
        "--json",
        *map(str, words),
    ]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        command, env=inherited | environ, capture_output=True, text=True, check=False
    )


def test_records_of_the_hub_are_kept_in_its_cache(hub: dict[str, str], tmp_path: Path) -> None:
    done = convert(hub, "--skip-images", "--output", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)
    assert [stats[split]["samples_processed"] for split in ("train", "test")] == [40, 4]
    offline = convert(
        hub | {"HF_HUB_OFFLINE": "1"}, "--skip-images", "--style", "sharegpt", "-o", tmp_path / "b"
    )
    assert json.loads(offline.stdout)["train"]["examples_generated"] == 40


@pytest.mark.slow  # the library asks again for half a minute
def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    away = convert(
        environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}, "--skip-images", "-o", tmp_path / "c"
    )
    assert away.returncode == 3
    assert "the hub cannot be reached" in away.stderr
    assert "Traceback" not in away.stderr
    assert not (tmp_path / "c").exists()


def test_images_of_the_hub_are_kept_as_they_are(hub: dict[str, str], tmp_path: Path) -> None:
    done = convert(hub, "--images", "hub", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stdout)
    assert stats["train"]["skipped_by_reason"] == {"image_missing": 1}
    lost = f"image 'coco/val2017/{LOST:012d}.jpg' is not in detection-datasets/coco"
    assert stats["train"]["errors"] == [f"FIRE-train.json:1: image_missing: {lost}"]
    rows = [
        json.loads(row)
        for row in (tmp_path / "out" / "fire_bc_train.jsonl").read_text().splitlines()
    ]
    assert rows[1]["images"] == ["images/" + trajectory(1)["image"]]
    for row in rows:
        file = tmp_path / "out" / row["images"][0]
        assert verify_image(file).format == "JPEG"
        assert file.read_bytes() == jpeg(int(row["id"][1:]))


def test_images_of_other_data_sets_are_not_taken_from_coco(
    hub: dict[str, str], tmp_path: Path
) -> None:
    paths = ["coco/train2017/000000000009.jpg", "vg/9.jpg", "coco/../9.jpg", "gqa/000000000009.jpg"]
    records = [{**trajectory(number), "image": path} for number, path in enumerate(paths)]
    (tmp_path / "FIRE-train.json").write_text(json.dumps(records))
    words = ("--source", tmp_path / "FIRE-train.json", "--images", "hub", "--output")
    done = convert(hub, *words, tmp_path / "a")
    assert json.loads(done.stdout)["train"]["skipped_by_reason"] == {"image_missing": 3}
    # What was fetched is not fetched again.
    offline = convert(hub | {"HF_HUB_OFFLINE": "1"}, *words, tmp_path / "b")
    assert json.loads(offline.stdout) == json.loads(done.stdout)
    saved = [path for path in (tmp_path / "b" / "images").rglob("*") if path.is_file()]
    assert saved == [tmp_path / "b" / "images" / paths[0]]
