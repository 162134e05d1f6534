"""The methods of DeepSpeed's own hybrid engine (`DeepSpeedHybridEngine`, 0.19.8) that scripts call, on our engine."""

from typing import Any, NoReturn

from torch import nn

from hybrid.runtime.call_lock import CallLock, with_call_lock
from hybrid.training.inference_runtime import InferenceRuntime


class DeepSpeedMethods:
    """The public names that `DeepSpeedHybridEngine` has in addition to a training engine's. A base of `HybridEngine`.

    Fusing and unfusing change only inference's copy of the weights; the training weights keep their bytes.
    """

    call_lock: CallLock
    module: nn.Module
    _runtime: InferenceRuntime
    is_lora_fused = False  # whether `fuse_lora_weight()` was called last; has no effect on generation

    @with_call_lock
    def fuse_lora_weight(self) -> None:
        """Merge the adapters into inference's copy now instead of in the next `generate()`. Under ZeRO-3 a collective.

        Merges nothing if `rollout.lora` is "unmerged" or weights are gathered layer by layer.
        """
        with self._runtime.executor.block(adapters=True):
            self.is_lora_fused = True

    @with_call_lock
    def unfuse_lora_weight(self) -> None:
        """Free the merged weights. The next `generate()` merges again; `adapters=False` generates without adapters.

        Raises RuntimeError inside `inference()`.
        """
        self._runtime.window.require_closed("unfuse_lora_weight()")
        self._runtime.snapshot.drop_merged()
        self.is_lora_fused = False

    unfuse_lora_weight_non_pinned = unfuse_lora_weight

    def retake_inference_cache(self) -> None:
        """Do nothing: the KV cache is allocated when a request needs it."""

    @with_call_lock
    def release_inference_cache(self) -> None:
        """Free the KV cache; the next `generate()` allocates a new one.

        Raises RuntimeError inside `inference()`.
        """
        self._runtime.window.require_closed("release_inference_cache()")
        self._runtime.generator.release_kv()

    @property
    def layer_params(self) -> list[list[nn.Parameter]]:
        """The training parameters of each transformer layer, without adapters.

        Raises RuntimeError inside `inference()`.
        """
        return self._params_by_layer(of_adapters=False)

    @property
    def layer_lora_params(self) -> list[list[nn.Parameter]]:
        """The adapters' parameters in each transformer layer. Raises RuntimeError inside `inference()`."""
        return self._params_by_layer(of_adapters=True)

    @property
    def all_lora_params(self) -> list[nn.Parameter]:
        """The parameters of the active adapters."""
        return [param for adapted in self._runtime.snapshot.adapted for param in adapted.adapter_params()]

    @property
    def all_layers_params(self) -> list[nn.Parameter]:
        """Every training parameter."""
        return list(self.module.parameters())

    def _params_by_layer(self, of_adapters: bool) -> list[list[nn.Parameter]]:
        self._runtime.window.require_closed("reading training parameters")  # inside, the model holds the snapshot's
        factors, layers = set(self.all_lora_params), self._runtime.builder.info.layers
        return [[param for param in layer.parameters() if (param in factors) == of_adapters] for layer in layers]

    def prepare_shared_prefill(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported, raises NotImplementedError: the engine detects equal prompts and prefills each once."""
        raise NotImplementedError(
            "prepare_shared_prefill: this engine prefills equal prompts once by itself; use "
            "hybrid.HybridRollout(engine), or engine.rollout(..., num_generations=n)"
        )

    repeat_shared_prefill_cache = prepare_shared_prefill
