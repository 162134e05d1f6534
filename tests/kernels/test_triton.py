"""Each Triton kernel equals its formula.

Without a GPU the kernels run in Triton's interpreter, on CPU tensors; with one, compiled, on the device. The oracles
are float64 formulas, torch's functions and Hugging Face's layers.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotary
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

from hybrid.decoders.batch import BLOCK_SIZE

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
from hybrid.kernels import torch_ops
from hybrid.kernels import triton_attention as attention
from hybrid.kernels import triton_fused as fused
from hybrid.kernels.kv_addresses import LayerKV
from hybrid.kernels.router import Router, routed
from hybrid.kernels.triton_experts import mixture
from tests.device_ops import layer_kv
from tests.kernels import interpreter_bfloat16
from tests.marks import slow_but

interpreter_bfloat16.install()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# Sums in another order than the oracle's: float32 agrees to its rounding, and on a device to its approximate exp2, log2
# and reciprocals; bfloat16 to one unit in the last of 8 bits.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5 if DEVICE == "cuda" else 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9},
}
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(actual: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> None:
    """Equal to within the rounding of our dtype, `slack` times."""
    tolerance = {name: slack * value for name, value in TOLERANCE[actual.dtype].items()}
    torch.testing.assert_close(actual.cpu(), expected.cpu().to(actual.dtype), **tolerance)


def close_with_the_same_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Close, and in half precision mostly equal: one rounding more or less would change about every fourth number."""
    close(actual, expected)
    if actual.dtype == HALF:
        assert (actual == expected).float().mean() > 0.97, "rounds at another step than Hugging Face"


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


# ---------------------------------------------------------------------------------------------------------- attention


class Cache:
    """KV blocks in a shuffled order, with NaN at unused positions.

    lengths: of the sequences.  keys, values [blocks, BLOCK_SIZE, kv_heads, head_dim]; tables int32 [sequences,
        max_blocks].
    """

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, max_blocks: int = 0):
        needed = [-(-length // BLOCK_SIZE) for length in lengths]
        self.lengths = lengths
        self.keys, self.values = torch.full((2, 1 + sum(needed), BLOCK_SIZE, kv_heads, head_dim), math.nan).to(
            DEVICE, dtype
        )
        self.block_tables = torch.zeros(len(lengths), max_blocks or max(needed), dtype=torch.int32, device=DEVICE)
        blocks = (1 + torch.randperm(sum(needed))).to(DEVICE, torch.int32)
        self.k = [random(length, kv_heads, head_dim, dtype=dtype) for length in lengths]
        self.v = [random(length, kv_heads, head_dim, dtype=dtype) for length in lengths]
        for row, (own, length) in enumerate(zip(blocks.split(needed), lengths, strict=True)):
            self.block_tables[row, : len(own)] = own
            for token in range(length):
                self.keys[own[token // BLOCK_SIZE], token % BLOCK_SIZE] = self.k[row][token]
                self.values[own[token // BLOCK_SIZE], token % BLOCK_SIZE] = self.v[row][token]

    @property
    def kv(self) -> LayerKV:
        return layer_kv(self.keys, self.values)

    @property
    def lengths_tensor(self) -> torch.Tensor:
        return torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)

    def attention(self, row: int, q: torch.Tensor, scale, softcap=0.0, window=0, bias=None, sinks=None):
        """The oracle, in float64: attention of the row's last queries.  q [queries, heads, dim]"""
        k, v = (x[row].double().repeat_interleave(q.shape[1] // x[row].shape[1], dim=1) for x in (self.k, self.v))
        length = len(k)
        position = torch.arange(length - len(q), length, device=DEVICE)[:, None]
        token = torch.arange(length, device=DEVICE)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias.double()[:, None, :length]
        unseen = token > position
        if window:
            unseen |= token < position // -window * -window if window < 0 else token <= position - window
        scores = scores.masked_fill(unseen, -math.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, v)


FEATURES = {
    "plain": {},
    "soft cap": {"softcap": 5.0},
    "window": {"window": 40},
    "window under a tile": {"window": 7},
    "window of several splits": {"window": 333},
    "chunks": {"window": -150},
    "chunks under a tile": {"window": -7},
    "bias": {"bias": True},
    "sinks": {"sinks": True, "window": 333},
}
# heads, KV heads, head_dim: groups of 3, 7 and 4 heads, head sizes that are no power of two, multi-query, multi-head.
GROUPED, QWEN, PHI, WIDE, QUERIES, EACH = (6, 2, 20), (14, 2, 80), (8, 2, 96), (4, 1, 128), (9, 1, 16), (2, 2, 16)
CASES = [(feature, GROUPED, dtype) for feature in FEATURES for dtype in (torch.float32, HALF)]
CASES += [("plain", shape, dtype) for shape in (QWEN, PHI, WIDE, QUERIES, EACH) for dtype in (torch.float32, HALF)]
CASES += [("bias", shape, torch.float32) for shape in (EACH, QUERIES)]
QUICK = [("plain", QWEN, HALF), *((feature, GROUPED, HALF) for feature in list(FEATURES)[1:])]


def slack(feature: str, dtype: torch.dtype) -> float:
    """ALiBi's scores are in the hundreds at a few hundred tokens, where float32's steps are 3e-5. In bfloat16 the
    weights too are rounded, before their product with values of size 1 to 4.
    """
    return 10.0 if feature == "bias" else 2.0 if dtype == HALF else 1.0


def choices(features: dict, heads: int, tokens: int) -> dict:
    """Arguments of a feature. ALiBi's slopes are of BLOOM's order of magnitude.  tokens: in the longest sequence."""
    slopes = torch.linspace(0.5, 0.004, heads, device=DEVICE)
    if "bias" in features:
        return {"bias": slopes[:, None] * torch.arange(tokens + BLOCK_SIZE, device=DEVICE)}
    return {**features, "sinks": torch.linspace(-3, 9, heads, device=DEVICE)} if "sinks" in features else features


def workspace(cache: Cache, heads: int) -> attention.SplitWorkspace:
    """The workspace of decode attention, with NaN where nothing has been written."""
    memory = attention.split_workspace(heads // cache.kv.kv_heads, cache.kv.head_dim, torch.device(DEVICE))
    memory.parts.fill_(math.nan)
    memory.log_totals.fill_(math.nan)
    return memory


@pytest.mark.parametrize("splits", slow_but([16], [1, 2, 16]))
@pytest.mark.parametrize(("feature", "shape", "dtype"), slow_but(QUICK, CASES), ids=str)
def test_decode_attention_matches_float64(feature, shape, dtype, splits):
    """Contexts of one token up to as many tiles as splits or more; some need no split. Counters are reset."""
    heads, kv_heads, head_dim = shape
    cache = Cache([1, 300, 32, 65, 1300], kv_heads, head_dim, dtype)
    features = choices(FEATURES[feature], heads, 1300)
    # Queries are a slice of a wider matrix, as after one matmul for q, k and v.
    q = random(5, heads + 3, head_dim, dtype=dtype)[:, :heads]
    memory = workspace(cache, heads)
    blocks = (cache.lengths_tensor, cache.block_tables)
    actual = attention.decode_attention(q, cache.kv, *blocks, memory, head_dim**-0.5, **features, splits=splits)
    assert not memory.counters.any()
    if "window" not in features:
        assert torch.isnan(memory.parts).all() == (splits == 1)
    for row in range(5):
        close(
            actual[row : row + 1],
            cache.attention(row, q[row : row + 1], head_dim**-0.5, **features),
            slack(feature, dtype),
        )


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "tiles", "splits"),
    [
        (1, 8, 2048, 32),
        (1, 1, 2048, 64),
        (16, 8, 2048, 2),
        (17, 8, 2048, 1),
        (1, 8, 5, 4),
        (1, 8, 1, 1),
        (256, 8, 9, 1),
    ],
)
def test_contexts_are_split_only_as_far_as_it_takes_to_fill_a_device(sequences, kv_heads, tiles, splits):
    assert attention.num_splits(sequences, kv_heads, tiles) == splits


@pytest.mark.parametrize(("feature", "shape", "dtype"), slow_but(QUICK, CASES), ids=str)
def test_prefill_attention_matches_float64(feature, shape, dtype):
    """Whole prompts, one token after a long prefix, several tokens after a prefix, more than a program's of them."""
    heads, kv_heads, head_dim = shape
    lengths, new = [40, 65, 33, 1, 175, 400], [40, 1, 5, 1, 135, 9]
    cache = Cache(lengths, kv_heads, head_dim, dtype)
    features = choices(FEATURES[feature], heads, 400)
    cu_seqlens = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
    q = random(sum(new), heads + 3, head_dim, dtype=dtype)[:, :heads]
    actual = attention.prefill_attention(
        q, cache.kv, cu_seqlens, cache.lengths_tensor, cache.block_tables, head_dim**-0.5, **features
    )
    for row, rows in enumerate(zip(q.split(new), actual.split(new), strict=True)):
        close(rows[1], cache.attention(row, rows[0], head_dim**-0.5, **features), slack(feature, dtype))


@pytest.mark.parametrize("feature", ["soft cap", "bias"])
def test_rounded_scores_match_eager_attention(feature):
    """Scores in the hundreds, where half precision is coarse: with the same rounding we match Hugging Face."""
    cache = Cache([70], 2, 16, HALF)
    q = random(70, 2, 16, dtype=HALF) * 16
    k, v = (x[0].transpose(0, 1)[None] for x in (cache.k, cache.v))  # [1, heads, tokens, head_dim]
    mask = torch.full((70, 70), torch.finfo(HALF).min, dtype=HALF, device=DEVICE).triu(1)
    if feature == "soft cap":
        choice, module = {"softcap": 30.0}, SimpleNamespace(num_key_value_groups=1, training=False)
        eager, _ = gemma2_eager(module, q.transpose(0, 1)[None], k, v, mask, scaling=1.0, softcap=30.0)
        eager = eager[0]
    else:  # BLOOM's
        choice = {"bias": (torch.tensor([[2.0], [0.3]], device=DEVICE) * torch.arange(96, device=DEVICE)).to(HALF)}
        scores = choice["bias"][:, None, :70].baddbmm(q.transpose(0, 1), k[0].transpose(1, 2), beta=1.0, alpha=1.0)
        weights = (scores + mask).softmax(-1, dtype=torch.float32).to(HALF)
        eager = (weights @ v[0]).transpose(0, 1)
    cu_seqlens = torch.tensor([0, 70], dtype=torch.int32, device=DEVICE)
    blocks, memory = (cache.lengths_tensor, cache.block_tables), workspace(cache, 2)
    for actual, expected in (
        (attention.prefill_attention(q, cache.kv, cu_seqlens, *blocks, 1.0, **choice, rounded=True), eager),
        (attention.decode_attention(q[-1:], cache.kv, *blocks, memory, 1.0, **choice, rounded=True), eager[-1:]),
    ):
        close(actual, expected, slack=4)  # our weights are rounded before they are divided by their sum
    unrounded = attention.prefill_attention(q, cache.kv, cu_seqlens, *blocks, 1.0, **choice)
    assert (unrounded - eager).abs().max() > 20 * TOLERANCE[HALF]["atol"], "rounding makes no difference here"


def test_kernels_read_the_blocks_whose_addresses_are_in_the_table():
    """The same arguments after the blocks have moved, as a graph has them."""
    first, moved = (Cache([40], 2, 16, torch.float32) for _ in range(2))
    kv, q = first.kv, random(1, 4, 16)
    for cache in (first, moved):
        kv.addresses.copy_(cache.kv.addresses)
        blocks = (cache.lengths_tensor, cache.block_tables)
        actual = attention.decode_attention(q, kv, *blocks, workspace(cache, 4), 0.25)
        close(actual, cache.attention(0, q, 0.25))


def test_a_row_of_decode_attention_is_bit_identical_in_every_batch_with_as_many_splits():
    """Bit-identical alone with a short block table, and in a batch with a table three times as long."""
    cache = Cache([300], 2, 16, torch.float32)
    q, memory = random(3, 4, 16), workspace(cache, 4)
    wide_tables = torch.zeros(3, 40, dtype=torch.int32, device=DEVICE)
    wide_tables[:, : cache.block_tables.shape[1]] = cache.block_tables
    lengths = torch.tensor([300, 7, 299], dtype=torch.int32, device=DEVICE)
    for splits in (1, 8):
        alone = attention.decode_attention(
            q[:1], cache.kv, cache.lengths_tensor, cache.block_tables, memory, 0.25, window=290, splits=splits
        )
        batch = attention.decode_attention(q, cache.kv, lengths, wide_tables, memory, 0.25, window=290, splits=splits)
        assert torch.equal(alone[0], batch[0])


# ------------------------------------------------------------------------------------------------------ norms and MLP


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm], ids=lambda norm: norm.__name__)
def test_add_rms_norm_matches_the_familys_layer(norm, dtype):
    """Equals the family's own layer after its own addition; the sum is bit-identical."""
    layer = norm(48, eps=1e-5).to(DEVICE, dtype)
    layer.weight.data = random(48, dtype=dtype)
    choice = {"offset": 1.0, "float32_weight": True} if norm is Gemma2RMSNorm else {}
    choice |= {"float32_weight": True} if norm is Olmo2RMSNorm else {}
    x, residual = random(5, 60, dtype=dtype)[:, :48], random(5, 48, dtype=dtype)
    normed, total = fused.add_norm(x, residual, layer.weight, None, 1e-5, **choice, multiplier=0.3)
    assert torch.equal(total, residual + x * 0.3)
    close_with_the_same_rounding(normed, layer(total))
    normed, total = fused.add_norm(x, None, layer.weight, None, 1e-5, **choice)
    assert total is x
    close_with_the_same_rounding(normed, layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_add_layer_norm_matches_torch(bias, dtype):
    x, residual, weight = random(3, 48, dtype=dtype) + 3, random(3, 48, dtype=dtype), random(48, dtype=dtype)
    bias = random(48, dtype=dtype) if bias else None
    normed, total = fused.add_norm(x, residual, weight, bias, 1e-5, centered=True)
    assert torch.equal(total, x + residual)
    close_with_the_same_rounding(normed, F.layer_norm((x + residual), (48,), weight, bias, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("norm", slow_but([Gemma2RMSNorm], [LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm]))
def test_a_post_norm_matches_the_familys_layers(norm, normed, dtype):
    """Normed, added to the residual stream, and normed for what follows; or only added, as in OLMo2."""
    layers = [norm(48, eps=1e-5).to(DEVICE, dtype) for _ in range(2)]
    for layer in layers:
        layer.weight.data = random(48, dtype=dtype)
    choice = {"offset": float(norm is Gemma2RMSNorm), "float32_weight": norm is not LlamaRMSNorm, "multiplier": 0.3}
    x, residual = random(5, 60, dtype=dtype)[:, :48], random(5, 48, dtype=dtype)
    weights = {"weight": layers[1].weight if normed else None, "post_weight": layers[0].weight}
    actual, total = fused.add_norm(x, residual, bias=None, eps=1e-5, **weights, **choice)
    close_with_the_same_rounding(total, residual + layers[0](x) * 0.3)
    if normed:
        close_with_the_same_rounding(actual, layers[1](total))
    else:
        assert actual is total


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_activations_match_torch(activation, dtype):
    slopes = [torch.tensor([value], dtype=dtype) for value in (0.7, 0.4)]
    reference = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_new": torch_ops.gelu_new,
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
        "xielu": lambda x: torch_ops.xielu(x, *slopes),
    }[activation]
    # for large |x|, 1 + erf(x) is all rounding, and differs between platforms
    x = random(3, 2 * 1100, dtype=dtype)
    gated = reference(x[:, :1100]) * x[:, 1100:]
    close_with_the_same_rounding(fused.activated(x, activation, gated=True, parameters=slopes), gated)
    close_with_the_same_rounding(fused.activated(x[:, :1100], activation, parameters=slopes), reference(x[:, :1100]))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("size", [90, 1])
def test_the_gate_of_attention_matches_torch(size, dtype):
    """Of each element, or of a head; 14 heads of 90 elements, which more than one program takes."""
    x, gate = random(3, 14, 90, dtype=dtype), random(3, 14, 2, size, dtype=dtype)[:, :, 1]
    close_with_the_same_rounding(fused.gated_by_sigmoid(x, gate), x * gate.sigmoid())


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_the_clamped_activation_matches_torch(dtype):
    x = 2 * random(3, 2 * 1100, dtype=dtype)
    expected = torch_ops.swiglu_clamped(x[:, :1100], x[:, 1100:], 1.702, 1.5)
    close_with_the_same_rounding(fused.activated(x, fused.CLAMPED, True, 1.702, 1.5), expected)


def gated_experts(family: str) -> torch.nn.Module:
    """Hugging Face's mixture of 5 experts, 2 per token, of odd sizes."""
    sizes = {"hidden_size": 48, "num_experts_per_tok": 2}
    if family == "mixtral":
        module = MixtralSparseMoeBlock(MixtralConfig(**sizes, intermediate_size=72, num_local_experts=5))
    else:
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=72, num_experts=5, norm_topk_prob=False)
        module = Qwen3MoeSparseMoeBlock(config)
    for param in module.parameters():
        param.data.normal_(std=0.2)
    return module.to(DEVICE).eval()


@torch.no_grad()
@pytest.mark.parametrize("family", slow_but(["qwen3_moe"], ["mixtral", "qwen3_moe"]))
@pytest.mark.parametrize("tokens", slow_but([3, 40], [1, 3, 40]))
def test_mixture_matches_hugging_face(tokens, family):
    """Some experts get no tokens, others more than a block."""
    module, x = gated_experts(family), random(tokens, 48)
    x[1:] += 2 * x[:1]  # most go to the same experts
    expected = module(x[None])
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    router, experts = module.gate.weight, module.experts
    settings = Router(normalize=family == "mixtral", float32_weights=family == "mixtral")
    weights = routed(x @ router.T, settings, 2, x.dtype)
    matrices = experts.gate_up_proj, experts.down_proj, None, None
    actual = mixture(x, *weights, *matrices, activation=lambda gate_up: fused.activated(gate_up, "silu", gated=True))
    close(actual, expected, slack=4)  # sums of 72 products of the size of 1


@torch.no_grad()
@pytest.mark.parametrize("is_biased", [False, True])
def test_mixtures_of_some_of_the_experts_sum_to_that_of_all(is_biased, monkeypatch):
    """Items of other experts are not computed: what their memory held, NaN here, reaches no token."""
    x, weights, chosen = random(9, 48), random(9, 2), torch.rand(9, 6, device=DEVICE).topk(2).indices
    matrices = random(6, 2 * 72, 48), random(6, 48, 72)
    biases = (random(6, 2 * 72, 1), random(6, 48, 1)) if is_biased else (None, None)
    gated = lambda gate_up: fused.activated(gate_up, "silu", gated=True)  # noqa: E731
    expected = mixture(x, weights, chosen, *matrices, *biases, gated)
    monkeypatch.setattr("torch.empty", lambda size, **kwargs: torch.full(size, torch.nan, **kwargs))
    parts = []
    for first in (0, 2, 4):
        of_part = [None if tensor is None else tensor[first : first + 2] for tensor in (*matrices, *biases)]
        parts.append(mixture(x, weights, chosen, *of_part, gated, first_expert=first))
    assert all(part.abs().sum() > 0 for part in parts), "a part has no token"
    close(sum(parts), expected, slack=8)  # sums of two parts, of 72 products of the size of 8


# ------------------------------------------------------------------------------------------------------ rope and write


def written(blocks: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    """The contents of the blocks at `slot_mapping`.  [tokens, kv_heads, head_dim]"""
    return blocks.flatten(0, 1)[slot_mapping]


@pytest.mark.parametrize(
    ("dtype", "block_tables"),
    slow_but([(torch.float32,) * 2, (HALF, torch.float32)], [(torch.float32,) * 2, (HALF,) * 2, (HALF, torch.float32)]),
    ids=str,
)
@pytest.mark.parametrize("normed", slow_but(["gemma", "olmo2"], ["", "llama", "gemma", "olmo2"]))
@pytest.mark.parametrize("rotary", slow_but([8, 20], [0, 8, 20]))
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_write_matches_hugging_face(interleaved, rotary, normed, dtype, block_tables):
    """Ten query heads (more than one program takes) and two KV heads of size 20, of which `rotary` elements are
    rotated.

    normed: the family whose norms q and k go through, of each head or (OLMo2) of all heads together.
    block_tables: the dtype of cos and sin, to which products are rounded: float32 is OLMo2's way."""
    qkv = random(5, 14, 20, dtype=dtype)
    q, k, v = qkv.split([10, 2, 2], dim=1)
    if normed != "olmo2":  # something else between the heads of a token, as Qwen3.5's gates
        q = torch.stack((q, -q), dim=2)[:, :, 0]
    positions = torch.tensor([0, 31, 32, 7, 90], device=DEVICE)
    angles = positions.new_tensor(range(100)).float()[:, None] * torch.linspace(1, 0.1, rotary // 2, device=DEVICE)
    cos, sin = angles.cos().to(block_tables), angles.sin().to(block_tables)
    keys, values = torch.full((2, 4, BLOCK_SIZE, 2, 20), math.nan).to(DEVICE, dtype)
    slot_mapping = torch.tensor([33, 127, 64, 0, 95], device=DEVICE)
    norm, layers = None, [torch.nn.Identity()] * 2
    if normed:
        kind = {"llama": LlamaRMSNorm, "gemma": Gemma2RMSNorm, "olmo2": Olmo2RMSNorm}[normed]
        layers = [kind(20 * heads if normed == "olmo2" else 20, eps=1e-5) for heads in (10, 2)]
        for layer in layers:
            layer.weight.data = random(*layer.weight.shape, dtype=dtype)
        weights = (layer.weight for layer in layers)
        norm = fused.QKNorm(*weights, 1e-5, float(normed == "gemma"), normed != "llama")

    rotated = fused.rope_and_write(
        q,
        k,
        v,
        cos if rotary else None,
        sin if rotary else None,
        positions,
        slot_mapping,
        layer_kv(keys, values),
        interleaved,
        norm,
    )
    if normed == "olmo2":
        q, k = (layer(x.flatten(1)).view(x.shape) for layer, x in zip(layers, (q, k), strict=True))
    else:
        q, k = layers[0](q), layers[1](k)
    if rotary:
        q, k = (rotated_by_hugging_face(x, cos[positions], sin[positions], interleaved) for x in (q, k))
    for actual, expected in ((rotated, q), (written(keys, slot_mapping), k)):
        if dtype == HALF and not normed:
            assert torch.equal(actual, expected), "rounds at another step than Hugging Face"
        close(actual, expected)
    assert torch.equal(written(values, slot_mapping), v)
    assert torch.isnan(keys).sum() == keys.numel() - k.numel(), "keys were written outside the slot mapping"
    assert torch.isnan(values).sum() == values.numel() - v.numel(), "values were written outside the slot mapping"


def rotated_by_hugging_face(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Hugging Face's rotation of the leading elements.  x [tokens, heads, head_dim], cos, sin [tokens, rotary / 2]"""
    rotary = 2 * cos.shape[1]
    head, rest = x[None, ..., :rotary], x[..., rotary:]
    if interleaved:
        rotated = gptj_rotary(head, sin[None], cos[None])
    else:
        rotated, _ = llama_rotary(
            head, head, torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None], unsqueeze_dim=2
        )
    return torch.cat([rotated[0].to(x.dtype), rest], dim=-1)
