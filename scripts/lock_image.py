"""The packages of the image, each with its hashes: containers/requirements.lock, for x86_64 and aarch64 alike.

    make lock           resolves anew, within pyproject.toml and constraints.txt (needs uv, and an index: PyPI, or UV_INDEX_URL)

Torch is not in it: the image takes its CPU build from an index or a folder of the builder's choice (containers/Containerfile),
where PyPI has one with CUDA. What that build requires is, as the one that is installed here says.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "containers/requirements.lock"
# What pods have no use for: checking manifests is for where they are written; tests and benchmarks; deepspeed, which compiles at run time.
NOT_IN_THE_IMAGE = {"k8s", "dev", "peers"}
HEADER = "# Made by `make lock`; every hash of a version stands for one of its files. Not to be edited.\n"


def extras() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [name for name in project["optional-dependencies"] if name not in NOT_IN_THE_IMAGE]


def main() -> int:
    needed = [one for one in importlib.metadata.requires("torch") or [] if "extra ==" not in one]
    if any(one.startswith(("nvidia", "cuda", "triton")) for one in needed):
        print("the torch that is installed here is not the CPU build", file=sys.stderr)
        return 78
    with tempfile.TemporaryDirectory() as folder:
        of_torch, no_torch = Path(folder, "of_torch.in"), Path(folder, "no_torch.txt")
        of_torch.write_text("\n".join(needed))
        no_torch.write_text("torch ; python_version < '0'")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--quiet"]
        command += ["--universal", "--python-version", "3.11", "--only-binary", ":all:", "--generate-hashes"]
        command += ["--no-header", "--no-annotate", "--overrides", str(no_torch), "--constraints", "constraints.txt"]
        command += [word for name in extras() for word in ("--extra", name)]
        done = subprocess.run([*command, "pyproject.toml", str(of_torch)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        LOCK.write_text(HEADER + done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
