"""The free memory of a rank."""

import os

from deepspeed.accelerator import get_accelerator

from hybrid.runtime.parallel import world_size


def free_bytes() -> int:
    """Return the free bytes of this rank's device. On CPUs: the host's free memory divided by the ranks on the host.

    On a GPU, memory that torch's allocator has reserved but does not use counts as free.
    """
    accelerator = get_accelerator()
    free = accelerator.available_memory()
    if accelerator.device_name() == "cpu":
        return free // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return free + accelerator.memory_reserved() - accelerator.memory_allocated()
