"""A user's script with the README's examples, which mypy checks: what the package exports is typed. It does not run.

An error that mypy must find has an ignore, and an ignore without an error is an error itself.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import assert_type

import hybrid


def given() -> tuple[PreTrainedModel, list[nn.Parameter], torch.Tensor, torch.Tensor]:
    raise NotImplementedError("this script is checked, and not run")


def my_loss(logps: torch.Tensor, batch: hybrid.RolloutBatch, reference: hybrid.Scores) -> torch.Tensor:
    return (reference.per_token_logps[:, -logps.shape[1] :] - logps).mean()


model, trainable, prompt_ids, prompt_mask = given()

engine, optimizer, _, _ = hybrid.initialize(model=model, model_parameters=trainable, config="configs/zero3_hybrid.json")

with engine.inference():  # one gathered window
    batch = engine.rollout(prompt_ids, prompt_mask, hybrid.SamplingParams(max_new_tokens=256), num_generations=8)
    reference = engine.score(batch.sequences, batch.attention_mask, adapters=False)

loss = my_loss(engine.logps(batch).per_token_logps, batch, reference)  # forward="exact": the sampler's own bits
engine.backward(loss)
engine.step()  # the next window sees the new weights (with accumulation, once a step is applied)

assert_type(engine, hybrid.HybridEngine)
assert_type(batch, hybrid.RolloutBatch)
assert_type(batch.sequences, torch.Tensor)
assert_type(reference, hybrid.Scores)
assert_type(engine.logps(batch).per_token_logps, torch.Tensor)
assert_type(engine.next_seed(), int)
engine.rollout(prompt_ids, prompt_mask, 256)  # type: ignore[arg-type]
hybrid.SamplingParams(max_tokens=256)  # type: ignore[call-arg]
for row in engine.rollout_iter(prompt_ids, prompt_mask, hybrid.SamplingParams(max_new_tokens=256)):
    assert_type(row, hybrid.RolloutBatch)


def serve(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> None:
    engine = hybrid.init_inference(model, dtype="bf16", replace_with_kernel_inject=True, checkpoint="a/directory")
    logits = engine(input_ids=ids, attention_mask=mask).logits
    tokens = engine.generate(ids, attention_mask=mask, max_new_tokens=64)
    assert_type(engine, hybrid.InferenceEngine)
    assert_type((logits, tokens), tuple[Any, Any])  # transformers' outputs
    assert_type(engine.coverage(), list[dict[str, str]])
    engine.sleep("deep")  # type: ignore[arg-type]
