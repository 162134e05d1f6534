"""Arguments: a YAML file, flags over it, and errors that name the key."""

from pathlib import Path

import pytest

from rlhf_examples.arguments import PPOArguments, parse_arguments, read_yaml

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_is_arguments(path):
    arguments = parse_arguments([str(path)])
    for name, value in read_yaml(path).items():
        assert getattr(arguments, name) == value


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nlora_r: 4\nlearning_rate: 1.0e-5\n")
    arguments = parse_arguments([str(path), "--seed", "9", "--stop_token_ids", "1", "2"])
    assert (arguments.seed, arguments.lora_r, arguments.learning_rate) == (9, 4, 1e-5)
    assert arguments.stop_token_ids == [1, 2]
    assert parse_arguments([]) == PPOArguments()


def test_an_unknown_key_is_named_with_the_nearest(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("kl_coeff: 3\n")
    with pytest.raises(ValueError, match="unknown key 'kl_coeff'; the nearest known key is 'kl_coef'"):
        parse_arguments([str(path)])
    with pytest.raises(ValueError, match="no file at 'nowhere.yaml'"):
        parse_arguments(["nowhere.yaml"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float8"}, "dtype: 'float8' given; allowed: float32, bfloat16"),
        ({"logprob_mode": "guess"}, "logprob_mode: 'guess' given"),
        (
            {"importance_sampling_correction": True, "logprob_mode": "sampling"},
            "every weight would be 1; use logprob_mode: 'recompute'",
        ),
        ({"importance_sampling_cap": 0.5}, "importance_sampling_cap: 0.5 given; it must be at least 1"),
        ({"numerics_control_rows": -1}, "numerics_control_rows: -1 given; it must be at least 0"),
        ({"zero_stage": 4}, "zero_stage: 4 given; allowed: 0, 1, 2, 3"),
        ({"per_device_rollout_batch_size": 15}, "a multiple of num_mini_batches, 2"),
        ({"per_device_train_batch_size": 3}, "it must divide a mini batch's 8 sequences"),
    ],
)
def test_what_does_not_fit_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        PPOArguments(**changes)
