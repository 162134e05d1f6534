"""What DeepSpeed's `InferenceEngine` (0.19.8) has in addition to `forward` and `generate`, on our engine."""

from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig

from hybrid.call_lock import CallLock, one_at_a_time
from hybrid.kernels.cuda_graph import GraphedForward
from hybrid.parallel import InferenceGroup
from hybrid.profiling import ModelTimes


class DeepSpeedInferenceSurface:
    """The public names of DeepSpeed's engine. A base of `InferenceEngine`."""

    # The same value in every engine of this class.
    local_cuda_graph = is_compiled = False
    quantization_scales = ep_group = expert_mp_group = None
    quantize_merge_count = 1

    module: nn.Module
    call_lock: CallLock
    _group: InferenceGroup
    _graphs: GraphedForward | None
    _times: ModelTimes
    _own_hooks: list[RemovableHandle]

    @property
    def mp_group(self) -> torch.distributed.ProcessGroup | None:
        """The tensor-parallel group; None if this rank is alone in it."""
        return self._group.tensor.group

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's generation config, which transformers' pipelines read from the engine."""
        return self.module.generation_config

    @property
    def cuda_graph_created(self) -> bool:
        """Whether a forward has been captured as a CUDA graph."""
        return self._graphs is not None and bool(self._graphs.graphs)

    @property
    def model_profile_enabled(self) -> bool:
        """Whether `profile_model_time` was called."""
        return self._times.enabled

    @one_at_a_time
    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Time every forward from now on, also inside `generate`; `model_times` gives the results.

        use_cuda_events: use CUDA events if there are any; otherwise the clock, with a device synchronization.
        """
        if not self._times.enabled and self._graphs is None:
            self._own_hooks += [
                self.module.register_forward_pre_hook(self._times.begin),
                self.module.register_forward_hook(self._times.end),
            ]
        self._times.enable(use_cuda_events)

    @one_at_a_time
    def model_times(self) -> list[float]:
        """Milliseconds of each forward since the last call. Raises AssertionError if profiling is not enabled."""
        return self._times.taken()

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: raises NotImplementedError."""
        raise NotImplementedError(
            "compile: an engine's containers are not compiled by torch; compile a model that is in no engine, or use "
            "replace_with_kernel_inject=true"
        )
