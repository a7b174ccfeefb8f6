"""docs/papers.md: every key that it names is one of the trainer, takes the value, and has an effect there."""

import re
from pathlib import Path

import pytest

from rlnumba.config import load_run
from rlnumba.config.runs import RUNS

PAGE = Path(__file__).parent.parent / "docs" / "papers.md"
BASE = 'model = "m"\noutput_dir = "o"\n[data]\ntrain = "t.jsonl"\n'
NEEDED = {
    "grpo": {"rewards.funcs": '["gsm8k_reward"]'},
    "ppo": {"critic.model": "c", "rewards.funcs": '["gsm8k_reward"]'},
}
NEEDED["rloo"] = NEEDED["grpo"]
KEY = re.compile(r"`([a-z_]+\.[a-z_]+) = ([^`]+)`")


def rows_of(text):
    """(trainer, a paper's name, its keys as overrides) of every row: of a row with `or`, of each choice."""
    found, trainer = [], None
    for line in text.splitlines():
        if line.startswith("#"):
            named = [name for name in RUNS if re.search(rf"\b{name}$", line)]
            trainer = named[0] if named else None
        elif line.startswith("| ") and trainer is not None and "---" not in line and "| keys |" not in line:
            paper, keys = line.strip("| ").split(" | ")
            for choice in keys.split(", or "):
                found.append((trainer, paper, KEY.findall(choice)))
    return found


ROWS = rows_of(PAGE.read_text())


def test_every_trainer_has_papers():
    assert {trainer for trainer, _, _ in ROWS} == set(RUNS) and all(keys for _, _, keys in ROWS)
    assert len(ROWS) > 50


@pytest.mark.parametrize("trainer, paper, keys", ROWS, ids=[f"{trainer} {paper[:24]}" for trainer, paper, _ in ROWS])
def test_the_keys_of_a_paper_are_keys_of_the_trainer(trainer, paper, keys, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(BASE)
    overrides = NEEDED.get(trainer, {}) | {name: value.strip('"') for name, value in keys}
    load_run(trainer, path, list(overrides.items()))
    assert "no effect" not in capsys.readouterr().err
