"""What vLLM loads in each of its processes (entry point `vllm.general_plugins`): a weight transfer, and a leash.

Everybody who has forebay installed loads this with any vLLM, so beyond registering a name nothing happens unless the
process was started by a forebay sampler.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal

#: Name of forebay's backend in vLLM's `weight_transfer_config`.
BACKEND = "forebay"
#: Set by a sampler before it starts vLLM: the file that takes what the engine's processes print.
ENGINE_LOG_VARIABLE = "FOREBAY_ENGINE_LOG"

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Register the weight-transfer engine and, in a sampler's child process, tie its life to its parent's.

    vLLM calls it again and again: every part is idempotent.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(BACKEND, "forebay.sampler.transfer", "HostCopyTransfer")
    log_path, parent = os.environ.get(ENGINE_LOG_VARIABLE), multiprocessing.parent_process()
    if log_path and parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
        leave_terminal_group()
        print_into(log_path)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies, so that `kill -9` of a sampler leaves no engine behind."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the request
        os._exit(1)


def leave_terminal_group() -> None:
    """Out of reach of Ctrl-C, which is the sampler's to answer: it drains what these processes still generate."""
    with contextlib.suppress(OSError):  # a session leader is in its own group already
        os.setpgid(0, 0)


def print_into(path: str) -> None:
    """Append this process's output and log to `path`."""
    log_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    vllm_log = logging.getLogger("vllm")
    vllm_log.handlers.clear()
    vllm_log.propagate = True
    vllm_log.setLevel(logging.INFO)
