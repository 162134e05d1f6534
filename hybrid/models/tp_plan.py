"""Hugging Face's plan for a model's tensor parallelism (`model.tp_plan`), read module by module."""

import re
from dataclasses import dataclass, replace

from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from transformers import PretrainedConfig

from hybrid.models.modules import hugging_face_model, plain, unmergeable_adapter, whole_shape
from hybrid.models.spec import UnsupportedModel


@dataclass(frozen=True)
class TPStyle:
    """A module's slicing, and the collectives before and after its forward.

    cut: "rows" (outputs, or a vocabulary), "columns" (inputs, or an embedding's outputs), "halves" (rows of each half,
        gate before up), "": not sliced.
    before: "part": a rank slices its input; "lookup": it looks up only the token ids in its slice of the vocabulary.
    after: "sum" or "gather" of the ranks' outputs; "": neither.
    """

    cut: str = ""
    before: str = ""
    after: str = ""


# The names in transformers 5.23. A model whose plan has another name is not tensor-parallel.
STYLES = {
    "colwise": TPStyle("rows"),
    "colwise_gather_output": TPStyle("rows", after="gather"),
    "colwise_rep": TPStyle("rows", after="gather"),
    "rowwise": TPStyle("columns", after="sum"),
    "rowwise_split_input": TPStyle("columns", before="part", after="sum"),
    "rowwise_rep": TPStyle("columns", before="part", after="sum"),
    "packed_colwise": TPStyle("halves"),
    "embedding_rowwise": TPStyle("rows", before="lookup", after="sum"),
    "embedding_colwise": TPStyle("columns", after="gather"),
    "moe_tp_experts": TPStyle(after="sum"),
    "mla_kv_a_proj": TPStyle(),
    "replicate": TPStyle(),
    "replicated_with_grad_allreduce": TPStyle(),
    "local_params": TPStyle(),
}
HEAD_SIZES = ("head_dim", "head_size", "qk_head_dim")  # attributes of attention modules; an MLP has none of them


@dataclass(frozen=True)
class TPModule:
    """A module that the ranks of a group share.

    module: the module, or the wrapper if it is adapted.
    cuts: parameter name to its slicing: as `TPStyle.cut`, "kv" (by key or value heads), "once" (first rank only).
    style: collectives around the module's forward.
    width: full size of the weight's sliced dimension; 0 if the module has no weight to slice.
    kv_heads: number over all ranks, if a cut is "kv".
    """

    module: nn.Module
    cuts: dict[str, str]
    style: TPStyle
    width: int = 0
    kv_heads: int = 0

    @property
    def outputs_slice(self) -> bool:
        """Whether the output is a rank's slice of the full output (column-parallel)."""
        if not self.style.cut:  # the module's own forward combines its parameters (experts, attention sinks)
            return not {"rows", "halves"}.isdisjoint(self.cuts.values())
        return self.style.cut in ("rows", "halves") and not self.style.after

    @property
    def takes_slice(self) -> bool:
        """Whether the input must be a rank's slice of the full input (row-parallel)."""
        if not self.style.cut:
            return "columns" in self.cuts.values()
        return self.style.cut == "columns" and self.style.after == "sum" and not self.style.before


@dataclass(frozen=True)
class Attention:
    """An attention module whose heads are divided over the ranks, and its number of heads over all ranks."""

    module: nn.Module
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan. Modules that are not in `shares` are replicated on every rank."""

    shares: tuple[TPModule, ...]
    attentions: tuple[Attention, ...]


def read_tp_plan(model: nn.Module) -> TensorPlan:
    """Return the tensor-parallel plan of `model`, from its `tp_plan`.

    Modules that pass slices to each other are siblings: all of them are sliced, or none.

    Raises UnsupportedModel if the model has no `tp_plan` or is an encoder-decoder, if the plan has an unknown style or
    slices no layer, if it slices tied parameters differently, or if adapters run that cannot be merged.
    """
    if reason := unmergeable_adapter(model):
        raise UnsupportedModel(f"{reason}, which cannot be merged or sliced")
    model = hugging_face_model(model)
    plan = getattr(model, "tp_plan", None)
    if not plan or model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} has no tp_plan for a decoder")
    if getattr(model.config.get_text_config(), "per_layer_attributes", None):  # reading one raises (transformers 5.23)
        raise UnsupportedModel(f"{type(model).__name__} has settings that vary by layer: its heads are not known")
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown:
        raise UnsupportedModel(f"the tp_plan of {type(model).__name__} has {', '.join(unknown)}: not supported")
    blocks: dict[str, dict[str, TPModule | None]] = {}  # by the siblings' parent, then by name
    for name, module in model.named_modules():
        style, named = planned(plan, name, module)
        if style is not None or named:
            parent, _, leaf = (name, "", "") if named else name.rpartition(".")
            blocks.setdefault(parent, {})[leaf] = share_of(module, style or TPStyle(), named)
    shares: list[TPModule] = []
    attentions = []
    for parent, block in blocks.items():
        if None in block.values():
            continue
        outputs_slice = any(share.outputs_slice for share in block.values())
        if outputs_slice != any(share.takes_slice for share in block.values()):
            continue
        if outputs_slice:
            attention = attention_of(model.get_submodule(parent), block, model.config.get_text_config())
            if attention is not None:
                attentions.append(attention)
                for leaf in block.keys() & {"k_proj", "v_proj"}:  # sliced by their heads
                    cuts = dict.fromkeys(block[leaf].cuts, "kv")
                    block[leaf] = replace(block[leaf], cuts=cuts, kv_heads=attention.kv_heads)
        shares += block.values()
    if not any(share.style.after == "sum" and share.style.before != "lookup" for share in shares):
        raise UnsupportedModel(f"the tp_plan of {type(model).__name__} slices no layer")
    require_tied_alike(model, shares)
    return TensorPlan(tuple(shares), tuple(attentions))


def planned(plan: dict[str, str], name: str, module: nn.Module) -> tuple[TPStyle | None, dict[str, TPStyle]]:
    """Return the plan's style for a module, or None, and its styles for the module's own parameters, by name."""
    general = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
    styles = {leaf: plan.get(f"{general}.{leaf}") for leaf in plain(module)._parameters}
    named = {leaf: STYLES[style] for leaf, style in styles.items() if style is not None}
    return STYLES.get(plan.get(general)), named


def share_of(module: nn.Module, style: TPStyle, named: dict[str, TPStyle]) -> TPModule | None:
    """Return the sharing of a module; None if it is not a layer that can be sliced."""
    if named:
        return TPModule(module, {leaf: leaf_style.cut for leaf, leaf_style in named.items()}, style)
    if not style.cut:
        return TPModule(module, {}, style)
    wrapped = isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper)
    kind = nn.Embedding if style.before == "lookup" or style == STYLES["embedding_colwise"] else nn.Linear
    bare = plain(module)
    if wrapped or isinstance(module, TrainableTokensLayer):
        return None
    if not isinstance(bare, kind) and not (kind is nn.Linear and hasattr(bare, "lora_left_weight")):
        return None
    cuts = {"weight": style.cut, "bias": "once" if style.cut == "columns" else style.cut}
    rows, columns = whole_shape(bare.weight)
    return TPModule(module, cuts, style, width=columns if style.cut == "columns" else rows)


def attention_of(module: nn.Module, block: dict[str, TPModule], config: PretrainedConfig) -> Attention | None:
    """Return the heads of a block that outputs slices, if it is an attention block; None for other blocks."""
    size = next((getattr(module, name) for name in HEAD_SIZES if hasattr(module, name)), 0)
    if not size:
        return None
    if "k_proj" not in block or not block["k_proj"].cuts:
        return Attention(module, config.num_attention_heads, config.num_attention_heads)
    kv_heads = block["k_proj"].width // size
    groups = getattr(module, "num_key_value_groups", config.num_attention_heads // kv_heads)
    return Attention(module, kv_heads * groups, kv_heads)


def require_tied_alike(model: nn.Module, shares: list[TPModule]) -> None:
    """Raise UnsupportedModel if a parameter that two modules share would be sliced in two ways."""
    by_module = {plain(share.module): share.cuts for share in shares}
    cuts: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for leaf, param in module._parameters.items():
            cut = by_module.get(module, {}).get(leaf, "")
            if param is not None and cuts.setdefault(param, cut) != cut:
                raise UnsupportedModel(f"{name}.{leaf} is tied to a parameter that the tp_plan slices differently")
