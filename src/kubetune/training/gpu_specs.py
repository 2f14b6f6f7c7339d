"""Peak speeds of GPUs by their vendors' data sheets, for MFU.

They are for dense 16-bit matrix products with sums in fp32. If a data sheet gives the figure with sparsity (L4, L40,
L40S, H100, H200), half of it counts, as its footnote says. Others are measured (learner_flops.py).
"""

from __future__ import annotations

# Part of a device's name → TFLOP/s. The first part that the name holds counts, so longer parts come first.
STATED_TFLOPS: dict[str, float] = {
    # https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703: GB200 5,000 and HGX B200 4,500, with sparsity
    "GB200": 2500.0,
    "B200": 2250.0,
    # https://www.nvidia.com/en-us/data-center/h200/: SXM 1,979 and NVL 1,671, with sparsity
    "H200 NVL": 835.0,
    "H200": 989.0,
    # https://www.nvidia.com/en-us/data-center/h100/: SXM 1,979, NVL 1,671 and PCIe 1,513, with sparsity
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    # https://www.nvidia.com/en-us/data-center/a100/
    "A100": 312.0,
    # https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413: 362.05 | 733; the L40's own: 181.05 | 362.1
    "L40S": 362.0,
    "L40": 181.0,
    # https://www.nvidia.com/en-us/data-center/l4/: 242 with sparsity
    "L4": 121.0,
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    "V100S": 130.0,
    "V100-PCIE": 112.0,
    "V100": 125.0,
    # https://www.nvidia.com/en-us/data-center/tesla-t4/
    "T4": 65.0,
}


def stated_tflops(device_name: str) -> float | None:
    """Return the data sheet's figure for a device, in TFLOP/s. None if it is not listed."""
    # The part after -MIG names a slice of the GPU, and is not compared.
    name = device_name.split("-MIG")[0]
    for part, peak in STATED_TFLOPS.items():
        if part in name:
            return peak
    return None
