"""The adapters of PEFT and DeepSpeed-Chat: read from a model, and merged out of place.

An adapted module is described by the plain module that it wraps, which takes its place during inference, and by a
formula for that module's weights with the active adapters merged. Training weights are read, never written.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.lora.variants import DoraEmbeddingVariant, DoraLinearVariant
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid.weights.gather import whole_shape

MERGEABLE = (
    "LoRA, rsLoRA and DoRA on Linear, Conv1D and Embedding, LoRA on expert parameters, modules_to_save, trainable "
    "tokens, and DeepSpeed-Chat's LoRA"
)


MERGE_ELEMENTS = 2**22  # elements of a weight that are held in float32 at once while adapters are merged


class LowRank(NamedTuple):
    """The low-rank delta of an adapter to a weight [out, in]: scale · b · a.  a [r, in], b [out, r]."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


def merged_weight(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + s·B·A as a new float32 tensor (LoRA, arXiv:2106.09685).  weight [out, in], lora_a [r, in], lora_b [out, r].

    Summed in float32 for the caller to round once. Adding a delta in bf16 and subtracting it later would not give
    the old bits back.
    """
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale)


def dora_weight(
    weight: torch.Tensor,
    base: torch.Tensor,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scale: float,
    magnitude: torch.Tensor,
) -> torch.Tensor:
    """m · (W + s·B·A) / ‖W₀ + s·B·A‖ in float32 (DoRA, arXiv:2402.09353).

    weight, base [out, in], lora_a [r, in], lora_b [out, r], magnitude [out]. The norm, over each output row, is of the
    `base` weight W₀; `weight` W may already contain other adapters. This is the order of PEFT's forward in eval mode
    (0.21).
    """
    norm = torch.linalg.norm(merged_weight(base, lora_a, lora_b, scale), dim=1)
    return (magnitude.float() / norm).unsqueeze(1) * merged_weight(weight, lora_a, lora_b, scale)


def row_blocks(weight: torch.Tensor) -> Iterator[slice]:
    """Slices over the rows of a weight [out, in], each of at most MERGE_ELEMENTS elements or one row."""
    rows, columns = weight.shape
    step = max(MERGE_ELEMENTS // max(columns, 1), 1)
    yield from (slice(start, start + step) for start in range(0, rows, step))


def merge_low_rank(
    weight: torch.Tensor,
    deltas: list[LowRank],
    into: torch.Tensor,
    magnitudes: list[torch.Tensor | None] | None = None,
) -> None:
    """Write W + Σ scale · b · a to `into`, summed in float32 and rounded once.  weight, into [out, in]

    magnitudes: of each delta, DoRA's vector [out], or None; None: no delta has one.
    """
    magnitudes = magnitudes or [None] * len(deltas)
    for rows in row_blocks(weight):
        total = weight[rows]
        for (a, b, scale), magnitude in zip(deltas, magnitudes, strict=True):
            if magnitude is None:
                total = merged_weight(total, a, b[rows], scale)
            else:
                total = dora_weight(total, weight[rows], a, b[rows], scale, magnitude[rows])
        into[rows] = total


class Adapted(ABC):
    """One adapted module of a model.

    name: the adapted module's name in the model.
    parent, child: its parent module and its name there; `plain` takes its place during inference.
    wrapper: the module with the adapters.
    plain: the module without adapters.
    sources: the base's training parameters, by `plain`'s parameter names.
    own: the training parameters of each module inside `wrapper`, kept because lending replaces them.
    Raises NotImplementedError if a base weight is quantized (not floating point).
    """

    def __init__(self, name: str, parent: nn.Module, wrapper: nn.Module, plain: nn.Module, sources: dict):
        self.name = name
        self.parent = parent
        self.child = name.rpartition(".")[2]
        self.wrapper = wrapper
        self.plain = plain
        self.own = {module: dict(module._parameters) for module in wrapper.modules()}
        self.sources = {key: param for key, param in sources.items() if param is not None}
        for key, param in self.sources.items():
            if not param.is_floating_point():
                raise NotImplementedError(
                    f"{name}: {key} is {param.dtype}; an adapter on a quantized weight cannot be merged"
                )

    @abstractmethod
    def state(self) -> tuple:
        """The active adapters and their scales, comparable with those of an earlier merge. Empty: none is active."""

    @abstractmethod
    def adapter_params(self) -> list[nn.Parameter]:
        """The adapters' parameters that `merge` reads."""

    def changed(self) -> dict[str, torch.Size]:
        """Full shapes of the tensors of `plain` that the active adapters change, by parameter name."""
        return {"weight": whole_shape(self.sources["weight"])}

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        """Write the tensors of `changed` to `into`, from full `base` tensors: summed in float32 and rounded once.

        At most MERGE_ELEMENTS (at least a row) of one weight are in float32 at once, in addition to the factors.
        """
        merge_low_rank(base["weight"], self.low_rank(lambda param: param), into["weight"])

    def merged(self, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of `changed` with the active adapters merged, as new tensors in the base's dtype."""
        weight = next(iter(base.values()))
        into = {name: weight.new_empty(shape) for name, shape in self.changed().items()}
        self.merge(base, into)
        return into

    def merge_temporary_bytes(self) -> int:
        """Bytes that `merge` needs in addition to the factors and its output: a block of rows and its float32 sum."""
        sizes = [(whole_shape(param), self._per_element(param)) for param in self.sources.values()]
        blocks = [min(shape.numel(), max(MERGE_ELEMENTS, shape[-1])) * each for shape, each in sizes if len(shape) > 1]
        return max(blocks, default=0)

    def _per_element(self, param: torch.Tensor) -> int:
        """Temporary bytes of `merge` per element of a block of rows."""
        return 4 if param.dtype == torch.float32 else 8

    def is_low_rank(self) -> bool:
        """Whether the active adapters only add low-rank products to `weight` and change no other tensor."""
        return False

    def low_rank(self, whole: Callable[[nn.Parameter], torch.Tensor]) -> list[LowRank]:
        """The deltas of the active adapters to `weight` [out, in], in their order. Expects `is_low_rank`.

        whole: gives a parameter's full tensor.
        """
        return []

    def can_run_unmerged(self) -> bool:
        """Whether the module may be computed unmerged: y = W x, then y + scale · b (a x) for each of `low_rank`.

        Factors in another dtype than the weight are merged: PEFT computes with them in their dtype and rounds at other
        points.
        """
        if not self.is_low_rank() or not isinstance(self.plain, nn.Linear | Conv1D):
            return False
        return {param.dtype for param in self.adapter_params()} == {self.sources["weight"].dtype}

    def as_stored(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [out, n] in the layout of `weight`: transposed to [n, out] if the weight is [in, out]."""
        return rows


class PeftAdapted(Adapted):
    """The common base of PEFT's LoRA layers: active adapters, scales and variants."""

    def state(self) -> tuple:
        if self.wrapper.disable_adapters or self.wrapper.merged:
            return ()
        scaling = self.wrapper.scaling
        return tuple([(adapter, scaling[adapter]) for adapter in self.active()])

    def active(self) -> list[str]:
        """Names of the active adapters that this module has.

        Raises NotImplementedError if one is of a variant other than DoRA.
        """
        scaling = self.wrapper.scaling
        names = [adapter for adapter in self.wrapper.active_adapters if adapter in scaling]
        for adapter in names if self.wrapper.lora_variant else ():
            variant = self.wrapper.lora_variant.get(adapter)
            if variant is not None and not isinstance(variant, DoraLinearVariant | DoraEmbeddingVariant):
                raise NotImplementedError(
                    f"{self.name}: adapter {adapter!r} is a {type(variant).__name__} and cannot be merged for "
                    f"generation; what can: {MERGEABLE}"
                )
        return names

    def _per_element(self, param: torch.Tensor) -> int:
        return super()._per_element(param) + 4 * any(magnitude is not None for magnitude in self.magnitudes())

    def is_low_rank(self) -> bool:
        return not any(adapter in self.wrapper.lora_variant for adapter in self.active())

    def magnitudes(self) -> list[nn.Parameter | None]:
        """The DoRA magnitude vector [out] of each active adapter, or None."""
        vectors, variants = self.wrapper.lora_magnitude_vector, self.wrapper.lora_variant
        return [vectors[adapter].weight if adapter in variants else None for adapter in self.active()]


class PeftLinear(PeftAdapted):
    """`lora.Linear` over nn.Linear or Conv1D (whose weight is [in, out]: `fan_in_fan_out`)."""

    def adapter_params(self) -> list[nn.Parameter]:
        factors = [factor for a in self.active() for factor in (self.wrapper.lora_A[a], self.wrapper.lora_B[a])]
        params = [param for factor in factors for param in self.own[factor].values()]
        return [param for param in (*params, *self.magnitudes()) if param is not None]

    def changed(self) -> dict[str, torch.Size]:
        weight = whole_shape(self.sources["weight"])
        biased = any(self.wrapper.lora_B[adapter].bias is not None for adapter in self.active())
        outputs = weight[1] if self.wrapper.fan_in_fan_out else weight[0]
        return {"weight": weight} | ({"bias": torch.Size([outputs])} if biased else {})

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        wrapper, deltas = self.wrapper, self.low_rank(lambda param: param)
        merge_low_rank(self.as_stored(base["weight"]), deltas, self.as_stored(into["weight"]), self.magnitudes())
        if "bias" in into:
            bias = base["bias"].float() if "bias" in base else 0.0
            for adapter in self.active():
                if wrapper.lora_B[adapter].bias is not None:
                    bias = bias + wrapper.scaling[adapter] * wrapper.lora_B[adapter].bias.float()
            into["bias"].copy_(bias)

    def is_low_rank(self) -> bool:
        return super().is_low_rank() and all(self.wrapper.lora_B[a].bias is None for a in self.active())

    def low_rank(self, whole: Callable[[nn.Parameter], torch.Tensor]) -> list[LowRank]:
        wrapper = self.wrapper
        factors = [(self.own[wrapper.lora_A[a]], self.own[wrapper.lora_B[a]], a) for a in self.active()]
        return [LowRank(whole(a["weight"]), whole(b["weight"]), wrapper.scaling[name]) for a, b, name in factors]

    def as_stored(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.T if self.wrapper.fan_in_fan_out else rows


class PeftEmbedding(PeftAdapted):
    """`lora.Embedding`: weight [vocabulary, hidden], factors A [r, vocabulary] and B [hidden, r]."""

    def adapter_params(self) -> list[nn.Parameter]:
        factors = (self.wrapper.lora_embedding_A, self.wrapper.lora_embedding_B)
        params = [factor[adapter] for adapter in self.active() for factor in factors]
        return params + [param for param in self.magnitudes() if param is not None]

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        a, b, scaling = self.wrapper.lora_embedding_A, self.wrapper.lora_embedding_B, self.wrapper.scaling
        deltas = [LowRank(a[adapter], b[adapter], scaling[adapter]) for adapter in self.active()]
        # Transposed: DoRA's norms are over the vocabulary.
        merge_low_rank(base["weight"].T, deltas, into["weight"].T, self.magnitudes())

    def low_rank(self, whole: Callable[[nn.Parameter], torch.Tensor]) -> list[LowRank]:
        wrapper = self.wrapper
        return [
            LowRank(whole(wrapper.lora_embedding_B[a]).T, whole(wrapper.lora_embedding_A[a]).T, wrapper.scaling[a])
            for a in self.active()
        ]


class PeftExperts(PeftAdapted):
    """Nested `lora.ParamWrapper`s, each over one parameter of the same module (an experts block)."""

    def wrappers(self) -> list[lora.ParamWrapper]:
        """The nested wrappers, the outermost first."""
        chain, module = [], self.wrapper
        while isinstance(module, lora.ParamWrapper):
            chain.append(module)
            module = module.base_layer
        return chain

    def adapter_params(self) -> list[nn.Parameter]:
        return [
            factor[adapter].weight
            for wrapper in self.wrappers()
            for adapter in self.active()
            for factor in (wrapper.lora_A, wrapper.lora_B)
        ]

    def changed(self) -> dict[str, torch.Size]:
        names = [wrapper.parameter_name for wrapper in self.wrappers()]
        return {name: whole_shape(self.sources[name]) for name in names}

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
        for wrapper in self.wrappers():
            weight, merged = base[wrapper.parameter_name], into[wrapper.parameter_name]
            for expert in range(wrapper.num_experts):
                deltas = [expert_delta(wrapper, adapter, expert) for adapter in self.active()]
                merge_low_rank(expert_matrix(wrapper, weight, expert), deltas, expert_matrix(wrapper, merged, expert))

    def is_low_rank(self) -> bool:
        return False  # a product for each expert, over several parameters


def expert_delta(wrapper: lora.ParamWrapper, adapter: str, expert: int) -> LowRank:
    """One expert's delta, from the factors of all experts: a [experts·r, in], b [out, r·experts] (PEFT 0.21,
    ParamWrapper.get_delta_weight)."""
    a, b, experts = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, wrapper.num_experts
    a, b = a.view(experts, -1, a.shape[-1])[expert], b.view(b.shape[0], -1, experts)[..., expert]
    return LowRank(a, b, wrapper.scaling[adapter])


def expert_matrix(wrapper: lora.ParamWrapper, weight: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert's matrix [out, in], from a parameter [experts, in, out], or [experts, out, in] where PEFT swapped the
    features."""
    if wrapper.num_experts == 1:
        return weight
    return weight[expert] if wrapper._did_swap_in_out_features else weight[expert].T


class ChatLinear(Adapted):
    """DeepSpeed-Chat's `LinearLayer_LoRA`: weight [out, in], lora_right_weight [in, r], lora_left_weight [r, out]."""

    def state(self) -> tuple:
        return (self.wrapper.lora_scaling,)

    def adapter_params(self) -> list[nn.Parameter]:
        own = self.own[self.wrapper]
        return [own["lora_right_weight"], own["lora_left_weight"]]

    def is_low_rank(self) -> bool:
        return True

    def low_rank(self, whole: Callable[[nn.Parameter], torch.Tensor]) -> list[LowRank]:
        right, left = map(whole, self.adapter_params())
        return [LowRank(right.T, left.T, self.wrapper.lora_scaling)]


def is_chat_lora(module: nn.Module) -> bool:
    """Whether `module` has the attributes of DeepSpeed-Chat's LoRA layer."""
    return all(hasattr(module, name) for name in ("lora_right_weight", "lora_left_weight", "lora_scaling"))


def read_adapters(model: nn.Module) -> list[Adapted]:
    """Every adapted module of `model`.

    Raises NotImplementedError, with the module's name, if it has an adapter that cannot be merged.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise NotImplementedError(
                f"adapter {name!r} is {config.peft_type} and cannot be merged for generation; what can: {MERGEABLE}"
            )
    adapted: list[Adapted] = []
    inner: set[nn.Module] = set()  # tuner layers inside an adapted module that is already listed
    for name, module in model.named_modules():
        if module in inner or isinstance(module, TrainableTokensLayer):
            continue
        if isinstance(module, BaseTunerLayer) or is_chat_lora(module):
            adapted.append(read_adapter(model.get_submodule(name.rpartition(".")[0]), name, module))
            adapted[-1].state()
            inner.update(child for child in module.modules() if isinstance(child, BaseTunerLayer))
    return adapted


def read_adapter(parent: nn.Module, name: str, module: nn.Module) -> Adapted:
    """`module`, an adapter layer, as an `Adapted`. Raises NotImplementedError if it cannot be merged."""
    if isinstance(module, BaseTunerLayer):
        plain = module.get_base_layer()
        if isinstance(module, lora.Linear) and isinstance(plain, nn.Linear | Conv1D):
            return PeftLinear(name, parent, module, plain, plain._parameters)
        if isinstance(module, lora.Embedding):
            return PeftEmbedding(name, parent, module, plain, plain._parameters)
        if isinstance(module, lora.ParamWrapper):
            return PeftExperts(name, parent, module, plain, plain._parameters)
        raise NotImplementedError(
            f"{name}: {type(module).__module__}.{type(module).__name__} cannot be merged for generation; "
            f"what can: {MERGEABLE}"
        )
    rows, columns = whole_shape(module.weight)
    shell = nn.Linear(columns, rows, bias=module.bias is not None, device="meta")  # gets lent weights
    return ChatLinear(name, parent, module, shell, {"weight": module.weight, "bias": module.bias})
