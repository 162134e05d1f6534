"""The README's examples run, and the table of settings matches the settings."""

import os
import re
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist

import hybrid
from hybrid.config import BLOCKS
from tests.tiny_models import prompts, tiny_model, with_peft

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()


def check_ten_lines() -> None:
    os.chdir(ROOT)
    model = with_peft(tiny_model("llama"))
    prompt_ids, prompt_mask = prompts(2, 6, padded=True, seed=dist.get_rank())

    def my_loss(logits, batch, reference):
        assert reference.per_token_logps.shape == batch.sequences[:, 1:].shape
        return -hybrid.selective_log_softmax(logits[:, :-1], batch.sequences[:, 1:]).mean()

    code, _ = re.findall(r"```python\n(.*?)```", README, re.S)
    code = code.replace("max_new_tokens=256", "max_new_tokens=8")
    names = {
        "model": model,
        "trainable": [parameter for parameter in model.parameters() if parameter.requires_grad],
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "my_loss": my_loss,
    }
    for _ in range(4):  # the configuration accumulates four backwards
        exec(code if "engine" not in names else code[code.index("with engine") :], names)
    assert names["engine"].weight_version == 1
    assert names["batch"].completion_ids.shape[0] == 16
    assert isinstance(names["loss"], torch.Tensor)


def test_the_readmes_training_example_runs(ranks):
    ranks.run(check_ten_lines)


def test_the_readmes_inference_example_runs(tmp_path):
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    _, code = re.findall(r"```python\n(.*?)```", README, re.S)
    ids, mask = prompts(2, 6, padded=True)
    names = {"hybrid": hybrid, "model": tiny_model("llama", seed=1), "ids": ids, "mask": mask}
    exec(code.replace("a/directory", str(tmp_path)), names)
    with torch.no_grad():
        expected = model.eval()(ids, attention_mask=mask).logits
    torch.testing.assert_close(names["logits"], expected, atol=0.05, rtol=0.05)  # bfloat16
    assert torch.equal(names["tokens"][:, :6], ids)


def test_the_settings_table_matches_the_settings():
    rows = dict(re.findall(r"^\| `((?:hybrid_engine|rollout)\.\w+)` \| (\w+) \|", SETTINGS, re.M))
    settings = {
        f"{block}.{name}": str(field.default).lower()
        for block, kind in BLOCKS.items()
        for name, field in kind.model_fields.items()
    }
    assert rows == settings


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def test_each_cell_of_the_comparison_has_a_source():
    table = README[README.index("## Compared with") :].split("\n\n")[1]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert len(header) == 5 and len(rows) >= 8  # the first cell is empty, and stripped
    for name, *cells in rows:
        assert len(cells) == 5, name
        for cell in cells:
            assert re.search(r"\]\[|\]\(", cell) or cell == "**not yet**", (name, cell)


def test_the_readmes_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    defined = set(re.findall(r"^\[([\w-]+)\]: https://", README, re.M))
    assert set(re.findall(r"\]\[([\w-]+)\]", README)) == defined


def test_the_script_whose_types_are_checked_has_the_readmes_examples():
    """`make check` runs mypy over it."""
    script = (ROOT / "tests" / "typed_script.py").read_text()
    training, inference = re.findall(r"```python\n(.*?)```", README, re.S)
    assert training.removeprefix("import hybrid\n\n") in script
    assert textwrap.indent(inference, "    ") in script
