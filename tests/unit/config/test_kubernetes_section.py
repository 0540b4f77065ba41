"""The section kubernetes: what it asks for, what goes together, and each refusal with its line and its cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from coremill.config.continuing import may_change
from coremill.config.keys import keys
from coremill.config.load import load_config
from coremill.errors import ConfigError

HEAD = "train: {steps: 1}\nkubernetes:\n  image: a:1\n"
NODES = "  cluster: demo\n  role: nodes\n"

# text | what | line pointed at | do
BROKEN = [
    ("train: {steps: 1}\nkubernetes:\n  zone: us-west-2a\n", "has no image", 3, "image:"),
    (HEAD, "kubernetes.cluster and kubernetes.role are not given", 3, "karpenter: none"),
    (HEAD + "  cluster: demo\n", "kubernetes.role is not given", 3, "role:"),
    (HEAD + NODES + '  trainer: "2.0"\n', "must be one of 2.1, 2.2, 2.3, not the text '2.0'", 6, "2.3"),
    (HEAD + NODES + "  karpenter: 1.9\n", "must be one of 1.8, 1.14, none, not 1.9", 6, "1.14"),
    (HEAD + NODES + "  storage: fsx\n", "file_system and mount_name and zone are not given", 6, "mount_name"),
    (HEAD + NODES + "  storage: fsx-new\n  subnet: subnet-01\n", "security_groups is not given", 6, "security_groups"),
    (HEAD + NODES + "  capacity: reservation\n", "kubernetes.reservation is not given", 6, "cr-"),
    (HEAD + NODES + "  reservation: cr-01\n", "but kubernetes.capacity is on-demand", 6, "capacity: reservation"),
    (HEAD + NODES + "  placement_group: near\n  karpenter: 1.8\n", "kubernetes.karpenter is 1.8", 6, "1.14"),
    (HEAD + NODES + "  cpus: 31\n", "kubernetes.cpus is 31", 6, "32 or 30"),
    (HEAD + NODES + "  instances: [m7i.8xlarge]\nfleet: {instance: c7i.8xlarge}\n", "not in kubernetes.inst", 6, "add"),
    (HEAD + NODES + "  zone: us-west-2\n", "kubernetes.zone must be", 6, "us-west-2a"),
    (HEAD + NODES + "  instance_types: [c7i.8xlarge]\n", "unknown key kubernetes.instance_types", 6, "instances"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "what", "line", "do"), BROKEN)
def test_a_refusal_points_at_its_line(tmp_path: Path, text: str, what: str, line: int, do: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert what in problem.what and do in (problem.do or ""), str(problem)
    assert f"{path}:{line} (" in (problem.where or ""), str(problem)
    assert problem.why and caught.value.exit_code == 78


def test_the_size_of_a_new_file_system() -> None:
    settings = ["kubernetes.image=a:1", "kubernetes.karpenter=none", "kubernetes.storage=fsx-new"]
    settings += ["kubernetes.subnet=subnet-01", "kubernetes.security_groups=[sg-01]"]
    for size in (1200, 2400, 4800):
        load_config(None, [*settings, f"kubernetes.storage_gib={size}"])
    for size, instead in ((100, 1200), (1300, 2400), (3000, 4800)):
        with pytest.raises(ConfigError, match=f"storage_gib: {instead}"):
            load_config(None, [*settings, f"kubernetes.storage_gib={size}"])


def test_releases_are_taken_as_people_write_them() -> None:
    nodes = ["kubernetes.image=a:1", "kubernetes.cluster=demo", "kubernetes.role=nodes"]
    for written in ("2.2", "'2.2'", "2.2.1", "v2.2.0"):
        section = load_config(None, [*nodes, f"kubernetes.trainer={written}"]).config.kubernetes
        assert section.trainer == "2.2"
    assert load_config(None, [*nodes, "kubernetes.karpenter=1.14"]).config.kubernetes.has_karpenter


def test_all_of_it_may_change_at_a_continuation() -> None:
    section = [key for key in keys() if key.startswith("kubernetes.")]
    assert section and all(may_change(key) for key in section)


def test_the_region_of_a_zone() -> None:
    for zone, region in (
        ("us-west-2a", "us-west-2"),
        ("us-gov-west-1b", "us-gov-west-1"),
        ("us-west-2-lax-1a", "us-west-2"),
    ):
        section = load_config(None, ["kubernetes.image=a:1", "kubernetes.karpenter=none", f"kubernetes.zone={zone}"])
        assert section.config.kubernetes.region == region
