"""The README's examples run, its comparison has sources, and its links lead somewhere."""

import os
import re
import textwrap
from pathlib import Path

import torch
import torch.distributed as dist

import hybrid
from tests.tiny_models import prompts, tiny_model, with_peft

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def check_ten_lines() -> None:
    os.chdir(ROOT)
    model = with_peft(tiny_model("llama"))
    prompt_ids, prompt_mask = prompts(2, 6, padded=True, seed=dist.get_rank())

    def my_loss(logps, batch, reference):
        assert reference.per_token_logps.shape == batch.sequences[:, 1:].shape
        torch.testing.assert_close(logps, batch.old_per_token_logps, atol=0.1, rtol=0)  # bfloat16
        return -logps.mean()

    code, _ = re.findall(r"```python\n(.*?)```", README, re.S)
    code = code.replace("max_new_tokens=256", "max_new_tokens=8")
    names = {
        "model": model,
        "trainable": [parameter for parameter in model.parameters() if parameter.requires_grad],
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "my_loss": my_loss,
    }
    for iteration in range(2):
        exec(code if "engine" not in names else code[code.index("with engine") :], names)
        assert names["engine"].weight_version == iteration + 1
        assert names["batch"].weight_version == iteration, "the window must see the weights of the last step"
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


def test_the_readme_is_short():
    assert len(README.splitlines()) < 150


def test_each_cell_of_the_comparison_has_a_source():
    table = README[README.index("## Compared with") :].split("\n\n")[1]
    header, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert len(header) == 7 and len(rows) >= 5  # the first cell is empty, and stripped
    for name, *cells in rows:
        assert len(cells) == 7, name
        for cell in cells:
            assert re.search(r"\]\[|\]\(", cell), (name, cell)


def test_each_cell_of_the_longer_comparison_has_a_source_or_says_not_found():
    page = (ROOT / "docs" / "comparison.md").read_text()
    tables = re.findall(r"^\| system .*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.M)
    cells = [line.strip("| \n").split(" | ")[1:] for table in tables for line in table.splitlines()]
    assert len(tables) == 2 and len(cells) >= 30 and {len(row) for row in cells} == {4}
    for cell in (cell for row in cells for cell in row):
        assert re.search(r"\]\[|\]\(|`tests/", cell) or cell in ("not found", "**not yet**"), cell
    assert set(re.findall(r"\]\[([\w-]+)\]", page)) == set(re.findall(r"^\[([\w-]+)\]: https://", page, re.M))


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
