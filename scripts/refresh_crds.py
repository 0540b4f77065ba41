"""The CustomResourceDefinitions shipped with coremill (src/coremill/k8s/check/crds), from a folder of the originals.

    python scripts/refresh_crds.py FOLDER      one subfolder per release: trainer-v2.3.0, jobset-v0.12.0, ...

Descriptions are left out: they are nine tenths of the bytes, and the API server does not read them either. All of these
projects (kubeflow/trainer, aws/karpenter-provider-aws, kubernetes-sigs/jobset, kubernetes-sigs/kueue) are Apache-2.0.
"""

import gzip
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

TARGET = Path(__file__).parents[1] / "src/coremill/k8s/check/crds"
WORDS = ("description", "externalDocs", "example", "title")


def compact(value: Any, *, are_names: bool = False) -> Any:
    """Without words for people. Under `properties` keys are names of fields, and one may well be called description."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if are_names or key not in WORDS}
        return {key: compact(one, are_names=key == "properties" and not are_names) for key, one in kept.items()}
    return [compact(one) for one in value] if isinstance(value, list) else value


def main(source: Path) -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for file in sorted(source.glob("*/*.yaml")):
        document = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        spec = {key: document["spec"][key] for key in ("group", "names", "scope", "versions")}
        small = {"apiVersion": document["apiVersion"], "kind": document["kind"], "spec": compact(spec)}
        small["metadata"] = {"name": document["metadata"]["name"]}
        target = TARGET / file.parent.name / f"{file.stem}.json.gz"
        target.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(small, separators=(",", ":"), sort_keys=True)
        target.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same bytes every time
        print(f"{target.relative_to(TARGET)}: {file.stat().st_size} to {target.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
