"""What NCCL's log says of its network, in the words that NCCL 2.4 to 2.28 write."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kubetune.distributed import nccl_log
from kubetune.distributed.nccl_log import Network

SOCKETS = """\
node-0:41:86 [0] NCCL INFO NCCL_IB_HCA set to mlx5
node-0:41:86 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
{why}
node-0:41:86 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
node-0:41:86 [0] NCCL INFO Initialized NET plugin Socket
node-0:41:86 [0] NCCL INFO Assigned NET plugin Socket to comm
node-0:41:86 [0] NCCL INFO Using network Socket
"""
INFINIBAND = """\
node-0:41:86 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:172.25.30.42<0>
node-0:41:86 [3] NCCL INFO Initialized NET plugin IB
node-0:41:86 [3] NCCL INFO Assigned NET plugin IB to comm
node-0:41:86 [3] NCCL INFO Using network IB
"""


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        (
            "node-0:41:86 [0] NCCL INFO NET/IB : No device found.",
            "no adapter of that name can be opened",
        ),
        ("node-0:41:86 [0] NCCL INFO Failed to open libibverbs.so[.1]", "libibverbs1"),
        ("", ""),
    ],
)
def test_sockets_and_why(why: str, reason: str) -> None:
    network = nccl_log.network(SOCKETS.format(why=why))
    assert network is not None
    assert network.name == "Socket"
    assert reason in network.reason
    assert bool(network.reason) == bool(reason)


def test_infiniband_plugins_and_silence(tmp_path: Path) -> None:
    assert nccl_log.network(INFINIBAND) == Network("IB")
    assert nccl_log.network("h:1:1 [0] NCCL INFO Using network AWS Libfabric\n") == Network(
        "AWS Libfabric"
    )
    assert nccl_log.network("NCCL version 2.28.3+cuda13.0\n") is None
    assert nccl_log.read_network(tmp_path / "none.log") is None


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"NCCL_IB_HCA": "mlx5"}, True),
        ({"NCCL_IB_HCA": "mlx5", "NCCL_IB_DISABLE": "0"}, True),
        ({"NCCL_IB_HCA": "mlx5", "NCCL_IB_DISABLE": "1"}, False),
        ({"NCCL_IB_HCA": "mlx5", "NCCL_NET": "Socket"}, False),
    ],
)
def test_rdma_is_asked_for_by_naming_adapters(environ: dict[str, str], wanted: bool) -> None:
    assert nccl_log.wants_rdma(environ) == wanted


def test_the_log_is_where_nccl_writes_it(tmp_path: Path) -> None:
    """NCCL puts its host and process into the name; a file of the user's own is read in place."""
    environ = {"NCCL_DEBUG": "WARN"}
    log = nccl_log.keep_log(environ, tmp_path)
    assert environ["NCCL_DEBUG"] == "INFO"
    assert log == tmp_path / f"nccl.{os.getpid()}.log"
    log.write_text(INFINIBAND)
    assert nccl_log.read_network(log) == Network("IB")
    settings = {"NCCL_DEBUG_FILE": str(tmp_path / "%h-%p")}
    assert (
        nccl_log.keep_log(settings, tmp_path) == tmp_path / f"{socket.gethostname()}-{os.getpid()}"
    )
