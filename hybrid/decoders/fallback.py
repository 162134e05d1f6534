"""Reasons for running a model's own layers: which hooks count, and one warning per reason."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial

import torch
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybrid.models.model_info import ModelInfo
from hybrid.parallel import rank

# Frameworks' hooks that do not change what a fused decoder computes, by the module that defines them (deepspeed 0.19.8,
# transformers 5.23, TRL 1.16): ZeRO's and the engine's, the FLOPS profiler's, NEFTune's (off in eval mode), activation
# offloading's, and those that collect hidden states, which stay on the layers after the first forward that asked for
# hidden states.
HARMLESS_HOOK_MODULES = (
    "deepspeed.runtime.zero.",
    "deepspeed.runtime.engine",
    "deepspeed.profiling.",
    "transformers.integrations.neftune",
    "transformers.utils.output_capturing",
    "trl.models.activation_offloading",
)
# The hook that makes an embedding's output require gradients: transformers' and PEFT's names, which tutorials copy.
INPUT_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
DECODER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_WARNING = "rollout.containers=native, or replace_with_kernel_inject=false, runs so without this warning"


def is_harmless_hook(hook: Callable) -> bool:
    """Whether a forward hook or forward pre-hook is a framework's that does not change a fused decoder's results.

    The input-gradient hook is recognised by its name and its code, because every framework has its own copy.
    """
    while isinstance(hook, partial):
        hook = hook.func
    if (getattr(hook, "__module__", None) or "").startswith(HARMLESS_HOOK_MODULES):
        return True
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_name in INPUT_GRADIENT_HOOKS and code.co_names == ("requires_grad_",)


class ForeignHooks:
    """Finds hooks on the model's modules that only run if the modules run.

    model: whose modules are searched.  own_hooks: gives the training engine's handles. Each hook is classified once, by
        its number, which is unique for the life of the process; later calls only read every module's hook dictionaries.
    """

    def __init__(self, model: nn.Module, own_hooks: Callable[[], Iterable[RemovableHandle]]):
        self.modules, self.own_hooks = list(model.named_modules()), own_hooks
        self.harmless: set[int] = set()  # numbers of hooks that do not prevent the fused decoder

    def first(self) -> str:
        """A description of the first foreign hook; "" if there is none."""
        for name, module in self.modules:
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                for number, hook in hooks.items():
                    if number in self.harmless:
                        continue
                    if not is_harmless_hook(hook) and number not in {handle.id for handle in self.own_hooks()}:
                        return f"{getattr(hook, '__qualname__', type(hook).__name__)} on {name or 'the model'}"
                    self.harmless.add(number)
        return ""


def no_decoder_reason(info: ModelInfo, embedding: Callable[[], torch.Tensor]) -> str:
    """Why no fused decoder can run a model, and what the user can do about it; "" if one may.

    embedding: gives the embedding weight of a model with a layout.
    """
    if info.layout is None:
        return f"{info.reasons['layout']} (hybrid/models/README.md shows how a family is added; {NO_WARNING})"
    for module in info.model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            return (
                f"a {type(module).__name__} changes a module as it runs (train the whole module, by PEFT's "
                f"modules_to_save; {NO_WARNING})"
            )
    if (dtype := embedding().dtype) not in DECODER_DTYPES:
        return (
            f"its weights are {dtype}, and decoders compute in float32, bfloat16 and float16 (cast the model to "
            f"one of these; {NO_WARNING})"
        )
    return ""


class FallbackReasons:
    """Reasons why requests of one engine ran natively. Each reason is warned about once, on rank 0.

    last: the latest reason since `reset()`; "" if no request ran natively.
    """

    def __init__(self) -> None:
        self.last = ""
        self.warned: set[str] = set()

    def note(self, reason: str, warns: bool = True) -> None:
        """Record that a request runs natively.

        reason: why, and what the user can do about it.  warns: False if the user asked for it.
        """
        self.last = reason
        if warns and reason not in self.warned:
            self.warned.add(reason)
            if rank() == 0:
                warnings.warn(f"the model runs in native containers: {reason}", stacklevel=4)

    def reset(self) -> None:
        """Clear the latest reason at the start of an iteration."""
        self.last = ""
