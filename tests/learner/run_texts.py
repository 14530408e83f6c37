"""Run files for learners in processes of their own, with a stand-in for the sampler."""

from __future__ import annotations

from pathlib import Path


def run_text(model: Path, learner: str, *, folder: Path | None = None) -> str:
    """A run without task or evaluation on the model at `model`; `learner`: what its [learner] says, as TOML."""
    return f"""
[run]
name = "test"
{f'folder = "{folder}"' if folder is not None else ""}
[model]
path = "{model}"
[task]
name = "none"
heldout_prompts = 0
[buffer]
member_timeout_s = 600.0
[publish]
dtype = "float32"
[learner]
compute_dtype = "float32"
{learner}
"""
