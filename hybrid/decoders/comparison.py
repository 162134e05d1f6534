"""How far a computation may be from the one that it stands in for: by token, and whatever single channels are like.

float32 sums come in another order, and half precision rounds at every operation; a part that is missing, or there
twice, is more. Real Llama, Qwen and Mistral have massive activations: channels near 1000 at some tokens, where others
are near 1 (Sun et al. 2024, arXiv:2402.17762). What is allowed is therefore measured by channel and by medians.
"""

import torch

# Of a layer, in each channel: a share of what it adds there and of what it typically adds, and a unit in the last place
# of the residual stream, which is rounded to the dtype itself.
RELATIVE = {torch.float32: 2**-16, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# In these roundings. In bfloat16 correct decoders of the tests' families come to 0.9, 8 and 0.5 (Gemma 2, whose scores
# Hugging Face rounds otherwise, and OLMo 2; others to 0.5, 4 and 0.3); an MLP doubled, dropped or negated to 2.4 at
# least, and at most tokens to 4 and more.
TYPICAL = 2.0  # the median over a token's channels
WORST = 16.0  # any channel of a token
# The mean over tokens and channels, where a unit in the last place counts an eighth. Where the residual stream is large
# beside what a layer adds, few channels are rounded otherwise by a correct layer, and most by one that lacks a part.
AVERAGE, OF_ULP, CLIPPED = 1.5, 1 / 8, 4.0

# Of a whole model's output, of its spread over a token's channels, the mean over channels. In bfloat16 0.02 is seen, in
# 80 layers 0.03; int8 rounds weights, and in an untrained model 0.1 is seen.
OF_SPREAD = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25, torch.int8: 0.5}
WORST_OF_SPREAD = 8.0  # any channel's, in the mean's limits
OF_SIZE = 1 / 32  # of a channel's own size that counts as spread: where all are large and nearly alike


def difference(
    what: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    given: torch.Tensor | None = None,
    experts: bool = False,
) -> str:
    """Why a layer's `found` is not `expected`, "" where it is. float32 [tokens, n] each.  given: what it adds to.

    Half precision may send a token to other experts, where two of them are nearly as likely: a tenth of the tokens of
    a mixture may differ then.
    """
    given = torch.zeros_like(expected) if given is None else given
    added, error = (expected - given).abs(), (found - expected).abs()
    added = RELATIVE[dtype] * (added.median(dim=1, keepdim=True).values + added)
    ulp = unit_in_the_last_place(torch.maximum(given.abs(), expected.abs()), dtype)
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


def unit_in_the_last_place(size: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of neighbouring numbers of `dtype` at numbers of this size."""
    exponents = torch.frexp(size.clamp(min=1e-30)).exponent  # of mantissas in [0.5, 1)
    return torch.finfo(dtype).eps * torch.exp2(exponents.float() - 1)


def output_difference(
    what: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    dtype: torch.dtype,
    excused: int = 0,
    limit: float = torch.inf,
) -> str:
    """Why a model's outputs `found`, logits or hidden states, are not `expected`, "" where they are. [tokens, n] each.

    dtype: that they are computed in; int8 where weights are.  excused: tokens that may differ, in half precision or
    int8.  limit: of `spread_apart`, where it is less than OF_SPREAD and more than an eighth of it.
    """
    apart = spread_apart(found, expected)
    allowed = max(min(limit, OF_SPREAD[dtype]), OF_SPREAD[dtype] / 8)
    mean, worst = apart.clamp(max=CLIPPED).mean(dim=1), apart.amax(dim=1)
    wrong = int((~((mean <= allowed) & (worst <= WORST_OF_SPREAD * OF_SPREAD[dtype]))).sum())
    if wrong <= (0 if dtype == torch.float32 else excused):
        return ""
    return (
        f"{what} by {mean.max():.3g}, where {allowed:.3g} is allowed (of a token's spread; {wrong} of {len(mean)} "
        f"tokens differ, a channel by up to {worst.max():.3g})"
    )


def spread_apart(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How far outputs are apart in each channel, of their spread over a token's channels.  [tokens, n]

    What all channels of a token have in common is not looked at: logits mean the same without it.
    """
    found, expected = found.float(), expected.float()
    found, centred = (x - x.median(dim=-1, keepdim=True).values for x in (found, expected))
    spread = centred.abs().median(dim=-1, keepdim=True).values
    return (found - centred).abs() / (spread + OF_SIZE * expected.abs())
