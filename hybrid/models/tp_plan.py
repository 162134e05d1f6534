"""Hugging Face's plan for a model's tensor parallelism (`model.tp_plan`), read module by module."""

import re
from dataclasses import dataclass, replace

from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from hybrid.models.modules import plain, whole_shape
from hybrid.models.spec import ParamRef, UnsupportedModel


@dataclass(frozen=True)
class Style:
    """What a rank keeps of a module's weights, and what ranks do around its forward.

    cut: "rows" (outputs, or a vocabulary), "columns" (inputs), "halves" (rows of each half, gate above up), "": all.
    before: "part": a rank takes its part of the input; "lookup": of token ids, those in its part of the vocabulary.
    after: "sum" or "gather": of the ranks' outputs.
    """

    cut: str = ""
    before: str = ""
    after: str = ""

    @property
    def gives_parts(self) -> bool:
        """Whether the output is a rank's part of the whole."""
        return self.cut in ("rows", "halves") and not self.after

    @property
    def takes_parts(self) -> bool:
        """Whether the input must be a rank's part of the whole."""
        return self.cut == "columns" and self.after == "sum" and not self.before


# Names of transformers 5.23. Others are not known: a model whose plan has one is not spread.
STYLES = {
    "colwise": Style("rows"),
    "colwise_gather_output": Style("rows", after="gather"),
    "colwise_rep": Style("rows", after="gather"),
    "rowwise": Style("columns", after="sum"),
    "rowwise_split_input": Style("columns", before="part", after="sum"),
    "rowwise_rep": Style("columns", before="part", after="sum"),
    "packed_colwise": Style("halves"),
    "embedding_rowwise": Style("rows", before="lookup", after="sum"),
    "embedding_colwise": Style("columns", after="gather"),
    "moe_tp_experts": Style(after="sum"),
    "mla_kv_a_proj": Style(),
    "replicate": Style(),
    "replicated_with_grad_allreduce": Style(),
    "local_params": Style(),
}
HEAD_SIZES = ("head_dim", "head_size", "qk_head_dim")  # what attention modules call theirs; an MLP has none


@dataclass(frozen=True)
class Share:
    """How ranks share one module.

    module: an adapter's wrapper where one sits there.
    cuts: parameter names to how they are cut: as `Style.cut`, "kv" (key or value heads), "once" (the first rank's).
    style: what happens around the module's forward.
    width: of the whole output; of a vocabulary, its size.
    kv_heads: of all ranks, where a cut is "kv".
    """

    module: nn.Module
    cuts: dict[str, str]
    style: Style
    width: int = 0
    kv_heads: int = 0


@dataclass(frozen=True)
class Attention:
    """A module whose heads are spread, and how many it has."""

    module: nn.Module
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class TensorPlan:
    """A plan as read: what is not in `shares` is whole on every rank."""

    shares: tuple[Share, ...]
    attentions: tuple[Attention, ...]


def hugging_face_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model, PEFT's model around it taken off."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def read_tp_plan(model: nn.Module) -> TensorPlan:
    """A model's plan. Raises Unreadable, in words, where there is none, or none that can be followed.

    Modules that hand parts to each other are siblings: they are cut together, or are whole together.
    """
    model = hugging_face_model(model)
    plan = getattr(model, "tp_plan", None)
    if not plan or model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} has no tp_plan for a decoder")
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown:
        raise UnsupportedModel(f"the tp_plan of {type(model).__name__} has {', '.join(unknown)}, which is not known")
    blocks: dict[str, dict[str, Share | None]] = {}  # by the siblings' parent, then by name
    for name, module in model.named_modules():
        style, named = planned(plan, name, module)
        if style is not None or named:
            parent, _, leaf = (name, "", "") if named else name.rpartition(".")
            blocks.setdefault(parent, {})[leaf] = share_of(module, style or Style(), named)
    shares, attentions = [], []
    for parent, block in blocks.items():
        if None in block.values() or gives_parts(block) != takes_parts(block):
            continue
        attention = attention_of(model.get_submodule(parent), block, model.config.get_text_config())
        if attention is not None:
            attentions.append(attention)
            block = {leaf: with_kv_heads(leaf, share, attention) for leaf, share in block.items()}
        shares += block.values()
    if not any(share.style.after == "sum" and share.style.before != "lookup" for share in shares):
        raise UnsupportedModel(f"the tp_plan of {type(model).__name__} spreads no layer")
    require_cut_alike(model, shares)
    return TensorPlan(tuple(shares), tuple(attentions))


def planned(plan: dict[str, str], name: str, module: nn.Module) -> tuple[Style | None, dict[str, Style]]:
    """The style of a module, None where the plan does not name it; and those of its parameters that the plan names."""
    general = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
    own = {leaf: plan.get(f"{general}.{leaf}") for leaf in plain(module)._parameters}
    named = {leaf: STYLES[style] for leaf, style in own.items() if style is not None}
    return STYLES.get(plan.get(general)), named


def share_of(module: nn.Module, style: Style, named: dict[str, Style]) -> Share | None:
    """How ranks share a module; None where what runs there is not a layer that can be cut."""
    if named:
        return Share(module, {leaf: one.cut for leaf, one in named.items()}, style)
    if not style.cut:
        return Share(module, {}, style)
    wrapped = isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper)
    kind = nn.Embedding if style.before == "lookup" or style == STYLES["embedding_colwise"] else nn.Linear
    bare = plain(module)
    if wrapped or isinstance(module, TrainableTokensLayer):
        return None
    if not isinstance(bare, kind) and not (kind is nn.Linear and hasattr(bare, "lora_left_weight")):
        return None
    cuts = {"weight": style.cut, "bias": "once" if style.cut == "columns" else style.cut}
    rows, columns = whole_shape(ParamRef(module, "weight"))
    return Share(module, cuts, style, width=columns if style.cut == "columns" else rows)


def gives_parts(block: dict[str, Share]) -> bool:
    """Whether a module of the block has a part of the whole for its output, or a parameter has."""
    return any(share.style.gives_parts or {"rows", "halves"} & bare_cuts(share) for share in block.values())


def takes_parts(block: dict[str, Share]) -> bool:
    """Whether a module of the block wants a part of the whole for its input, or a parameter does."""
    return any(share.style.takes_parts or "columns" in bare_cuts(share) for share in block.values())


def bare_cuts(share: Share) -> set[str]:
    """How parameters are cut that a module's own forward combines (experts, attention sinks)."""
    return set() if share.style.cut else set(share.cuts.values())


def attention_of(module: nn.Module, block: dict[str, Share], config) -> Attention | None:
    """The heads of a block that is attention, None where it is not, or its heads are not spread."""
    size = next((getattr(module, name) for name in HEAD_SIZES if hasattr(module, name)), 0)
    if not size or not gives_parts(block):
        return None
    if "k_proj" not in block or not block["k_proj"].cuts:
        return Attention(module, config.num_attention_heads, config.num_attention_heads)
    kv_heads = block["k_proj"].width // size
    groups = getattr(module, "num_key_value_groups", config.num_attention_heads // kv_heads)
    return Attention(module, kv_heads * groups, kv_heads)


def with_kv_heads(leaf: str, share: Share, attention: Attention) -> Share:
    """A share of a block that is attention: keys and values are cut by their heads."""
    if leaf not in ("k_proj", "v_proj"):
        return share
    return replace(share, cuts=dict.fromkeys(share.cuts, "kv"), kv_heads=attention.kv_heads)


def require_cut_alike(model: nn.Module, shares: list[Share]) -> None:
    """Raise UnsupportedModel where a parameter that two modules share would be cut in two ways."""
    by_module = {plain(share.module): share.cuts for share in shares}
    cuts: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for leaf, param in module._parameters.items():
            cut = by_module.get(module, {}).get(leaf, "")
            if param is not None and cuts.setdefault(param, cut) != cut:
                raise UnsupportedModel(f"{name}.{leaf} is tied to a parameter that the tp_plan cuts otherwise")
