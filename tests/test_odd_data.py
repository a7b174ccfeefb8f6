"""Generated files of odd values, in every format and for every trainer's form of rows: the rows that were written, or
one line with file and row."""

import csv
import json
import types

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlnumba.config import DataConfig, SFTConfig
from rlnumba.data import load_prompts, load_sft
from rlnumba.data.pairs import load_pairs
from rlnumba.data.unpaired import load_unpaired
from rlnumba.errors import UserError
from tests.test_data import WordTokenizer

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = st.sampled_from(
    ["a", '{"name": "Bob"}', "[1, 2]", "True", "1e999", "nan", "a\nb", 'q "x", y', "\u2028é", "007"]
)
NUMBERS = st.sampled_from([0, -3, 0.5, 2**70, 1e300, float("nan"), float("inf"), 10**400, 1e-300])
ANSWERS = st.sampled_from(["x", "[0, 1]", "[0, 1)", "{}", "42", "null", "0.10"])
# The columns of each trainer's rows.
FORMS = {
    "sft": {"prompt": TEXTS, "completion": TEXTS},
    "text": {"text": TEXTS},
    "pairs": {"prompt": TEXTS, "chosen": TEXTS, "rejected": TEXTS, "margin": NUMBERS},
    "labelled": {"prompt": TEXTS, "completion": TEXTS, "label": st.booleans()},
    "prompts": {"prompt": TEXTS, "answer": ANSWERS},
}
TRAIN = types.SimpleNamespace(max_length=None, truncation_mode="keep_start")


def write(path, rows):
    """Whether a file of the format of `path` can hold the rows; it is written then."""
    if path.suffix == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([rows[0], *(row.values() for row in rows)])
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        try:
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        except (pyarrow.ArrowException, OverflowError):
            return False
    return True


def load(form, path, tokenizer):
    """Of each row what a trainer has: its token ids, and its number, flag or answer."""
    data, rest = DataConfig(train=str(path)), (tokenizer, 10**6, 10**6)
    if form in ("sft", "text"):
        return [s.input_ids.tolist() for (s,) in load_sft(path, data, SFTConfig(max_length=None), *rest).rows]
    if form == "pairs":
        rows = load_pairs(path, data, TRAIN, *rest).rows
        return [(r.prompt_ids + r.chosen_ids, r.prompt_ids + r.rejected_ids, r.margin) for r in rows]
    if form == "labelled":
        return [(r.prompt_ids + r.completion_ids, r.label) for r in load_unpaired(path, data, TRAIN, *rest).rows]
    return [(p.prompt, p.columns["answer"]) for p in load_prompts(path, data, *rest).prompts]


def expected(form, row, tokenizer):
    """The same of the row as Python has it; None for a row that must be refused."""

    def ids(*texts):
        return [*tokenizer.encode("".join(texts)), 1]

    if form in ("sft", "text"):
        return ids(*row.values())
    if form == "pairs":
        number = row["margin"]
        if not abs(number) <= 1e18:
            return None
        return ids(row["prompt"], row["chosen"]), ids(row["prompt"], row["rejected"]), float(number)
    if form == "labelled":
        return ids(row["prompt"], row["completion"]), row["label"]
    return row["prompt"], row["answer"]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_odd_values(tmp_path, form, ending):
    path, tokenizer = tmp_path / f"rows{ending}", WordTokenizer()
    rows_of = st.lists(st.fixed_dictionaries(FORMS[form]), min_size=1, max_size=3)

    @settings(
        max_examples=10, derandomize=True, deadline=None, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )  # fmt: skip
    @given(rows_of)
    def check(rows):
        rows = [{name: row[name] for name in FORMS[form]} for row in rows]
        if not write(path, rows):
            return
        wanted = [expected(form, row, tokenizer) for row in rows]
        if None not in wanted:
            assert load(form, path, tokenizer) == wanted
            return
        number = wanted.index(None) + 1
        with pytest.raises(UserError) as caught:
            load(form, path, tokenizer)
        said = str(caught.value)
        rows_before = sum(str(value).count("\n") for row in rows[: number - 1] for value in row.values())
        line = number + 1 + rows_before if ending == ".csv" else number
        where = f"{path}:{line}: " if ending in (".csv", ".jsonl") else f"{path}: row {number}: "
        assert said.startswith(where) and "'margin' must be a number" in said and "\n" not in said

    check()
