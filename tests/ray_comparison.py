"""Runs `xformer compare` with the given flags on a Ray cluster of two nodes, of one core each; exits with its code.

Prints the nodes that tasks ran on. A process of its own, because Ray warns and leaves files open.
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_register_timeout_seconds": "600",  # 60 s until a worker counts as lost are not many on a busy machine
    "RAY_memory_monitor_refresh_ms": "0",  # else Ray kills workers when others have taken the machine's memory
}

import ray
from ray.cluster_utils import Cluster

from xformer.commands import cli, compare

if __name__ == "__main__":
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        code = cli.exit_code(compare.command, sys.argv[1:])
        print(f"nodes: {sum(one['Alive'] for one in ray.nodes())}")
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.exit(code)
