"""Every trainer has a record, and every record is in the list."""

import ast
import pathlib
import re

from rlnumba.config.runs import RUNS
from rlnumba.trainers.every import TRAINERS

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_each_run_has_a_trainer():
    assert {name: trainer.run_class for name, trainer in TRAINERS.items()} == RUNS


def test_each_record_is_listed():
    paths = (ROOT / "rlnumba" / "trainers").glob("*.py")
    ends = {path.stem for path in paths if path.read_text().split("\n\n")[-1].lstrip().startswith("TRAINER = Trainer")}
    assert ends == set(TRAINERS)


def test_each_run_class_is_listed():
    text = "".join(path.read_text() for path in (ROOT / "rlnumba" / "config").glob("*.py"))
    assert set(re.findall(r'^    trainer = "(\w+)"', text, re.M)) == set(RUNS)


def test_no_other_list_has_trainers_by_name():
    """A trainer is added to the lists of runs.py and every.py; what else depends on it is in its Run or its record."""
    found, name = [], re.compile(f"[\"'](?:{'|'.join(RUNS)})[\"']")
    texts = {path: path.read_text() for path in (ROOT / "rlnumba").rglob("*.py")}
    for path in [path for path, text in texts.items() if name.search(text)]:
        for node in ast.walk(ast.parse(texts[path])):
            items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
            if len({each.value for each in items if isinstance(each, ast.Constant)} & set(RUNS)) > 1:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
