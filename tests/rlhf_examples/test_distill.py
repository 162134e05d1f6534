"""`distill.py` with tiny models on two ranks under ZeRO-3: each kind of teacher, and TRL's losses on its batches."""

import json
import math
from pathlib import Path

import deepspeed.runtime.rollout as deepspeed_rollout
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.rollout import ResponseTokenBatch, RolloutRequest, SamplingConfig
from deepspeed.utils import safe_get_full_grad
from transformers import AutoModelForCausalLM
from trl.experimental.gkd import GKDTrainer

import hybrid
from rlhf_examples import distill
from rlhf_examples.common.actor import Actor
from rlhf_examples.common.arguments import DistillArguments
from rlhf_examples.common.distillation import Divergence, divergence_of_logits
from rlhf_examples.common.models import load_tokenizer, small_model
from rlhf_examples.common.parsing import arguments_of
from rlhf_examples.common.rollouts import rank_row_ids, roll_out, sampling
from rlhf_examples.common.teachers import TaughtExperience, Teachers
from rlhf_examples.data.synthetic import synthetic_tokenizer
from rlhf_examples.environments import environment_tokenizer
from tests.engines import engine_of, settings
from tests.marks import slow_but
from tests.rlhf_examples.scripts import ROLLOUTS, iterations_of, load_with_transformers
from tests.tiny_models import prompts, tiny_model, twin

HINTS = [{"prompt": f"{name} found a", "with_hint": f"ball ! {name} found a"} for name in ("anna", "tom", "ben") * 6]
FULL = {"teacher_model_name_or_path": ["TEACHER"]}
TOP = {"distillation_mode": "topk_logits", "distillation_topk": 5}
CASES = {
    "full": {**FULL, "beta": 0.5, "sleeping_teacher": True},
    "top of the teacher": {**FULL, **TOP, "sleeping_teacher": True, "num_generations": 2},
    "top of the student": {**FULL, **TOP, "distillation_topk_support": "student", "distillation_add_tail": False},
    "sampled": {**FULL, "distillation_mode": "sampled_token", "offload_reference_model": True},
    "two teachers": {"teacher_model_name_or_path": ["TEACHER", "OTHER"], "data_path": ["HINTS", "synthetic:stories"]},
    "privileged prompt": {
        "self_teacher": "policy",
        "teacher_prompt_column": "with_hint",
        "data_path": ["HINTS"],
        "eval_fraction": 0.3,
    },
    "privileged prompt, top": {
        **TOP,
        "self_teacher": "policy",
        "teacher_prompt_column": "with_hint",
        "data_path": ["HINTS"],
        "eval_fraction": 0.3,
    },
    "base": {**TOP, "self_teacher": "base", "actor_lora_dim": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A student, two larger teachers, one with another tokenizer, and records with hints."""
    directory = tmp_path_factory.mktemp("distill")
    models = {"STUDENT": (16, synthetic_tokenizer()), "TEACHER": (32, synthetic_tokenizer())}
    models |= {"OTHER": (24, synthetic_tokenizer()), "FOREIGN": (16, environment_tokenizer())}
    for seed, (name, (hidden_size, tokenizer)) in enumerate(models.items()):
        torch.manual_seed(seed)
        model = small_model(hidden_size, 2, tokenizer)
        with torch.no_grad():
            model.lm_head.weight.mul_(8)  # distributions that differ from uniform
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    (directory / "HINTS").with_suffix(".jsonl").write_text("\n".join(map(json.dumps, HINTS)))
    return directory


def settings_of(case: dict, folder: Path) -> dict:
    """The settings of a case, with names of files for those in capitals."""

    def path(name: str) -> str:
        return str(folder / (f"{name}.jsonl" if name == "HINTS" else name)) if name.isupper() else name

    named = {key: [path(name) for name in value] if isinstance(value, list) else value for key, value in case.items()}
    return {**ROLLOUTS, "actor_model_name_or_path": str(folder / "STUDENT"), **named}


def run_case(given: dict) -> dict[str, float]:
    return distill.run(arguments_of(DistillArguments, given))


@pytest.mark.parametrize("name", slow_but(["full", "two teachers"], CASES))
def test_a_student_learns_from_each_kind_of_teacher(ranks, folder, tmp_path, name):
    """Four iterations run, losses are finite and the student's weights change. A fixed teacher comes nearer."""
    case = {**CASES[name], "num_iterations": 8 if name == "full" else 3}
    result = ranks.run(run_case, {**settings_of(case, folder), "output_dir": str(tmp_path)})[0]
    rows = iterations_of(tmp_path)
    assert len(rows) == case["num_iterations"] and all(math.isfinite(row["loss"]) for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert ("k1" in rows[0]) == ("distillation_mode" in case and case.get("distillation_topk_support") != "student")
    before, after = (load_with_transformers(path) for path in (folder / "STUDENT", tmp_path / "model"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight) or "actor_lora_dim" in case
    if name == "full":
        assert result["eval_k1"] < 0.95 * result["before_eval_k1"], result


def test_a_selection_keeps_the_teachers_prompts_whole():
    """Where the completions of the selected rows are shorter than the longest, their columns alone are cropped."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    values, prompt = mask.float(), torch.ones(2, 1, dtype=torch.int64)
    teachers = torch.tensor([[0, 7, 8], [5, 6, 9]])
    rows = TaughtExperience(
        sequences=torch.cat([prompt, mask + 2], dim=1),
        attention_mask=torch.cat([prompt, mask], dim=1),
        mask=mask,
        **dict.fromkeys(("sampling_logps", "old_logps", "weights", "advantages"), values),
        teacher=torch.zeros(2, dtype=torch.int64),
        top_ids=torch.arange(12).view(2, 3, 2),
        teacher_prompt_ids=teachers,
        teacher_prompt_mask=(teachers > 0).long(),
    )
    taken = rows.take(torch.tensor([0]))
    assert taken.mask.tolist() == [[1]] and taken.top_ids.tolist() == [[[0, 1]]]
    ids, attended = taken.as_the_teacher_reads()
    assert ids.tolist() == [[0, 7, 8, 3]] and attended.tolist() == [[0, 1, 1, 1]]


def check_losses(given: dict, teacher: str) -> None:
    """The training loss of a micro batch, and its gradient, are TRL's of the same models' whole logits."""
    args = arguments_of(DistillArguments, given)
    policy, tokenizer = Actor.load(args, 4, needs_reference=False).policy, load_tokenizer(teacher)
    teachers = Teachers.load(policy, tokenizer, args)
    texts = ("anna", "tom found a") if dist.get_rank() else ("ben found", "the")
    rows = [{"prompt_ids": tokenizer(text).input_ids, "source": "", "columns": "{}"} for text in texts]
    policy.eval()
    with policy.inference():
        batch = roll_out(policy, tokenizer, rows, rank_row_ids(len(rows)), sampling(args, 3))
        experience = teachers.experience(batch, rows)
    policy.train()
    ids, mask, completions = experience.sequences, experience.attention_mask, experience.mask
    token_losses, _ = teachers.token_losses(experience)
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (args.actor_model_name_or_path, teacher)]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = [model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1] for model in models]
    labels = torch.where(mask.bool(), ids, -100)
    labels[:, : -completions.shape[1]] = -100
    count = int(completions.sum())
    settings = {"beta": args.beta, "temperature": args.temperature, "num_items_in_batch": count}
    expected = GKDTrainer.generalized_jsd_loss(logits[0], logits[1].detach(), labels[:, 1:], **settings)
    actual = token_losses.sum() / count
    assert actual.item() == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    policy.backward(actual)
    for name, parameter in policy.module.named_parameters():
        reference = dict(models[0].named_parameters())[name].grad
        dist.all_reduce(reference)
        gradient = safe_get_full_grad(parameter)
        torch.testing.assert_close(gradient, reference / dist.get_world_size(), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("beta", slow_but([0.5], [0.0, 0.5, 1.0]))
def test_losses_and_gradients_are_trls(ranks, folder, beta):
    given = settings_of({**FULL, "beta": beta, "temperature": 0.8}, folder)
    ranks.run(check_losses, given, str(folder / "TEACHER"))


def check_no_weights(given: dict) -> None:
    """A student that is its own teacher holds what it holds without one: by plan, and after it has answered."""
    args = arguments_of(DistillArguments, given)
    policy = Actor.load(args, 4, needs_reference=False).policy
    tokenizer = load_tokenizer(args.actor_model_name_or_path)
    rows = [{"prompt_ids": [5, 6], "source": "", "columns": json.dumps({"with_hint": "anna found"})}]
    policy.eval()
    with policy.inference():
        batch = roll_out(policy, tokenizer, rows, rank_row_ids(1), sampling(args, 3))
        before, plan = policy.stats(), policy.memory_plan(4, 8, 8)
        teachers = Teachers.load(policy, tokenizer, args)
        experience = teachers.experience(batch, rows)
        assert not teachers.models and experience.top_logps.isfinite().all()
        after = policy.stats()
        assert before["snapshot_bytes"] == after["snapshot_bytes"] > 0
        assert before["container_bytes"] == after["container_bytes"]
        assert str(policy.memory_plan(4, 8, 8)) == str(plan)


def test_a_self_teacher_adds_no_weights(ranks, folder):
    given = settings_of(CASES["privileged prompt, top"], folder)
    ranks.run(check_no_weights, given)


REFUSED = {
    "another tokenizer": (
        {"teacher_model_name_or_path": ["FOREIGN"]},
        "FOREIGN' given, whose tokenizer is not the student's: token .* is .* in it",
    ),
    "no teacher": ({}, "teacher_model_name_or_path: none given; give a model, or self_teacher"),
    "both": ({**FULL, "self_teacher": "policy"}, "self_teacher: 'policy' given with teacher_model_name_or_path"),
    "itself": ({"self_teacher": "policy"}, "on the same prompts it is the student"),
    "base without an adapter": ({**TOP, "self_teacher": "base"}, "actor_lora_dim: 0"),
    "logits of the base": ({"self_teacher": "base", "actor_lora_dim": 2}, "'base' given with distillation_mode: 'full"),
    "too many": ({"teacher_model_name_or_path": ["TEACHER", "OTHER"]}, "2 given for 0 entries of data_path"),
    "offloaded": ({**FULL, "offload_reference_model": True}, "needs the teacher's whole head"),
    "forward KL, sampled": ({**FULL, "beta": 0.0, "distillation_mode": "sampled_token"}, "estimates the reverse KL"),
    "exact": ({**FULL, "training_forward": "exact"}, "training_forward: 'exact' given with distillation_mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(folder, name):
    case, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        args = arguments_of(DistillArguments, settings_of(case, folder))
        args.require_inputs()
        Teachers.check(synthetic_tokenizer(), args)


def check_opsd() -> None:
    """DeepSpeed's on-policy self-distillation, its rollout interface, batch and loss, on our engine: an update moves
    the student, and its loss is ours."""
    model = tiny_model("llama")
    teacher = twin(model).eval()
    torch.manual_seed(1)
    torch.nn.init.normal_(teacher.get_output_embeddings().weight, std=0.5)  # distributions far from uniform
    engine = engine_of(model, settings(3))
    rollout = hybrid.build_rollout(deepspeed_rollout.RolloutConfig(engine="hybrid_engine"), engine, Tokens())
    ids, mask = prompts(2, 9, padded=True, seed=dist.get_rank())
    losses = []
    for _ in range(6):
        sampled = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(max_new_tokens=6, temperature=1.0))
        batch = ResponseTokenBatch.from_rollout(sampled)
        engine.train()
        given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        student = batch.select_causal_logits(engine(**given).logits)
        with torch.no_grad():
            expected = batch.select_causal_logits(teacher(**given).logits)
        loss = deepspeed_rollout.generalized_jsd_loss(student, expected, batch.response_mask, beta=0.5, teacher_top_k=7)
        ours = divergence_of_logits(student, expected, Divergence(0.5, 7, "teacher", "renormalize"))
        assert loss.loss_sum.item() == pytest.approx((ours * batch.response_mask).sum().item(), abs=1e-5)
        engine.backward(loss.loss)
        engine.step()
        losses.append(loss.loss.item())
    assert engine.weight_version == 6 and losses[-1] < 0.9 * losses[0], losses


class Tokens:
    """A tokenizer's ids, for DeepSpeed's rollout interface."""

    pad_token_id, eos_token_id = 0, 2


def test_deepspeeds_self_distillation_runs_on_this_rollout_engine(ranks):
    ranks.run(check_opsd)
