"""The objects of a run in apply order, and their text: the same bytes every time, as nothing in them is of today."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from coremill.config.load import LoadedConfig
from coremill.k8s.job import Job, make_job
from coremill.k8s.objects.cluster import headless_service, namespace, network_policy, run_file_map
from coremill.k8s.objects.jobs import job_objects
from coremill.k8s.objects.metrics import pod_monitors
from coremill.k8s.objects.nodes import node_class, node_pool
from coremill.k8s.objects.queue import queue_objects
from coremill.k8s.objects.storage import volume_objects

_DIRECTIVE = "%YAML 1.1\n"


@dataclass(frozen=True)
class Rendered:
    """The objects of a job in apply order, what they were made from, and what was decided or changed, in words."""

    objects: list[dict[str, Any]]
    notes: list[str]
    job: Job

    def to_yaml(self) -> str:
        """One document for each object."""
        return to_yaml(self.objects)


def render_objects(loaded: LoadedConfig) -> Rendered:
    """Everything that kubectl apply needs for a run; bad input is refused before any of it."""
    job = make_job(loaded.with_answers())
    section = job.section
    objects: list[dict[str, Any]] = []
    if section.namespace != "default":
        objects.append(namespace(job))
    if section.has_karpenter:
        objects += [node_class(job), node_pool(job)]
    objects += queue_objects(job)
    objects += volume_objects(job)
    objects += [run_file_map(job), network_policy(job), *pod_monitors(job)]
    if section.kind == "job":
        objects.append(headless_service(job))
    objects += job_objects(job)
    return Rendered(objects, list(job.notes), job)


def to_yaml(objects: list[dict[str, Any]]) -> str:
    """Documents as people write them: text of several lines as such, and quotes where YAML 1.1 would see no text."""
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 1)  # kubectl's: there `on` and `1.14` are no texts
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096
    yaml.Representer = _Texts
    documents = []
    for one in objects:
        stream = io.StringIO()
        yaml.dump(one, stream)
        documents.append(stream.getvalue().removeprefix(_DIRECTIVE).removeprefix("---\n"))
    return "---\n".join(documents)


class _Texts(SafeRepresenter):
    """Text of several lines as a block, and no anchors: each object is whole by itself."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(representer: SafeRepresenter, value: str) -> ScalarNode:
    style = "|" if "\n" in value else None
    node: ScalarNode = representer.represent_scalar("tag:yaml.org,2002:str", value, style=style)
    return node


_Texts.add_representer(str, _text)
