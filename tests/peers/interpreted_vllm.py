"""Run vLLM's server on a CPU with its second model runner, whose Triton kernels are then interpreted.

    PYTHON_WITH_VLLM tests/peers/interpreted_vllm.py --model … --port …

Triton has no backend for CPUs, without which vLLM does not use it. With TRITON_INTERPRET=1 it needs none, so one is named
here. Processes that vLLM spawns import this module too.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}

import triton.backends


class Driver:
    """A driver that is there, and does nothing."""

    @staticmethod
    def is_active() -> bool:
        return True


class Backend:
    """What vLLM looks for."""

    driver = Driver
    compiler: Any = None


triton.backends.backends["cpu"] = Backend

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
