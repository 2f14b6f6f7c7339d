"""What is done only for CPUs, each with its reason: `processor` chooses the dtype, `heap` keeps memory.

Only what makes LoRA or full fine-tuning at least 1.3 times as fast, or saves much memory, belongs here. On two cores of
an AMD EPYC (docs/performance.md and docs/forecast.md):

    bfloat16 where the processor has instructions for it     LoRA: 983 tokens/CPU-s, 525 in float32: 1.9 times as fast
    large blocks stay in the heap (`heap.keep_memory`)       LoRA of experts by PEFT's own code: 1.5 to 2.3 times as fast
    few products of matrices stay prepared (as well)         rows of many lengths in bfloat16: 874 MiB instead of 1,576
    weights made anew lie outside the heap (`outside_heap`)  they leave no holes, so that the heap does not grow
    few sizes of products (kernels/product_sizes)            LoRA of experts in bfloat16: 1.5 to 3.3 times as fast as by
                                                             PEFT's code with `keep_memory`; before, slower than that
    short chunks of Mamba-2's scan (models/recurrences)      most of the 2.0 times of Granite's hybrid

The last two decide in which order numbers are added, so that to take them away would change the bits of losses. That
bitsandbytes computes otherwise on a CPU (models/quantization) is about right numbers, not about speed.
"""
