"""Holds a local Ray cluster with a dashboard, on free ports, until its standard input ends."""

import json
import sys

import ray

context = ray.init(num_cpus=4, include_dashboard=True, dashboard_port=0, configure_logging=False, log_to_driver=False)
print(json.dumps({"dashboard": context.dashboard_url, "address": context.address_info["gcs_address"]}), flush=True)
sys.stdin.read()
ray.shutdown()
