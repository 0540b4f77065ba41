"""What tests/k8s needs besides (`make k8s-setup`): apiextensions-apiserver, the half of kube-apiserver that serves
custom resources, built from Debian unstable's Go packages, and that suite's etcd. Nothing is installed, a folder is
filled.

    python scripts/k8s_setup.py FOLDER

About 230 MB to download, some ten minutes of processor time and 3 GB of disk while it builds; 130 MB stay. Versions in
unstable move: it takes what is there and prints it (FOLDER/versions.txt). Needs apt-get and dpkg-deb, not root.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PACKAGES = ("golang-k8s-apiextensions-apiserver-dev", "golang-go", "etcd-server")
SUITE = os.environ.get("SUITE", "sid")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def output_of(*command: str, environment: dict[str, str] | None = None) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def mirror() -> str:
    """The mirror this machine installs from has the suite too; the one for security updates has not."""
    addresses = output_of("apt-get", "indextargets", "--format", "$(REPO_URI)").split()
    usable = sorted({address for address in addresses if "security" not in address})
    return usable[0] if usable else sys.exit("apt-get knows no mirror: this works on Debian")


def addresses_of_packages(work: Path) -> list[str]:
    """What PACKAGES need in that suite; apt has a state of its own, so that nothing of the system's changes."""
    apt = work / "apt"
    for folder in ("state/lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={KEYRING}] {mirror()} {SUITE} main\n")
    (apt / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{apt}/sources.list"; Dir::Etc::sourceparts "/dev/null";\n'
        f'Dir::Etc::preferencesparts "/dev/null"; Dir::State "{apt}/state"; Dir::State::status "{apt}/status";\n'
        f'Dir::Cache "{apt}/cache"; APT::Install-Recommends "false";\n'
    )
    environment = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    output_of("apt-get", "update", "-qq", environment=environment)
    lines = output_of("apt-get", "install", "--yes", "--print-uris", *PACKAGES, environment=environment).splitlines()
    quoted = [line.split("'")[1] for line in lines if line.startswith("'")]
    # The rest (libc, init scripts) is what a Go build without C does not need.
    return [address for address in quoted if Path(address).name.startswith(("golang-", "etcd-server_"))]


def unpack(addresses: list[str], work: Path) -> Path:
    root, packages = work / "root", work / "packages"
    root.mkdir()
    packages.mkdir()

    def fetch(address: str) -> Path:
        target = packages / Path(address).name
        with urllib.request.urlopen(address, timeout=120) as answer, target.open("wb") as file:
            shutil.copyfileobj(answer, file)
        return target

    with ThreadPoolExecutor(4) as several:
        for package in several.map(fetch, addresses):
            output_of("dpkg-deb", "--extract", str(package), str(root))
            package.unlink()
    return root


def build_server(root: Path, work: Path, target: Path) -> str:
    """Compiles the server with the toolchain of the packages; returns that toolchain's version."""
    goroot = max((root / "usr/lib").glob("go-1.*"), key=lambda folder: [int(n) for n in folder.name[3:].split(".")])
    for link in goroot.iterdir():  # Debian splits GOROOT; its absolute links must lead into root, not into this system
        if link.is_symlink() and os.readlink(link).startswith("/"):
            inside = root / os.readlink(link).lstrip("/")
            link.unlink()
            link.symlink_to(inside)
    (work / "tmp").mkdir()
    environment = {
        **os.environ,
        "GOROOT": str(goroot),
        "GOPATH": str(root / "usr/share/gocode"),
        "GOCACHE": str(work / "gocache"),
        "GOTMPDIR": str(work / "tmp"),
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
    }
    go = str(goroot / "bin/go")
    package = "k8s.io/apiextensions-apiserver"
    subprocess.run([go, "build", "-ldflags", "-s -w", "-o", str(target), package], check=True, env=environment)
    return output_of(go, "version", environment=environment).strip()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        work = Path(name)
        addresses = addresses_of_packages(work)
        print(f"{len(addresses)} packages of Debian {SUITE}; the build takes about ten minutes", flush=True)
        root = unpack(addresses, work)
        go_version = build_server(root, work, work / "apiextensions-apiserver")
        names = [Path(address).name for address in addresses]
        kept = [n for n in names if n.startswith(("golang-k8s-api", "golang-github-google-cel-go", "etcd-server_"))]
        versions = "\n".join([*sorted(kept), go_version]) + "\n"
        shutil.copy(root / "usr/bin/etcd", folder / "etcd")
        (folder / "versions.txt").write_text(versions)
        os.replace(work / "apiextensions-apiserver", folder / "apiextensions-apiserver")
    print(f"{versions}built in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).absolute())
