"""What an image weighs, and what is in it by weight: Python packages, Debian packages, the rest.

    make image-weight IMAGE=coremill:0.2.0       or: python scripts/image_weight.py IMAGE [--json] [--rows 15]

IMAGE is named as for `coremill k8s rehearse --image`. Bytes are those of files, each counted once; less is pulled, as
layers are compressed. Anything of CUDA is named, and the exit code is then 1: pods of this image have no use for it.
"""

import argparse
import csv
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from coremill.errors import CoremillError
from coremill.k8s.rehearse.images import find_image
from coremill.report.terminal import format_bytes

CUDA = re.compile(r"/lib(cu(da|dart|dnn|blas|fft|rand|solver|sparse)\w*|nccl|nvrtc|nvJitLink|nvshmem\w*|torch_cuda)\b")


def owners(root: Path) -> dict[str, str]:
    """By path below the root: which package put it there."""
    found = {}
    for listing in (root / "var/lib/dpkg/info").glob("*.list"):
        name = f"Debian: {listing.stem.partition(':')[0]}"
        found.update({line: name for line in listing.read_text().splitlines()})
    for record in root.glob("opt/*/lib/python3*/site-packages/*.dist-info/RECORD"):
        name, folder = f"Python: {record.parent.name.split('-')[0]}", record.parent.parent
        for file, *_ in csv.reader(record.read_text().splitlines()):
            found["/" + os.path.normpath((folder / file).relative_to(root))] = name
    return found


def weigh(root: Path) -> tuple[Counter[str], list[str]]:
    """Bytes by package, and files of CUDA."""
    known = owners(root)
    seen, weights, cuda = set(), Counter(), []
    for folder, _, files in os.walk(root):
        for name in files:
            path = Path(folder, name)
            about = path.lstat()
            if path.is_symlink() or (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            inside = f"/{path.relative_to(root)}"
            # What Python compiled belongs to what it was compiled from; /bin is /usr/bin in Debian.
            source = re.sub(r"__pycache__/([^/]+)\.cpython-\d+(\.opt-\d)?\.pyc$", r"\1.py", inside)
            owner = known.get(source) or known.get(inside) or known.get(inside.removeprefix("/usr")) or "other files"
            weights[owner] += about.st_size
            if CUDA.search(inside):
                cuda.append(inside)
    return weights, cuda


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("--json", action="store_true", help="JSON on stdout")
    parser.add_argument("--rows", type=int, default=15, help="packages to show")
    asked = parser.parse_args()
    try:
        found = find_image(asked.image)
        with tempfile.TemporaryDirectory() as folder:
            weights, cuda = weigh(found.unpack(Path(folder, "image")).root)
    except CoremillError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    total = sum(weights.values())
    if asked.json:
        print(json.dumps({"bytes": total, "packages": dict(weights.most_common()), "cuda": cuda}, indent=2))
        return 1 if cuda else 0
    groups = Counter()
    for name, size in weights.items():
        groups[name.partition(":")[0]] += size
    print(f"{asked.image}: {format_bytes(total)}")
    for name, size in [*groups.most_common(), ("", 0), *weights.most_common(asked.rows)]:
        print(f"{format_bytes(size):>10}  {100 * size / total:4.1f} %  {name}" if name else "")
    print("\nno file of CUDA" if not cuda else f"\nof CUDA: {', '.join(cuda)}")
    return 1 if cuda else 0


if __name__ == "__main__":
    sys.exit(main())
