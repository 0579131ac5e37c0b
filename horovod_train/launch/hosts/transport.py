"""Environment variables that bind the communication of ranks on a host to its network interface.

Each library reads only its own variables, so that they are set for all of them.
"""

from __future__ import annotations

from horovod_train.checks.host_facts import HostFacts
from horovod_train.launch.hosts.interfaces import Chosen

# Without a network, ranks would still listen on all addresses.
_SHARED_MEMORY = {
    "OMPI_MCA_btl": "^openib,tcp",
    "I_MPI_FABRICS": "shm",
    "FI_TCP_IFACE": "lo",
    "UCX_NET_DEVICES": "lo",
}


def transport_variables(facts: HostFacts, interface: Chosen | None) -> dict[str, str]:
    """Return the variables of ranks on one host.

    Args:
        facts: Facts about the host.
        interface: Network interface towards other hosts; None: all ranks are on this host.
    """
    variables = {} if facts.reads_memory else without_reads_of_memory()
    if interface is None:
        return {**_SHARED_MEMORY, **variables}
    variables |= {
        "HOROVOD_GLOO_IFACE": interface.name,
        "NCCL_SOCKET_IFNAME": interface.name,
        "OMPI_MCA_btl_tcp_if_include": interface.name,
        "FI_TCP_IFACE": interface.name,
    }
    if not facts.has_fabric:  # it includes the adapters of a fabric
        variables["UCX_NET_DEVICES"] = interface.name
    return variables


def without_reads_of_memory() -> dict[str, str]:
    """Return variables with which Open MPI 4 and 5 do not read the memory of other processes.

    Otherwise, they would try it with each message, and print an error each time.
    """
    return {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"}
