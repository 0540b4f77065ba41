"""A run as a job: everything that its objects are made from, decided once, each decision with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from coremill.config.kubernetes_section import KubernetesSection
from coremill.config.load import LoadedConfig
from coremill.config.schema import AUTO, RunConfig
from coremill.config.show import scalar_text
from coremill.errors import InputError
from coremill.hardware.pods import PodSize, instances_of, pod_size, room_for_a_pod
from coremill.k8s.names import LONGEST_LABEL, cluster_wide, job_name, require_names
from coremill.k8s.run_file import RunFile, folders_of_others, make_run_file, paths_pods_do_not_see, volume_folder
from coremill.k8s.times import Times, times_of
from coremill.plan.layout import lay_out
from coremill.plan.planner import make_plan
from coremill.plan.pod_type import cheapest_type
from coremill.plan.types import Choice, Plan
from coremill.plan.words import size
from coremill.run.cards import card_without_weights
from coremill.run.machines import find_fleet

# Beside the restarts inside of a pod, which end after three without progress: lives of each pod.
FAILURES_PER_POD = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the objects of a run are made from."""

    config: RunConfig
    name: str
    pod: PodSize
    ranks_per_node: int
    threads_per_rank: int
    times: Times
    run_file: RunFile
    plan: Plan | None  # None: the model is on the volume, and cannot be seen from here
    efa: bool
    notes: tuple[str, ...]  # what was decided or changed, in words

    @property
    def section(self) -> KubernetesSection:
        return self.config.kubernetes

    @property
    def namespace(self) -> str:
        return self.section.namespace

    @property
    def nodes(self) -> int:
        return self.config.fleet.nodes

    @property
    def pool(self) -> str:
        """Name of NodePool and EC2NodeClass, which belong to the whole cluster; nodes have it as a label."""
        return cluster_wide(self.namespace, self.name, LONGEST_LABEL)

    @property
    def labels(self) -> dict[str, str]:
        """On every object; together they select the pods of this job."""
        return {
            "app.kubernetes.io/name": "coremill",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/managed-by": "coremill",
        }

    @property
    def folder(self) -> str:
        """On the volume: everything that pods write lies in it."""
        return volume_folder(self.config)

    @property
    def failures_counted(self) -> int:
        """How many failures the job outlives; a fault of one pod may end them all once."""
        return FAILURES_PER_POD * self.nodes


def make_job(loaded: LoadedConfig, *, is_there: bool = False) -> Job:
    """Everything decided; bad input ends here.

    `is_there`: submitted before. To see, stop or delete it, neither need its model be in reach nor the run fit.
    """
    with loaded.placing():
        config = loaded.located
        _require_image(config)
        name = job_name(loaded)
        require_names(config)
        sized, plan, ranks, threads = _sized(config, is_there=is_there)
        if plan is not None and not plan.fits and not is_there:
            raise _does_not_fit(plan)
    efa, efa_notes = _efa(config, sized)
    times = times_of(config, plan)
    # Paths stay as they are written: what this machine found beside the run file is not in the pod.
    run_file = make_run_file(loaded.config, name.value, ranks, threads, times, sized.instances[0].name)
    warnings = paths_pods_do_not_see(loaded.config, loaded.places) + folders_of_others(loaded.config)
    if plan is not None and plan.save is not None:
        warnings += [f"warning: {words}" for words in plan.save.warnings]
    else:
        warnings.append(
            f"warning: {config.model.name} is not seen from here: that it fits into the pods is not checked"
        )
    notes = [
        *([] if name.reason == "set by you" else [f"the job is called {name.value}: {name.reason} (kubernetes.name)"]),
        f"pods of {sized.cpus} CPUs and {sized.memory_gib} GiB: {sized.reason}",
        *_idle(sized),
        *efa_notes,
        *_hints(config),
        *(
            f"in the pods' run file {change.key} is {_shown(change.value)}: {change.reason}"
            for change in run_file.changes
        ),
        *warnings,
    ]
    return Job(
        config=config,
        name=name.value,
        pod=replace(sized, instances=tuple(one for one in sized.instances if one.efa)) if efa else sized,
        ranks_per_node=ranks,
        threads_per_rank=threads,
        times=times,
        run_file=run_file,
        plan=plan,
        efa=efa,
        notes=tuple(notes),
    )


def _require_image(config: RunConfig) -> None:
    if config.kubernetes.image is None:
        raise InputError(
            "there is no kubernetes.image",
            where="kubernetes",
            why="pods are made from a container image with coremill in it",
            do="add a section kubernetes with an image to the run file, or --set kubernetes.image=NAME",
        )


def _sized(config: RunConfig, *, is_there: bool) -> tuple[PodSize, Plan | None, int, int]:
    """The pod, the plan for it, and ranks and threads, which the manifest and the plan have in common."""
    model = config.model
    on_volume = model.config is None and model.name.startswith(f"{config.kubernetes.mount_path}/")
    if on_volume and not Path(model.name).is_dir():
        if not instances_of(config):
            raise InputError(
                "no instance type is named, and none can be chosen",
                where="fleet.instance",
                why=f"{model.name} is on the volume: how large the model is cannot be seen from here",
                do="set fleet.instance, or kubernetes.instances",
            )
        return _laid_out(config)
    try:
        card = card_without_weights(config)
    except InputError:
        if not is_there or not instances_of(config):
            raise
        return _laid_out(config)
    instances, why_these = instances_of(config), ""
    if not instances:
        chosen = cheapest_type(config, card)
        instances, why_these = (chosen.value,), f"{chosen.reason}; "
        config = config.model_copy(update={"fleet": config.fleet.model_copy(update={"instance": chosen.value.name})})
    plan = make_plan(config, find_fleet(config, None, card), card)
    sized = pod_size(config.kubernetes, instances)
    sized = replace(sized, reason=why_these + sized.reason)
    return sized, plan, plan.ranks_per_node.value, plan.threads_per_rank.value


def _laid_out(config: RunConfig) -> tuple[PodSize, None, int, int]:
    """By the machine alone, where the model cannot be seen."""
    parallel = config.parallel
    layout = lay_out(
        find_fleet(config, None).node,
        ranks=None if parallel.ranks_per_node == AUTO else parallel.ranks_per_node,
        threads=None if parallel.threads_per_rank == AUTO else parallel.threads_per_rank,
    )
    sized = pod_size(config.kubernetes, instances_of(config))
    return sized, None, layout.ranks_per_node.value, layout.threads_per_rank.value


def _does_not_fit(plan: Plan) -> InputError:
    memory = plan.memory
    remedy = plan.remedies[0] if plan.remedies else None
    do = "see what would make it fit: coremill plan, with the same options"
    if remedy is not None:
        how = " ".join(f"--set {setting}" for setting in remedy.settings)
        do = f"{remedy.change} ({how}); coremill plan shows what else would do"
    pod = plan.pod or Choice("", "")
    return InputError(
        f"the run does not fit into its pods: a rank needs {size(memory.peak.total)} and may have {size(memory.limit)}",
        where="fleet.instance",
        why=f"a pod has {pod.value}: {pod.reason}",
        do=do,
    )


def _efa(config: RunConfig, sized: PodSize) -> tuple[bool, list[str]]:
    """Whether pods ask for an adapter, and what there is to say of it."""
    if not config.kubernetes.efa:
        return False, []
    without = [one.name for one in sized.instances if not one.efa]
    if len(without) == len(sized.instances):
        return False, [f"warning: kubernetes.efa is left out: {', '.join(without)} has no Elastic Fabric Adapter"]
    notes = ["pods get an Elastic Fabric Adapter, but coremill's own traffic (gloo) does not use it: it is TCP"]
    if without:
        notes.append(f"kubernetes.efa leaves {', '.join(without)} out: no Elastic Fabric Adapter")
    return True, notes


def _idle(sized: PodSize) -> list[str]:
    """Types that are listed together with much smaller ones: a pod is alone on its node."""
    large = [one.name for one in sized.instances if room_for_a_pod(one)[0] >= 2 * sized.cpus]
    return [f"warning: half or more of {', '.join(large)} would be paid for and idle: one pod a node"] if large else []


def _hints(config: RunConfig) -> list[str]:
    section = config.kubernetes
    hints = []
    image = section.image or ""
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        hints.append(f"warning: the image {image} is not pinned: pods that start later may get another one; name a tag")
    if section.zone is None and config.fleet.nodes > 1 and section.has_karpenter:
        hints.append("warning: kubernetes.zone is not set: pods may start in several, whose traffic is charged")
    if section.may_be_spot and len(section.instances) < 2 and section.has_karpenter:
        hints.append("one instance type on spot is often short; kubernetes.instances may list several")
    if "wandb" in config.run.trackers and not section.secrets:
        hints.append(
            "W&B stays offline in pods without a login: name a Secret with WANDB_API_KEY in kubernetes.secrets"
        )
    if section.queue is not None and section.make_queue:
        hints.append(
            f"the queue {section.queue} is made with a quota of this job's size; where it is there, by administrators"
            " or for another run, set kubernetes.make_queue: false"
        )
    if section.storage == "claim":
        hints.append(f"the claim {section.claim} has to be there, in the namespace {section.namespace}")
    return hints


def _shown(value: object) -> str:
    return "left out" if value is None else scalar_text(value)
