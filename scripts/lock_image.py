"""The packages of the image, each with its hashes: containers/requirements.lock, for x86_64 and aarch64 alike.

    make lock      resolves anew, within pyproject.toml and constraints.txt (PyPI, or the index of UV_DEFAULT_INDEX)

Torch is not in it: the image takes its CPU build from an index or a folder of the builder's choice (Containerfile), as
the one on PyPI comes with CUDA. What that build requires is in it, as the one that is installed here says.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "containers/requirements.lock"
PYTHON = "3.11"  # Debian 12's
MACHINES = ("x86_64", "aarch64")
# Manifests are checked where they are written; tests, benchmarks and the site; deepspeed compiles when it runs.
NOT_IN_THE_IMAGE = {"k8s", "dev", "docs", "peers"}
HEADER = "# Made by `make lock`; every hash of a version stands for one of its files. Not to be edited.\n"


def extras() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [name for name in project["optional-dependencies"] if name not in NOT_IN_THE_IMAGE]


def uv(*words: str) -> str | None:
    """What it prints; None: it failed, and has said why."""
    command = [sys.executable, "-m", "uv", "pip", words[0], "--no-config", "--quiet", "--python-version", PYTHON]
    done = subprocess.run([*command, "--only-binary", ":all:", *words[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return done.stdout if done.returncode == 0 else None


def main() -> int:
    needed = [one for one in importlib.metadata.requires("torch") or [] if "extra ==" not in one]
    if any(one.startswith(("nvidia", "cuda", "triton")) for one in needed):
        print("the torch that is installed here is not the CPU build", file=sys.stderr)
        return 78
    with tempfile.TemporaryDirectory() as folder:
        of_torch, no_torch, lock = (Path(folder, name) for name in ("of_torch.in", "no_torch.txt", "new.txt"))
        of_torch.write_text("\n".join(needed))
        no_torch.write_text("torch ; python_version < '0'")
        words = ["--universal", "--generate-hashes", "--no-header", "--no-annotate"]
        words += ["--overrides", str(no_torch), "--constraints", "constraints.txt"]
        words += [word for name in extras() for word in ("--extra", name)]
        text = uv("compile", *words, "pyproject.toml", str(of_torch))
        if text is None:
            return 1
        lock.write_text(HEADER + text)
        for machine in MACHINES:  # each package has a wheel for it
            place = ["--dry-run", "--target", folder, "--python-platform", f"{machine}-manylinux_2_28"]
            if uv("install", *place, "--no-deps", "--require-hashes", "--requirements", str(lock)) is None:
                print(f"there is no image for {machine} with these", file=sys.stderr)
                return 1
        LOCK.write_text(lock.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
