"""DeepSpeed's process group, also for a process that no launcher started."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

import torch

from forebay.learner.ranks import TIMEOUT
from forebay.loopback import free_addresses
from forebay.rank import be_alone, is_alone, is_launched


def start_deepspeed() -> ModuleType:
    """Import DeepSpeed, quietly, and join the process group; on its own, this process is a group of one.

    Under torchrun or DeepSpeed's launcher the environment already names the group.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not is_launched() and not is_alone():
        be_alone(*free_addresses(1)[0].split(":"))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # about what DeepSpeed calls
    with silence(), _mute_children():
        import deepspeed
    with silence():
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # Building its shared-memory collective takes a compiler and a minute; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("nccl" if on_gpu else "gloo", verbose=False, timeout=TIMEOUT)
    return deepspeed  # type: ignore[no-any-return]


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keeps DeepSpeed's prints off the console; its warnings and errors go through logging."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _mute_children() -> Iterator[None]:
    """DeepSpeed asks the compiler what it could build as it is imported; the linker's complaints are of no use."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
