"""Functions that a run file names as `package.module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from forebay.errors import UsageError


def entry_point(key: str, given: str) -> Any:
    """What `given` names; `key` is the setting that says so. Raises UsageError when there is no such thing."""
    module_name, _, name = given.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the `forebay` command does not have the working folder, `python -m` does
    try:
        return getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise UsageError(f'{key} is "{given}": no module named {error.name} (looked in {os.getcwd()} too)') from error
    except AttributeError as error:
        raise UsageError(f'{key} is "{given}": {module_name} has no {name}') from error
