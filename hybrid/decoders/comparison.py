"""Tolerances of the self-check: by token, and robust to massive activations.

A correct layer differs by the order of float32 sums and by half precision's rounding at every operation; a part that is
missing, or added twice, makes a larger difference. Real Llama, Qwen and Mistral have massive activations: channels near
1000 at some tokens, where others are near 1 (Sun et al. 2024, arXiv:2402.17762). The tolerance is therefore by channel
and by medians.
"""

import torch

# A layer's tolerance in each channel, in "roundings": this share of what the layer adds in the channel plus its median
# over channels, plus a unit in the last place of the residual stream, which is itself rounded to the dtype.
RELATIVE = {torch.float32: 2**-16, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# Limits in these roundings. Seen in bfloat16 (TYPICAL, WORST, AVERAGE): correct decoders of the tests' families 0.9, 8
# and 0.5 (Gemma 2, whose attention scores Hugging Face rounds differently, and OLMo 2; the others 0.5, 4 and 0.3); an
# MLP doubled, dropped or negated at least 2.4, and at most tokens 4 and more.
TYPICAL = 2.0  # limit of the median over a token's channels
WORST = 16.0  # limit of any one channel of a token
# The mean over tokens and channels, with a unit in the last place weighted by OF_ULP. If the residual stream is much
# larger than what a layer adds, a correct layer rounds few channels differently; a layer that lacks a part, most.
AVERAGE, OF_ULP, CLIPPED = 1.5, 1 / 8, 4.0

# Limits for a whole model's output, in units of its spread over a token's channels: the mean over channels. Seen in
# bfloat16: 0.02, with 80 layers 0.03; with int8 weights in an untrained model 0.1.
OF_SPREAD = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25, torch.int8: 0.5}
WORST_OF_SPREAD = 8.0  # limit of any one channel, in multiples of OF_SPREAD
OF_SIZE = 1 / 32  # share of a channel's size added to the spread, for channels that are all large and nearly equal


def difference(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    residual: torch.Tensor | None = None,
    experts: bool = False,
) -> str:
    """Why a layer's output `actual` differs from `expected`; "" if it is within the tolerance.

    actual, expected, residual: float32 [tokens, n].  residual: the layer's input, which it adds to; None: zeros.
    experts: the layer is a mixture of experts. Half precision may route a token to other experts if two are nearly as
        likely, so a tenth of the tokens may differ.
    """
    residual = torch.zeros_like(expected) if residual is None else residual
    added, error = (expected - residual).abs(), (actual - expected).abs()
    added = RELATIVE[dtype] * (added.median(dim=1, keepdim=True).values + added)
    exponents = torch.frexp(torch.maximum(residual.abs(), expected.abs()).clamp(min=1e-30)).exponent  # of [0.5, 1)
    ulp = torch.finfo(dtype).eps * torch.exp2(exponents.float() - 1)  # unit in the last place
    units = error / (added + ulp)
    typical, worst = units.median(dim=1).values, units.amax(dim=1)
    wrong = ~((typical <= TYPICAL) & (worst <= WORST))
    average = float((error / (added + OF_ULP * ulp)).clamp(max=CLIPPED).mean())
    excused = len(wrong) // 10 + 1 if experts and dtype != torch.float32 else 0
    if wrong.sum() <= excused and average <= AVERAGE:
        return ""
    allowed = TYPICAL * (added + ulp).median(dim=1).values
    error, token = error.median(dim=1).values, int(torch.maximum(typical / TYPICAL, worst / WORST).argmax())
    return (
        f"{what} by {error[token]:.3g}, where {allowed[token]:.3g} is allowed (the median over channels; "
        f"{int(wrong.sum())} of {len(wrong)} tokens differ, a channel by up to {worst[token]:.3g} roundings)"
    )


def output_difference(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    excused: int = 0,
    limit: float = torch.inf,
) -> str:
    """Why a model's outputs `actual`, logits or hidden states, differ from `expected`; "" if they are within the
    tolerance. [tokens, n] each.

    dtype: the dtype of the computation; int8 if the weights are int8.
    excused: number of tokens that may differ in half precision or int8.
    limit: of the mean over channels of `spread_apart`, clamped to between an eighth of OF_SPREAD and OF_SPREAD.
    """
    apart = spread_apart(actual, expected)
    allowed = max(min(limit, OF_SPREAD[dtype]), OF_SPREAD[dtype] / 8)
    mean, worst = apart.clamp(max=CLIPPED).mean(dim=1), apart.amax(dim=1)
    wrong = int((~((mean <= allowed) & (worst <= WORST_OF_SPREAD * OF_SPREAD[dtype]))).sum())
    if wrong <= (0 if dtype == torch.float32 else excused):
        return ""
    return (
        f"{what} by {mean.max():.3g}, where {allowed:.3g} is allowed (of a token's spread; {wrong} of {len(mean)} "
        f"tokens differ, a channel by up to {worst.max():.3g})"
    )


def spread_apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The outputs' difference in each channel, in units of the spread over the token's channels.  [tokens, n]

    Each token's median over channels is subtracted first: a constant added to logits does not change their meaning.
    """
    actual, expected = actual.float(), expected.float()
    actual, centred = (x - x.median(dim=-1, keepdim=True).values for x in (actual, expected))
    spread = centred.abs().median(dim=-1, keepdim=True).values
    return (actual - centred).abs() / (spread + OF_SIZE * expected.abs())
