"""The notebook that looks at a data set: run from its first to its last cell, as Jupyter does."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.pictures import save_seeing_model, write_questions

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "dataset_analysis.ipynb"


def execute(folder: Path, **environ: str) -> tuple[str, int]:
    """Run the cells and return what they print, and how many pictures they draw; an error in a cell is raised."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # what is committed is the code
    with patch.dict(os.environ, environ):
        nbclient.NotebookClient(
            notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
        ).execute()
    if keep := os.environ.get("KEEP_NOTEBOOK"):
        nbformat.write(notebook, keep)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    return printed, sum("image/png" in output.get("data", ()) for output in outputs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Proactor event loop", "ignore::DeprecationWarning")
def test_conversations_with_images(tmp_path: Path) -> None:
    model = save_seeing_model(tmp_path / "model", "qwen2_5_vl")
    data = write_questions(tmp_path, "train", 60, text_rows=20)
    environ = {"DATA": str(data), "MODEL": str(model), "SAMPLE": "50", "MAX_LENGTHS": "16,32,64"}
    printed, pictures = execute(tmp_path, **environ)
    assert "50 records: 50 Chat" in printed
    assert "labels lost" in printed
    assert pictures == 5  # the first image, lengths, turns, sizes, losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_embedded_demo(tmp_path: Path) -> None:
    printed, pictures = execute(tmp_path, DATA="", MODEL="", SAMPLE="300", MAX_LENGTHS="")
    assert "0 with images, 0 bad" in printed
    assert "no images" in printed
    assert pictures == 3
