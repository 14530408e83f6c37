"""Where the model comes from: a folder, one made on the spot, or a name that the Hugging Face hub knows."""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.config.entry_point import entry_point
from forebay.config.models import ModelSection
from forebay.errors import UsageError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


def model_source(model: ModelSection, seed: int) -> str:
    """A checkpoint folder that is there, or a hub name, for `from_pretrained` and vLLM alike.

    Makes the checkpoint when `make` is set and the folder is missing; of services that start at once, one makes
    it and the others wait. Raises UsageError when there is neither a folder nor such a name.
    """
    folder = Path(model.path)
    if folder.exists():
        return str(_checked(folder))
    if model.make is not None:
        return str(_made(folder, model.make, seed))
    if looks_local(model.path):
        raise UsageError(f'model.path is "{model.path}": no such folder; expected a checkpoint folder or a hub name')
    if not in_hub_cache(model.path):
        _ask_hub(model.path)
    return model.path


def looks_local(path: str) -> bool:
    """Whether `path` can only be meant as a folder: `/x`, `./x`, `~/x`, `a/b/c`; `org/name` is a hub name."""
    return path.startswith(("/", ".", "~")) or HUB_NAME.fullmatch(path) is None


def in_hub_cache(name: str) -> bool:
    """Whether a snapshot of the hub's model `name` is on this machine."""
    root = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(root) / "hub").expanduser()
    return any(cache.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json"))


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UsageError(f'model.path is "{folder}": no checkpoint there (config.json is missing)')
    return folder


def _ask_hub(name: str) -> None:
    advice = "give a checkpoint folder (./NAME), a name from the hub, or [model] make"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        raise UsageError(
            f'model.path is "{name}": no such folder, not in the cache, and HF_HUB_OFFLINE is set; {advice}'
        )
    try:
        hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise UsageError(f'model.path is "{name}": no such folder; {advice}') from error
    try:
        hub.HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # whatever the network or the hub says, the user can do the same about it
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f'model.path is "{name}": no such folder, and the hub does not give it ({reason}); {advice}'
        ) from error


def _made(folder: Path, make: str, seed: int) -> Path:
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if folder.exists():  # another service made it while this one waited
            return _checked(folder)
        maker = _maker(make)
        partial = folder.with_name(f"{folder.name}.making")
        shutil.rmtree(partial, ignore_errors=True)
        log.info("making the model at %s with %s", folder, make)
        maker(partial, seed)
        _checked(partial)
        partial.rename(folder)
    return folder


@contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Held by this process alone on this machine; a killed holder lets go."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = lock.open("w")
    except OSError as error:
        raise UsageError(f"model folder {lock.parent}: {(error.strerror or str(error)).lower()}") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _maker(make: str) -> Callable[[Path, int], object]:
    _, _, function_name = make.partition(":")
    if not function_name:
        raise UsageError(f'model.make is "{make}"; expected module:function')
    maker = entry_point("model.make", make)
    if not callable(maker):
        raise UsageError(f'model.make is "{make}": {function_name} is not a function')
    made: Callable[[Path, int], object] = maker
    return made
