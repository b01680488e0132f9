"""The published model's shape, and plans of it."""

from __future__ import annotations

import pytest

from dgcompile.model_spec import ModelSpec
from tests.model_config import published_config


@pytest.fixture(scope="session")
def published() -> ModelSpec:
    """google/diffusiongemma-26B-A4B-it."""
    return ModelSpec.from_config(published_config())
