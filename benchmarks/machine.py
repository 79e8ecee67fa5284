"""What a benchmark ran on, and how fast that was at the time."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time

import torch

_READINGS = {"sm_mhz": "clocks.sm", "mem_mhz": "clocks.mem", "watts": "power.draw", "celsius": "temperature.gpu"}


class Gpu:
    """The current GPU. `timer` is a harness timer."""

    def __init__(self, timer):
        self._timer = timer

    def describe(self) -> dict:
        """Names and versions."""
        properties = torch.cuda.get_device_properties(None)
        return {**software(), "gpu": properties.name, "multiprocessors": properties.multi_processor_count}

    def state(self) -> dict:
        """The rate of a matrix product now, and the clocks just after it (an idle GPU's say nothing)."""
        rate = matmul_rate(self._timer)
        return {"matmul_tflops": round(rate, 1), **clocks()}


def software() -> dict:
    """Versions that a figure depends on."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
    }
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def matmul_rate(timer, size: int = 8192) -> float:
    """TFLOP/s of a bf16 matrix product of random data, size^3."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    timer.estimate(lambda: a @ b)
    time.sleep(0.15)
    return 2 * size**3 / statistics.median(timer.burst(lambda: a @ b, 10).ms) / 1e9


def clocks() -> dict:
    """Clocks, power and temperature as nvidia-smi reads them, or why they could not be read."""
    uuid = getattr(torch.cuda.get_device_properties(None), "uuid", None)
    which = ["-i", f"GPU-{uuid}"] if uuid else []
    command = ["nvidia-smi", f"--query-gpu={','.join(_READINGS.values())}", "--format=csv,noheader,nounits", *which]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"clocks": f"not readable ({type(error).__name__})"}
    values = text.strip().splitlines()[0].split(",") if text.strip() else []
    return dict(zip(_READINGS, (value.strip() for value in values), strict=False))
