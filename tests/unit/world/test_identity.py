"""Which rank each launcher's variables make of a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coremill.errors import InputError
from coremill.world.identity import (
    DEFAULT_PORT,
    DERIVED_PORTS,
    NodeIdentity,
    RankIdentity,
    identify,
    identify_node,
    port_of_job,
)

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "MASTER_ADDR": "host-a", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
COREMILL = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "41000", "COREMILL_LAUNCHER_PID": "77", "COREMILL_STORE_FD": "9",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "1208025089",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "8"}
KUBEFLOW = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400",
}  # fmt: skip


def identity(**changes: Any) -> RankIdentity:
    """Rank 1 of 2 on one host, with changes."""
    values: dict[str, Any] = {
        "rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "node_rank": 0,
        "master_address": "127.0.0.1", "master_port": DEFAULT_PORT, "launcher": "environment",
    }  # fmt: skip
    return RankIdentity(**{**values, **changes})


TORCHRUN_RANK = identity(
    rank=3, size=4, node_rank=1, master_address="host-a", master_port=29400, launcher="torchrun", agent_store=True
)
COREMILL_RANK = identity(rank=0, local_rank=0, master_port=41000, launcher="coremill", store_fd=9)
OPEN_MPI_RANK = identity(master_port=port_of_job("1208025089"), launcher="open-mpi")
HYDRA_RANK = identity(master_port=port_of_job("hydra 5"), launcher="hydra")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="plain python"),
        pytest.param({"MASTER_ADDR": "host-a", "OMP_NUM_THREADS": "2"}, None, id="unrelated variables"),
        pytest.param(TORCHRUN, TORCHRUN_RANK, id="torchrun"),
        pytest.param(
            {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"}, replace(TORCHRUN_RANK, restarts=2), id="a restart"
        ),
        pytest.param(COREMILL, COREMILL_RANK, id="coremill"),
        pytest.param(
            {**COREMILL, "TORCHELASTIC_USE_AGENT_STORE": "True"}, COREMILL_RANK, id="coremill has its own store"
        ),
        pytest.param(
            {**COREMILL, "RANK": "1", "LOCAL_RANK": "1"},
            identity(master_port=41000, launcher="coremill"),
            id="only rank 0 takes the socket",
        ),
        pytest.param(OPEN_MPI, OPEN_MPI_RANK, id="Open MPI"),
        pytest.param(HYDRA, HYDRA_RANK, id="MPICH, Intel MPI"),
        pytest.param(
            {**HYDRA, "PMI_JOBID": "12.0"}, identity(master_port=port_of_job("12.0"), launcher="hydra"), id="PMI job id"
        ),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "host-a", "MASTER_PORT": "5000"},
            identity(size=4, node_rank=None, master_address="host-a", master_port=5000, launcher="open-mpi"),
            id="Open MPI on two hosts",
        ),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "host-a"},
            identity(
                size=4,
                node_rank=None,
                master_address="host-a",
                master_port=port_of_job("1208025089"),
                launcher="open-mpi",
            ),
            id="Open MPI on two hosts derives one port everywhere",
        ),
        pytest.param(
            {**HYDRA, "PMI_SIZE": "4", "MASTER_ADDR": "host-a"},
            identity(size=4, node_rank=None, master_address="host-a", launcher="hydra"),
            id="MPICH on two hosts has no job id that all hosts know",
        ),
        pytest.param(
            {"PMI_RANK": "0", "PMI_SIZE": "1"},
            identity(rank=0, size=1, local_rank=0, local_size=1, master_port=0, launcher="hydra"),
            id="mpirun -n 1",
        ),
        pytest.param(
            {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
             "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
            identity(rank=0, size=1, local_rank=0, local_size=1, master_port=0, launcher="open-mpi"),
            id="Open MPI -n 1",
        ),
        pytest.param({**OPEN_MPI, **TORCHRUN}, TORCHRUN_RANK, id="torchrun inside mpirun"),
        pytest.param({**OPEN_MPI, "WORLD_SIZE": "2"}, OPEN_MPI_RANK, id="mpirun with an exported WORLD_SIZE"),
        pytest.param(
            {**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2"},
            identity(master_port=port_of_job("1208025089")),
            id="RANK set by a wrapper under mpirun",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
            identity(master_address="localhost"),
            id="by hand on one host",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "master-0"},
            identity(local_rank=0, local_size=1, node_rank=None, master_address="master-0"),
            id="one rank per pod",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"},
            identity(rank=0, size=1, local_rank=0, local_size=1, master_port=0),
            id="a world of one",
        ),
        pytest.param(KUBEFLOW, None, id="Kubeflow describes a node"),
        pytest.param({**KUBEFLOW, "RANK": "3", "WORLD_SIZE": "4"}, None, id="Kubeflow with RANK by pod"),
        pytest.param({**KUBEFLOW, **COREMILL}, COREMILL_RANK, id="a rank started in a Kubeflow pod"),
    ],
)  # fmt: skip
def test_identify(environ: dict[str, str], expected: RankIdentity | None) -> None:
    assert identify(environ, job_of_process=lambda: "hydra 5") == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        pytest.param({"RANK": "0"}, "WORLD_SIZE", id="no WORLD_SIZE"),
        pytest.param({"WORLD_SIZE": "2"}, "RANK", id="no RANK"),
        pytest.param({"LOCAL_RANK": "0"}, "RANK", id="LOCAL_RANK alone"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR", id="no MASTER_ADDR"),
        pytest.param({**TORCHRUN, "LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE", id="empty LOCAL_WORLD_SIZE"),
        pytest.param({**TORCHRUN, "RANK": "4"}, "rank 4 in a world of 4", id="rank too large"),
        pytest.param({**TORCHRUN, "RANK": "one"}, "RANK=one", id="not a number"),
        pytest.param({**TORCHRUN, "RANK": "-1"}, "RANK=-1", id="negative"),
        pytest.param({**TORCHRUN, "LOCAL_RANK": "2"}, "local rank 2 among 2", id="local rank too large"),
        pytest.param(
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "8 local ranks in a world of 4", id="more local ranks than ranks"
        ),
        pytest.param({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000", id="no such port"),
        pytest.param({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR", id="several hosts without MASTER_ADDR"),
        pytest.param({**OPEN_MPI, "WORLD_SIZE": "3"}, "WORLD_SIZE=3", id="WORLD_SIZE against MPI"),
        pytest.param({**OPEN_MPI, "LOCAL_RANK": "0"}, "LOCAL_RANK=0", id="LOCAL_RANK against MPI"),
        pytest.param({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID", id="MPI without local ranks"),
    ],
)
def test_inconsistent_variables_are_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=named) as caught:
        identify(environ, job_of_process=lambda: None)
    assert caught.value.exit_code == 78


def test_several_hosts_tell_how_to_set_the_address() -> None:
    with pytest.raises(InputError) as caught:
        identify({**HYDRA, "PMI_SIZE": "4"})
    assert "-x MASTER_ADDR=" in str(caught.value) and "-genv MASTER_ADDR" in str(caught.value)


def node(**changes: Any) -> NodeIdentity:
    """The node of KUBEFLOW, with changes."""
    values: dict[str, Any] = {
        "node_rank": 3, "nodes": 4, "ranks_per_node": 2, "master_address": "job-node-0-0.job", "master_port": 29400,
    }  # fmt: skip
    return NodeIdentity(**{**values, **changes})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="plain python"),
        pytest.param(TORCHRUN, None, id="torchrun"),
        pytest.param(KUBEFLOW, node(), id="Kubeflow"),
        pytest.param({**KUBEFLOW, **COREMILL}, None, id="already a rank"),
        pytest.param({**KUBEFLOW, "PET_NPROC_PER_NODE": "auto"}, node(ranks_per_node=None), id="auto"),
        pytest.param({**KUBEFLOW, "PET_NNODES": "4:4"}, node(), id="a range of one"),
        pytest.param(
            {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"},
            node(node_rank=0, nodes=1, master_address="127.0.0.1", master_port=DEFAULT_PORT),
            id="one node",
        ),
    ],
)
def test_identify_node(environ: dict[str, str], expected: NodeIdentity | None) -> None:
    assert identify_node(environ) == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"PET_NODE_RANK": "4"}, "PET_NODE_RANK=4"),
        ({"PET_NODE_RANK": ""}, "PET_NODE_RANK"),
        ({"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
        ({"PET_NNODES": "many"}, "PET_NNODES=many"),
        ({"PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE=gpu"),
    ],
)
def test_inconsistent_node_variables_are_named(changes: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=named):
        identify_node({**KUBEFLOW, **changes})


def test_ports_of_jobs_differ_and_stay_below_the_ephemeral_range() -> None:
    ports = [port_of_job(str(job)) for job in range(100)]
    assert len(set(ports)) > 90
    assert all(port in DERIVED_PORTS for port in ports)
