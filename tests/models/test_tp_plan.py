"""Reading Hugging Face's tp_plan: sliced layers are consistent, and layers that do not fit are replicated."""

import pytest
import torch
from torch import nn
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from hybrid.models.modules import plain
from hybrid.models.spec import ParamRef, UnsupportedModel
from hybrid.models.tp_plan import STYLES, read_tp_plan
from hybrid.weights.slices import Shard, planned_slices
from tests.tiny_models import SIZES, tiny_model, with_peft

EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def cuts_by_name(model: nn.Module) -> dict[str, str]:
    """How each parameter is sliced, by the name of its module in the model without adapters."""
    names = {module: name.removeprefix("base_model.model.") for name, module in model.named_modules()}
    return {
        f"{names[share.module]}.{leaf}": cut
        for share in read_tp_plan(model).shares
        for leaf, cut in share.cuts.items()
        if plain(share.module)._parameters.get(leaf) is not None
    }


def test_every_inference_style_of_transformers_is_supported():
    """Unsupported styles are for training, for expert parallelism, or of a single model."""
    unsupported = set(ALL_PARALLEL_STYLES.keys()) - STYLES.keys()
    assert {"colwise", "rowwise", "packed_colwise"} <= STYLES.keys()
    assert {name for name in unsupported if not name.startswith("ep_")} <= {
        "all_reduce",
        "grouped_gemm",
        "moe_identity_expert",
        "packed_rowwise",
        "sequence_parallel",
    }, unsupported


def test_a_plan_slices_the_named_layers():
    cuts = cuts_by_name(tiny_model("starcoder2", sizes=SIZES))
    layer = {name.removeprefix("model.layers.1."): cut for name, cut in cuts.items() if ".layers.1." in name}
    assert layer == {
        "self_attn.q_proj.weight": "rows",
        "self_attn.q_proj.bias": "rows",
        "self_attn.k_proj.weight": "kv",
        "self_attn.k_proj.bias": "kv",
        "self_attn.v_proj.weight": "kv",
        "self_attn.v_proj.bias": "kv",
        "self_attn.o_proj.weight": "columns",
        "self_attn.o_proj.bias": "once",
        "mlp.c_fc.weight": "rows",
        "mlp.c_fc.bias": "rows",
        "mlp.c_proj.weight": "columns",
        "mlp.c_proj.bias": "once",
    }
    assert cuts["model.embed_tokens.weight"] == cuts["lm_head.weight"] == "rows"


def test_a_plan_is_the_same_with_adapters():
    bare, tuned = (cuts_by_name(wrap(tiny_model("glm", sizes=SIZES))) for wrap in (lambda model: model, with_peft))
    assert bare == tuned


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("family", "sizes"), [("glm", SIZES), ("starcoder2", SIZES), ("olmoe", EXPERTS)])
def test_slices_cover_every_parameter_once(family, sizes, size):
    """The ranks' slices, concatenated along their dimension, equal the parameter."""
    plan = read_tp_plan(tiny_model(family, sizes=sizes))
    ranks = [planned_slices(plan, Shard(size, index)) for index in range(size)]
    for share in plan.shares:
        for leaf, cut in share.cuts.items():
            parameter = share.module._parameters.get(leaf)
            if parameter is None:
                continue
            ref = ParamRef(share.module, leaf)
            parts, rows = [slices[ref].of(parameter) for slices in ranks], max(parameter.dim() - 2, 0)
            if cut == "once":
                assert parts[0] is parameter
                assert parts[1:] == [None] * (size - 1)
                continue
            if cut == "halves":
                halves = zip(*(part.chunk(2, dim=rows) for part in parts), strict=True)
                joined = torch.cat([torch.cat(half, dim=rows) for half in halves], dim=rows)
            elif cut == "kv":
                joined = torch.cat(parts[:: max(size // share.kv_heads, 1)])
            else:
                joined = torch.cat(parts, dim=rows if cut == "rows" else parameter.dim() - 1)
            assert torch.equal(joined.narrow(rows, 0, parameter.shape[rows]), parameter), (leaf, cut)


def test_related_layers_are_sliced_together_or_not_at_all():
    """If a layer is no matrix, or is missing in the plan, the layers that depend on it are replicated."""
    model = tiny_model("olmo", sizes=SIZES)
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj)
    cuts = cuts_by_name(model)
    assert not [name for name in cuts if "layers.0.mlp" in name]
    assert len([name for name in cuts if "layers.0.self_attn" in name]) == 4
    assert len([name for name in cuts if "layers.1.mlp" in name]) == 3
    model = tiny_model("olmo", sizes=SIZES)
    del model.tp_plan["model.layers.*.self_attn.o_proj"]
    assert not [name for name in cuts_by_name(model) if "self_attn" in name]


def test_a_tied_parameter_with_two_styles_raises():
    model = tiny_model("cohere", sizes=SIZES)
    del model.tp_plan["model.embed_tokens"]
    with pytest.raises(UnsupportedModel, match="lm_head.weight is tied to a parameter that the tp_plan slices diff"):
        read_tp_plan(model)
