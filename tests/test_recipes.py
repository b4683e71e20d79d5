"""recipes/*.sh: what they say, and that each script takes their flags. Nothing is run."""

import re
import shlex
import sys
from importlib import import_module

import pytest

from launch import ROOT
from nanorlhf.utils import parse

sys.path.insert(0, str(ROOT))
RECIPES = sorted((ROOT / "recipes").glob("*.sh"))


def commands(text):
    """[(script or module, flags)] of the python commands of a shell file."""
    text = re.sub(r"<<'PYTHON'.*?\nPYTHON\n", "\n", text, flags=re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    calls = [words[1:] for words in lines if words[:1] == ["python"] and words[1] != "-"]
    return [(words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
            for words in calls]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_flags_of_a_recipe_are_known(recipe, monkeypatch):
    text = recipe.read_text()
    for word in ("Hardware", "Expected", "Time", "Memory"):
        assert re.search(rf"^# {word} ", text, re.MULTILINE), word
    assert commands(text)
    for name, flags in commands(text):
        # The hardware of the recipe may be absent where the tests run.
        monkeypatch.setattr(sys, "argv", [name, *flags, "--device", "cpu"])
        module = import_module(name.removesuffix(".py"))
        config = parse(module.Config, module.__doc__)
        assert config.model != module.Config.model  # a real model, not the embedded world's


def test_the_five_recipes_are_there():
    assert {path.stem for path in RECIPES} >= {"qwen3_sft", "smollm2_rm", "smollm2_ppo",
                                               "qwen3_grpo_gsm8k", "ultrafeedback_dpo"}


def test_the_flags_that_are_compared_exist():
    """docs/flags.md: every name of its first column is a flag of one of the scripts."""
    known = {name for script in ("sft", "rm", "dpo", "ppo", "grpo")
             for name in vars(import_module(f"train_{script}").Config())}
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "flags.md").read_text().splitlines()
            if line.startswith("| `--")]
    names = {name for cell in rows for name in re.findall(r"`--(\w+)`", cell)}
    assert len(names) > 40 and names <= known
