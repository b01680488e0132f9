"""Bundles to compare, and a report made by hand."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dgcompile.bundle import MANIFEST_FILE, WEIGHTS_FILE
from dgcompile.evaluate import EvaluationReport, Example
from dgcompile.evaluate.report import ClassBytes, LayerError, LogitsError, PromptReport, StepCount, StepError
from dgcompile.safetensors_file import read_header

EXAMPLES = [
    Example("Why is the sky blue?"),
    Example([2, *range(30, 70)], "nothing that it would say"),
    Example("tell me about rings"),
    Example("a"),
]


def rewrite(bundle: Path, name: str, data: bytes) -> None:
    """Replaces a file of a bundle and its record in the manifest."""
    (bundle / name).write_bytes(data)
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    for stage in manifest["stages"].values():
        if name in stage["files"]:
            stage["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle / MANIFEST_FILE).write_text(json.dumps(manifest))


@pytest.fixture(scope="session")
def noisy_bundle(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bundle`` with a tenth of noise on the experts' weights."""
    folder = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("noisy") / "bundle"))
    data, random = bytearray((folder / WEIGHTS_FILE).read_bytes()), np.random.default_rng(0)
    for name, tensor in read_header(folder / WEIGHTS_FILE).items():
        if ".experts." in name:
            place = slice(tensor.offset, tensor.offset + tensor.nbytes)
            values = np.frombuffer(data[place], dtype=np.float32)
            data[place] = (values * random.normal(1.0, 0.1, values.shape).astype(np.float32)).tobytes()
    rewrite(folder, WEIGHTS_FILE, bytes(data))
    return folder


def hand_made_report(prompt: str = "2 + 2", folder: str = "bundles/it") -> EvaluationReport:
    """A report whose figures can be checked by hand."""
    prompts = [
        PromptReport(
            index=index,
            line=index + 1,
            seed=index,
            prompt=prompt,
            kl=0.01 * (index + 1),
            identical=index == 0,
            reference_text="4",
            candidate_text="4\n" if index == 0 else "5",
            answer="4",
            reference_steps=(2, 4),
            candidate_steps=(3, 6),
        )
        for index in range(2)
    ]
    return EvaluationReport(
        bundle=folder,
        target="cpu",
        recipe="int4",
        against="checkpoint",
        reference_kind="checkpoint",
        reference_recipe=None,
        same_checkpoint=True,
        graphs_only=False,
        first_step=LogitsError(kl=0.015, relative_error=0.1),
        steps=tuple(StepError(step=step, canvases=4 // step, kl=0.02 / step, relative_error=0.1) for step in (1, 2, 3)),
        trajectory=LogitsError(kl=0.012, relative_error=0.1),
        layers=tuple(LayerError(layer=layer, relative_error=0.05 * layer) for layer in range(3)),
        step_counts=(
            StepCount(steps=2, reference=2, candidate=0),
            StepCount(steps=3, reference=0, candidate=2),
            StepCount(steps=4, reference=2, candidate=0),
            StepCount(steps=5, reference=0, candidate=0),
            StepCount(steps=6, reference=0, candidate=2),
        ),
        weights=(
            ClassBytes(weight_class="experts", weights=1000, stored_bytes=500),
            ClassBytes(weight_class="norms", weights=10, stored_bytes=20),
        ),
        prompts=tuple(prompts),
    )
