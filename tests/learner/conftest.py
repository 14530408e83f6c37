"""A model on disk that the learner's tests start from."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.learner.distributed import start_deepspeed
from tests.learner.models import tiny_llama


@pytest.fixture(scope="session", autouse=True)
def _old_objects_stay() -> Iterator[None]:
    """DeepSpeed collects garbage four times as it makes an engine; of all that is imported there is none."""
    start_deepspeed()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as an ordinary checkpoint."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one of the same shape."""
    folder = tmp_path_factory.mktemp("other")
    tiny_llama(seed=5).save_pretrained(folder)
    return folder
