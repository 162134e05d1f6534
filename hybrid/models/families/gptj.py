"""GPT-J: attention and MLP in parallel behind one norm, rope on neighbouring elements, an LM head with a bias."""

import torch
from torch import nn

from hybrid.models.family import Family, Table


def sincos_table(module: nn.Module, _key: str) -> Table:
    """The rotary tables from an attention module's buffer [positions, rotary_dim], which has sines, then cosines."""

    def table(positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rows = module.embed_positions.to(positions.device)[positions.long()]
        sin, cos = rows.to(dtype).float().chunk(2, dim=-1)
        return cos, sin

    return table


GPTJ = Family(
    name="gptj",
    layers="transformer.h",
    outer={"embedding": "transformer.wte", "final_norm": "transformer.ln_f", "head": "lm_head"},
    layer=(
        {
            "attention_norm": "ln_1",
            "q": "attn.q_proj",
            "k": "attn.k_proj",
            "v": "attn.v_proj",
            "o": "attn.out_proj",
            "up": "mlp.fc_in",
            "down": "mlp.fc_out",
        },
    ),
    activation="activation_function",
    spec={"norm": "layer", "parallel": True, "rotary_interleaved": True},
    rotary="transformer.h.0.attn",
    table=sincos_table,
    positions=lambda config: config.max_position_embeddings,
    declares=("rotary_dim",),
)
