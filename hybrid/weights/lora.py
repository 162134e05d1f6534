"""The adapters of PEFT and DeepSpeed-Chat: read from a model, and merged out of place.

An adapted module is described by the plain module that it wraps, which takes its place during inference, and by a
formula for that module's weights with the active adapters merged. Training weights are read, never written.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from hybrid.models.modules import is_on_quantized, unmergeable_adapter, whole_shape
from hybrid.models.quantized import DequantizedLinear, read_dtype

MERGEABLE = (
    "LoRA, rsLoRA and DoRA on Linear, Conv1D and Embedding, LoRA on expert parameters, modules_to_save, trainable "
    "tokens, and DeepSpeed-Chat's LoRA"
)


MERGE_ELEMENTS = 2**22  # elements of a weight that are held in float32 at once while adapters are merged


class LowRank(NamedTuple):
    """The low-rank delta of an adapter to a weight [out, in]: scale · b · a.  a [r, in], b [out, r].

    adapter: its name in PEFT; "" for adapters without names.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    adapter: str = ""


class AdapterParams(NamedTuple):
    """The training parameters of one active adapter in one module.

    a, b: the factors as `LowRank`, or their transposes.  bias: added to the module's, times the scale.
    magnitude: DoRA's vector [out].  adapter: as in `LowRank`.
    """

    a: nn.Parameter
    b: nn.Parameter
    scale: float
    bias: nn.Parameter | None = None
    magnitude: nn.Parameter | None = None
    adapter: str = ""


Whole = Callable[[nn.Parameter], torch.Tensor]  # returns a parameter's full tensor


def itself(param: nn.Parameter) -> torch.Tensor:
    """Return the `Whole` of parameters that are gathered."""
    return param


def merged_weight(weight: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + s·B·A as a new float32 tensor (LoRA, arXiv:2106.09685).  weight [out, in], lora_a [r, in], lora_b [out, r].

    Summed in float32 for the caller to round once. Adding a delta in bf16 and subtracting it later would not give
    the old bits back.
    """
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale)


def merge_low_rank(
    weight: torch.Tensor,
    deltas: list[LowRank],
    into: torch.Tensor,
    magnitudes: list[torch.Tensor | None] | None = None,
) -> None:
    """Write W + Σ scale · b · a to `into`, summed in float32 and rounded once.  weight, into [out, in]

    magnitudes: of each delta, DoRA's vector m [out], or None; None: no delta has one. With DoRA (arXiv:2402.09353) the
        sum up to and with that delta is multiplied by m / ‖W + scale · b · a‖: the norm, over each output row, is of
        the base weight with that delta alone. This is the order of PEFT's forward in eval mode (0.21).
    """
    magnitudes = magnitudes or [None] * len(deltas)
    step = max(MERGE_ELEMENTS // max(weight.shape[1], 1), 1)
    for rows in (slice(start, start + step) for start in range(0, len(weight), step)):
        total = weight[rows]
        for (a, b, scale, _), magnitude in zip(deltas, magnitudes, strict=True):
            total = merged_weight(total, a, b[rows], scale)
            if magnitude is not None:
                norm = torch.linalg.norm(merged_weight(weight[rows], a, b[rows], scale), dim=1)
                total = (magnitude[rows].float() / norm).unsqueeze(1) * total
        into[rows] = total


class AdaptedModule(ABC):
    """One adapted module of a model.

    name: the adapted module's name in the model.
    parent, child: its parent module and its name there; `plain` takes its place during inference.
    wrapper: the module with the adapters.
    plain: the module without adapters.
    sources: the base's training parameters, by `plain`'s parameter names.
    training_params: those of each module inside `wrapper`, kept because the window replaces them.
    """

    def __init__(self, name: str, parent: nn.Module, wrapper: nn.Module, plain: nn.Module, sources: dict):
        self.name, self.parent, self.child = name, parent, name.rpartition(".")[2]
        self.wrapper, self.plain = wrapper, plain
        self.training_params = {module: dict(module._parameters) for module in wrapper.modules()}
        self.sources = {key: param for key, param in sources.items() if param is not None}

    @abstractmethod
    def state(self) -> tuple[tuple[str, float], ...]:
        """Return the active adapters and their scales, comparable with those of an earlier merge. Empty: none is
        active."""

    @abstractmethod
    def active_params(self) -> list[AdapterParams]:
        """Return the parameters of the active adapters, in their order."""

    def adapter_params(self) -> list[nn.Parameter]:
        """Return the adapters' parameters that `merge` reads."""
        params = [param for each in self.active_params() for param in (each.a, each.b, each.bias, each.magnitude)]
        return [param for param in params if param is not None]

    def changed(self) -> dict[str, torch.Size]:
        """Return full shapes of the tensors of `plain` that the active adapters change, by parameter name."""
        return {"weight": whole_shape(self.sources["weight"])}

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor], whole: Whole = itself) -> None:
        """Write the tensors of `changed` to `into`, from full `base` tensors: summed in float32 and rounded once.

        At most MERGE_ELEMENTS (at least a row) of one weight are in float32 at once, in addition to the factors.
        """
        weight, merged = self.in_weight_layout(base["weight"]), self.in_weight_layout(into["weight"])
        merge_low_rank(weight, self.low_rank(whole), merged, self.magnitudes(whole))

    def merged(self, base: dict[str, torch.Tensor], whole: Whole = itself) -> dict[str, torch.Tensor]:
        """Return the tensors of `changed` with the active adapters merged, as new tensors in the base's dtype."""
        weight = next(iter(base.values()))
        into = {name: weight.new_empty(shape) for name, shape in self.changed().items()}
        self.merge(base, into, whole)
        return into

    def merge_temporary_bytes(self) -> int:
        """Return the bytes that `merge` needs in addition to the factors and its output: a block of rows and its
        float32 sum."""
        with_dora = any(params.magnitude is not None for params in self.active_params())
        blocks = [0]
        for param in self.sources.values():
            shape, nbytes = whole_shape(param), (4 if read_dtype(param) == torch.float32 else 8) + 4 * with_dora
            if len(shape) > 1:
                blocks.append(min(shape.numel(), max(MERGE_ELEMENTS, shape[-1])) * nbytes)
        return max(blocks)

    def is_low_rank(self) -> bool:
        """Whether the active adapters only add low-rank products to `weight` and change no other tensor."""
        return all(params.bias is None and params.magnitude is None for params in self.active_params())

    def low_rank(self, whole: Whole = itself) -> list[LowRank]:
        """Return the deltas of the active adapters to `weight` [out, in], in their order. Expects `is_low_rank`."""
        return [LowRank(whole(each.a), whole(each.b), each.scale, each.adapter) for each in self.active_params()]

    def magnitudes(self, whole: Whole = itself) -> list[torch.Tensor | None]:
        """DoRA's magnitude vector [out] of each active adapter, or None."""
        vectors = [params.magnitude for params in self.active_params()]
        return [None if vector is None else whole(vector) for vector in vectors]

    def can_run_unmerged(self) -> bool:
        """Whether the module may be computed unmerged: y = W x, then y + scale · b (a x) for each of `low_rank`.

        Factors in another dtype than the weight are merged: PEFT computes with them in their dtype and rounds at other
        points.
        """
        if not self.is_low_rank() or not isinstance(self.plain, nn.Linear | Conv1D):
            return False
        return {param.dtype for param in self.adapter_params()} == {read_dtype(self.sources["weight"])}

    def in_weight_layout(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [out, n] in the layout of `weight`: transposed to [n, out] if the weight is [in, out]."""
        return rows


class PeftAdapted(AdaptedModule):
    """The common base of PEFT's LoRA layers: active adapters, scales and variants."""

    def state(self) -> tuple[tuple[str, float], ...]:
        if self.wrapper.disable_adapters or self.wrapper.merged:
            return ()
        scaling = self.wrapper.scaling
        return tuple([(adapter, scaling[adapter]) for adapter in self.active()])

    def active(self) -> list[str]:
        """Return the names of the active adapters that this module has."""
        return [adapter for adapter in self.wrapper.active_adapters if adapter in self.wrapper.scaling]

    def magnitude(self, adapter: str) -> nn.Parameter | None:
        """Return an adapter's DoRA magnitude vector [out], or None."""
        return self.wrapper.lora_magnitude_vector[adapter].weight if adapter in self.wrapper.lora_variant else None


class PeftLinear(PeftAdapted):
    """`lora.Linear` over nn.Linear or Conv1D (whose weight is [in, out]: `fan_in_fan_out`), and PEFT's classes for
    quantized layers."""

    def active_params(self) -> list[AdapterParams]:
        params = []
        for name in self.active():
            a, b = self.training_params[self.wrapper.lora_A[name]], self.training_params[self.wrapper.lora_B[name]]
            scale = self.wrapper.scaling[name]
            params.append(AdapterParams(a["weight"], b["weight"], scale, b["bias"], self.magnitude(name), name))
        return params

    def changed(self) -> dict[str, torch.Size]:
        weight = whole_shape(self.sources["weight"])
        biased = any(params.bias is not None for params in self.active_params())
        outputs = weight[1] if self.wrapper.fan_in_fan_out else weight[0]
        return {"weight": weight} | ({"bias": torch.Size([outputs])} if biased else {})

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor], whole: Whole = itself) -> None:
        super().merge(base, into, whole)
        if "bias" in into:
            bias = base["bias"].float() if "bias" in base else torch.zeros_like(into["bias"], dtype=torch.float32)
            for params in self.active_params():
                if params.bias is not None:
                    bias = bias + params.scale * whole(params.bias).float()
            into["bias"].copy_(bias)

    def in_weight_layout(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.T if self.wrapper.fan_in_fan_out else rows


class PeftEmbedding(PeftAdapted):
    """`lora.Embedding`: weight [vocabulary, hidden], factors A [r, vocabulary] and B [hidden, r]."""

    def active_params(self) -> list[AdapterParams]:
        a, b, scaling = self.wrapper.lora_embedding_A, self.wrapper.lora_embedding_B, self.wrapper.scaling
        return [AdapterParams(b[n], a[n], scaling[n], None, self.magnitude(n), n) for n in self.active()]

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor], whole: Whole = itself) -> None:
        # Transposed: DoRA's norms are over the vocabulary.
        deltas = [delta._replace(a=delta.b.T, b=delta.a.T) for delta in self.low_rank(whole)]
        merge_low_rank(base["weight"].T, deltas, into["weight"].T, self.magnitudes(whole))

    def low_rank(self, whole: Whole = itself) -> list[LowRank]:
        return [delta._replace(a=delta.a.T, b=delta.b.T) for delta in super().low_rank(whole)]


class PeftExperts(PeftAdapted):
    """Nested `lora.ParamWrapper`s, each over one parameter of the same module (an experts block)."""

    def wrappers(self) -> list[lora.ParamWrapper]:
        """Return the nested wrappers, the outermost first."""
        chain, module = [], self.wrapper
        while isinstance(module, lora.ParamWrapper):
            chain.append(module)
            module = module.base_layer
        return chain

    def active_params(self) -> list[AdapterParams]:
        return [
            AdapterParams(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.scaling[name], adapter=name)
            for wrapper in self.wrappers()
            for name in self.active()
        ]

    def changed(self) -> dict[str, torch.Size]:
        names = [wrapper.parameter_name for wrapper in self.wrappers()]
        return {name: whole_shape(self.sources[name]) for name in names}

    def merge(self, base: dict[str, torch.Tensor], into: dict[str, torch.Tensor], whole: Whole = itself) -> None:
        for wrapper in self.wrappers():
            weight, merged = base[wrapper.parameter_name], into[wrapper.parameter_name]
            for expert in range(wrapper.num_experts):
                deltas = [expert_delta(wrapper, adapter, expert, whole) for adapter in self.active()]
                merge_low_rank(expert_matrix(wrapper, weight, expert), deltas, expert_matrix(wrapper, merged, expert))

    def is_low_rank(self) -> bool:
        return False  # a product for each expert, over several parameters


def expert_delta(wrapper: lora.ParamWrapper, adapter: str, expert: int, whole: Whole) -> LowRank:
    """One expert's delta, from the factors of all experts: a [experts·r, in], b [out, r·experts] (PEFT 0.21,
    ParamWrapper.get_delta_weight)."""
    a, b = whole(wrapper.lora_A[adapter].weight), whole(wrapper.lora_B[adapter].weight)
    a = a.view(wrapper.num_experts, -1, a.shape[-1])[expert]
    b = b.view(b.shape[0], -1, wrapper.num_experts)[..., expert]
    return LowRank(a, b, wrapper.scaling[adapter])


def expert_matrix(wrapper: lora.ParamWrapper, weight: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert's matrix [out, in], from a parameter [experts, in, out], or [experts, out, in] where PEFT swapped the
    features."""
    if wrapper.num_experts == 1:
        return weight
    return weight[expert] if wrapper._did_swap_in_out_features else weight[expert].T


class ChatLinear(AdaptedModule):
    """DeepSpeed-Chat's `LinearLayer_LoRA`: weight [out, in], lora_right_weight [in, r], lora_left_weight [r, out]."""

    def state(self) -> tuple[tuple[str, float], ...]:
        if getattr(self.wrapper, "fuse_lora", False):  # by `fuse_lora_weight`: the base weight contains it
            return ()
        return (("LoRA", self.wrapper.lora_scaling),)

    def active_params(self) -> list[AdapterParams]:
        params = self.training_params[self.wrapper]
        return [AdapterParams(params["lora_right_weight"], params["lora_left_weight"], self.wrapper.lora_scaling)]

    def low_rank(self, whole: Whole = itself) -> list[LowRank]:
        return [delta._replace(a=delta.a.T, b=delta.b.T) for delta in super().low_rank(whole)]


def is_chat_lora(module: nn.Module) -> bool:
    """Whether `module` is DeepSpeed-Chat's LoRA layer: it owns the parameters, a wrapper only forwards them."""
    return {"lora_right_weight", "lora_left_weight"} <= module._parameters.keys() and hasattr(module, "lora_scaling")


def read_adapters(model: nn.Module) -> list[AdaptedModule]:
    """Every adapted module of `model`.

    Raises NotImplementedError, with the module's name, if it has an adapter that cannot be merged.
    """
    if reason := unmergeable_adapter(model):
        raise NotImplementedError(f"{reason} and cannot be merged for generation; what can: {MERGEABLE}")
    adapted: list[AdaptedModule] = []
    nested: nn.Module | None = None  # the base layer of the last adapted module: an experts block has several adapters
    for name, module in model.named_modules():
        if isinstance(module, TrainableTokensLayer):
            continue
        if module is not nested and (isinstance(module, BaseTunerLayer) or is_chat_lora(module)):
            adapted.append(read_adapter(model.get_submodule(name.rpartition(".")[0]), name, module))
        base = module._modules.get("base_layer")
        nested = base if isinstance(module, BaseTunerLayer) else nested
    return adapted


def read_adapter(parent: nn.Module, name: str, module: nn.Module) -> AdaptedModule:
    """Return the `AdaptedModule` of `module`, an adapter layer that can be merged."""
    if isinstance(module, BaseTunerLayer):
        plain = module.get_base_layer()
        if is_on_quantized(module):
            return PeftLinear(name, parent, module, DequantizedLinear(plain), plain._parameters)
        kinds: dict[type, Callable[..., AdaptedModule]]
        kinds = {lora.Linear: PeftLinear, lora.Embedding: PeftEmbedding, lora.ParamWrapper: PeftExperts}
        return kinds[type(module)](name, parent, module, plain, plain._parameters)
    rows, columns = whole_shape(module.weight)
    shell = nn.Linear(columns, rows, bias=module.bias is not None, device="meta")  # gets a window's weights
    return ChatLinear(name, parent, module, shell, {"weight": module.weight, "bias": module.bias})
