"""The documentation is true: its code runs and prints what a page says, its commands parse, its links lead somewhere.

What a fence holds, by its language:

    python    runs on the cpu device, the blocks of a page one after the other in one process; `python no-run` is
              only compiled. A block that begins with the comment `# name.py` is saved under that name.
    text      right after python: what that block prints. Integers and words are equal, other numbers almost.
    console   `$ NUMBA_ENABLE_CUDASIM=1 python ...` is run in a copy of the package, with what stands after `(Pdb)`
              typed in; `...` stands for anything, line numbers and the place of the repository do not count.
              Other commands are taken as those of bash.
    diff      an edit of the file after `+++`, in force for the next console block
    bash      `rlnumba` commands are parsed as far as they can be without doing their work; files that others name
              exist
    toml      loads as a run; where keys are missing, an example's stand in. `# name.toml`: saved, for bash
    json      is JSON

A page opens with the question that it answers. Pictures are drawn by docs/make_pictures.py, every page is linked from
docs/README.md, and the layouts that pictures
show are those of the instructions' twins.

RLNUMBA_UPDATE_DOCS=1 writes what the python blocks print now into the text blocks.
"""

import ast
import doctest
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

import numba.core.errors
import numpy as np
import pytest

from rlnumba.cli import cli, parse_overrides, runs_of_any_trainer
from rlnumba.config import load_run
from rlnumba.config.runs import RUNS
from rlnumba.kernels.ptx import shared_memory, sm80, sm90, wgmma
from rlnumba.kernels.tile.tensor_map import tensor_map
from rlnumba.runtime import device
from rlnumba.runtime.compile import machine_code as compile_kernel
from rlnumba.runtime.device import cuda
from rlnumba.runtime.launch import launch
from tests import processes

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [
    page
    for pattern in ("*.md", "docs/*.md", "rlnumba/**/*.md")
    for page in sorted(ROOT.glob(pattern))
    if page.is_file()
]
LANGUAGES = {"", "python", "python no-run", "text", "console", "diff", "bash", "sh", "toml", "json"}
# Where the consoles on the pages were recorded.
RECORDED_AT = "/home/reader/rlnumba"
BETWEEN_BLOCKS = "\x1e\n"
NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")

on_cpu = pytest.mark.skipif(device.name() != "cpu", reason="documentation is run on the cpu device")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@dataclass(frozen=True)
class Fence:
    """A block of code on a page: its language, its text, and the number of its first line."""

    language: str
    text: str
    line: int

    @property
    def file_name(self):
        """The name in the comment that a saved block begins with, or None."""
        found = re.match(r"# ([\w-]+\.(?:py|toml))\n", self.text)
        return found and found[1]


def fences(page):
    """The Fences of a page, in order."""
    found, lines = [], None
    for number, line in enumerate(page.read_text().splitlines(keepends=True), start=1):
        if line.startswith("```"):
            if lines is None:
                language, lines, first = line[3:].strip(), [], number + 1
            else:
                found.append(Fence(language, "".join(lines), first))
                lines = None
        elif lines is not None:
            lines.append(line)
    assert lines is None, f"{page.name}: a fence is not closed"
    return found


def save_files(page, folder):
    """Write the blocks of a page that have a file name, beside links to what the repository holds."""
    for name in ("examples", "tests", "docs", "rlnumba"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for fence in fences(page):
        if fence.file_name:
            (folder / fence.file_name).write_text(fence.text)


def simulated(fence):
    """Whether a fence is a session in the simulator."""
    return fence.language == "console" and fence.text.startswith("$ NUMBA_ENABLE_CUDASIM=1 ")


@every_page
def test_languages_and_plain_formats(page, tmp_path):
    save_files(page, tmp_path)
    for fence in fences(page):
        where = f"{page.name}:{fence.line}"
        assert fence.language in LANGUAGES, f"{where}: {fence.language!r}"
        if fence.language == "json":
            json.loads(fence.text)
        elif fence.language.startswith("python"):
            compile(fence.text, where, "exec")
        elif fence.language == "toml":
            path = tmp_path / "fence.toml"
            path.write_text(fence.text)
            of_grpo = "[rewards]", "num_generations", "[teacher]"
            kind = "grpo" if any(name in fence.text for name in of_grpo) else "sft"
            base = ROOT / "examples" / {"grpo": "gsm8k_grpo.toml", "sft": "sft.toml"}[kind]
            # The page of a trainer has whole files.
            load_run(*((page.stem, path) if page.stem in RUNS else (kind, [base, path])))


@on_cpu
@every_page
def test_python_prints_what_the_page_says(page, tmp_path):
    blocks = fences(page)
    if any(simulated(fence) for fence in blocks):
        return
    chosen = [i for i, fence in enumerate(blocks) if fence.language == "python"]
    if not chosen:
        return
    save_files(page, tmp_path)
    script = tmp_path / "page.py"
    script.write_text(f"print({BETWEEN_BLOCKS!r}, end='')\n".join(blocks[i].text for i in chosen))
    # The repository first: Numba compiles for each page what comes from its own folder's link to the package.
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "PYTHONSAFEPATH": "1"}
    if page == ROOT / "README.md":
        command, options = [sys.executable, script.name], {"capture_output": True, "text": True}
        done = subprocess.run(command, cwd=tmp_path, env=environment(ROOT) | path, **options)
        code, printed, errors = done.returncode, done.stdout, done.stderr
    else:
        code, printed, errors = processes.run_script(script, environment(ROOT) | path)
    assert code == 0, f"{page.name}: {errors[-3000:]}"
    outputs = dict(zip((i + 1 for i in chosen), printed.split(BETWEEN_BLOCKS), strict=True))
    wanted = {i for i in outputs if i < len(blocks) and blocks[i].language == "text"}
    if os.environ.get("RLNUMBA_UPDATE_DOCS"):
        replace_blocks(page, {blocks[i]: outputs[i] for i in wanted})
        blocks = fences(page)
    for i, printed in outputs.items():
        expected = blocks[i].text if i in wanted else ""
        where = f"{page.name}:{blocks[i - 1].line}"
        assert alike(printed, expected), f"{where} prints\n{printed}instead of\n{expected}"


def replace_blocks(page, texts):
    """Give blocks of a page other texts: {Fence: str}."""
    lines = page.read_text().splitlines(keepends=True)
    for fence in sorted(texts, key=lambda fence: -fence.line):
        first = fence.line - 1
        lines[first : first + fence.text.count("\n")] = texts[fence]
    page.write_text("".join(lines))


def environment(package_parent):
    """The environment of a process that imports rlnumba from a folder, on the device it chooses itself."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RLNUMBA_DEVICE", "NUMBA_ENABLE_CUDASIM")}
    return kept | {"PYTHONPATH": str(package_parent), "PYTHONUNBUFFERED": "1"}


def alike(printed, expected):
    """Whether two texts are equal but for spaces and the last digits of numbers with a point."""
    numbers, expected_numbers = NUMBER.findall(printed), NUMBER.findall(expected)
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", expected).split():
        return False
    for a, b in zip(numbers, expected_numbers, strict=True):
        exact = a.lstrip("+-").isdigit() and b.lstrip("+-").isdigit()
        if a != b and (exact or abs(float(a) - float(b)) > 1e-6 + 2e-3 * abs(float(b))):
            return False
    return True


def test_alike():
    assert alike("loss 0.12345 of [8 2]\n", "loss  0.12346 of [8  2]")
    assert not alike("loss 0.125", "loss 0.123")
    assert not alike("8 rows", "9 rows")
    assert not alike("8 rows", "8 columns")


@on_cpu
@every_page
def test_consoles_are_real(page, tmp_path):
    blocks = fences(page)
    if not any(simulated(fence) for fence in blocks):
        return
    if sys.version_info >= (3, 13):
        pytest.skip("pdb stops one line earlier at breakpoint() than it did when the sessions were recorded")
    save_files(page, tmp_path)
    (tmp_path / "rlnumba").unlink()
    shutil.copytree(ROOT / "rlnumba", tmp_path / "rlnumba", ignore=shutil.ignore_patterns("__pycache__"))
    edits = []
    for fence in blocks:
        if fence.language == "diff":
            edits.append(fence)
        elif simulated(fence):
            originals = [edited(tmp_path, edit.text) for edit in edits]
            replay(tmp_path, fence, f"{page.name}:{fence.line}")
            for path, text in originals:
                path.write_text(text)
            edits = []


def edited(folder, diff):
    """Make the change that a diff describes, and return the file and its text before."""
    first, *lines = diff.splitlines()
    path = folder / first.removeprefix("+++ ")
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has {text.count(before)} times\n{before}"
    path.write_text(text.replace(before, after))
    return path, text


def replay(folder, fence, where):
    """Run a console block's command, type its answers, and compare what comes."""
    first, *lines = fence.text.splitlines(keepends=True)
    variable, command = first.removeprefix("$ ").split(maxsplit=1)
    typed = [line.removeprefix("(Pdb) ") for line in lines if line.startswith("(Pdb) ")]
    # What is typed is not echoed, so the answer follows the prompt.
    expected = re.sub(r"(?m)^\(Pdb\) .*\n", "(Pdb) ", "".join(lines))
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        cwd=folder,
        env=environment(folder) | dict([variable.split("=")]),
        input="".join(typed),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    printed = done.stdout.replace(str(folder.resolve()), RECORDED_AT)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(without_numbers(expected), without_numbers(printed), flags), (
        f"{where} shows\n{expected}\nand now comes\n{printed}"
    )


def without_numbers(text):
    """The text without line numbers, and without the lane that happened to complain first."""
    text = re.sub(r"\.py\(\d+\)|(?<=line )\d+", "", text)
    return re.sub(r"tid=\[\d+(.*not all)", r"tid=[\1", text)


def commands(fence):
    """The commands of a bash or console block: lists of words, without variables and comments."""
    if fence.language in ("bash", "sh"):
        lines = fence.text.replace("\\\n", " ").splitlines()
    elif fence.language == "console" and not simulated(fence):
        lines = [line[2:] for line in fence.text.splitlines() if line.startswith("$ ")]
    else:
        return
    for line in lines:
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


@on_cpu
def test_the_first_operator_compiles_but_for_the_edit_shown(tmp_path, monkeypatch, compile_offline):
    """With the edit on the page, the message on the page comes."""
    page = ROOT / "docs" / "first-operator.md"
    save_files(page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    gelu = importlib.import_module("gelu")
    types = ["uint16[::1]"] * 3
    assert not compile_offline(gelu.gelu_kernel, types[:2], (9, 0))
    assert not compile_offline(gelu.gelu_backward_kernel, types, (9, 0))
    (edit,) = (fence.text for fence in fences(page) if fence.language == "diff")
    path, _ = edited(tmp_path, edit)
    names = {"__name__": "gelu"}
    exec(path.read_text(), names)
    with pytest.raises(numba.core.errors.TypingError) as raised:
        compile_kernel.lower(names["gelu_backward_kernel"], tuple(types), (9, 0))
    message = "narrow(float64, array(uint16, 1d, C))"
    assert message in str(raised.value) and message in page.read_text()


@every_page
def test_commands_parse(page, tmp_path, monkeypatch):
    save_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for fence in fences(page):
        for words in commands(fence):
            if words[0] == "rlnumba":
                parse(words[1:])
            else:
                for word in words[1:]:
                    named = re.fullmatch(r"(?:rlnumba|tests|docs|examples|bench)/[\w/.-]+", word)
                    assert not named or (ROOT / word).exists(), f"{page.name}:{fence.line}: {word} does not exist"


def parse(arguments):
    """Take an rlnumba command as far as it goes without doing its work."""
    at = next(i for i, word in enumerate(arguments) if word in cli.commands or word == "--help")
    if arguments[at] == "--help":
        return
    name, rest = arguments[at], arguments[at + 1 :]
    cli.make_context("rlnumba", [*arguments[:at], name])
    if "--help" in rest:
        return
    context = cli.commands[name].make_context(name, rest)
    if name in ("plan", "eval", "compile"):
        files, trainer = (context.params[key] for key in ("config", "trainer"))
        runs_of_any_trainer(files, trainer, parse_overrides(context.params["overrides"]))
    elif "overrides" in context.params:
        load_run(name, context.params["config"], parse_overrides(context.params["overrides"]))


def headings(page):
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    titles = re.findall(r"(?m)^#+ (.*)$", text)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_links_lead_somewhere(page):
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target} does not exist"
        assert not anchor or anchor in headings(linked), f"{page.name}: {linked.name} has no heading #{anchor}"


@every_page
def test_files_and_names_exist(page):
    """`rlnumba/engine/llm.py:LLM.generate` in backticks: the file is there and defines the name."""
    pattern = r"`((?:rlnumba|tests|docs|examples|bench)/[\w/.-]*?)(?::([\w.]+))?`"
    for path, name in re.findall(pattern, page.read_text()):
        assert (ROOT / path).exists(), f"{page.name}: {path} does not exist"
        if name:
            assert name in definitions(ROOT / path), f"{page.name}: {path} does not define {name}"


def definitions(path):
    """The names that a module defines at its top, in its classes, and in branches: set of "f", "C", "C.method"."""
    found = set()

    def visit(nodes, prefix):
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.If | ast.Try):
                visit([*node.body, *node.orelse], prefix)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                found.update(prefix + n.id for n in names)

    visit(ast.parse(path.read_text()).body, "")
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page != ROOT / "README.md"], ids=lambda page: page.name)
def test_a_page_opens_with_its_question(page):
    """The first sentence below the title ends with a question mark."""
    assert opens_with_question(page.read_text()), f"{page.name}: the first sentence must be the page's question"


def opens_with_question(text):
    """Whether the first sentence of a page's first paragraph is a question."""
    title, paragraph = text.split("\n\n")[:2]
    sentence = re.match(r"[^#`|!].*?[.?!](?=\s|$)", paragraph, re.DOTALL)
    return title.startswith("# ") and sentence is not None and sentence[0].endswith("?")


@pytest.mark.parametrize(
    ("text", "is_question"),
    [
        ("# GEMM\n\nHow are 0.95 of cuBLAS's\nspeed reached? By TMA.\n", True),
        ("# GEMM\n\nThis is a page. Is it?\n", False),
        ("# GEMM\n\n## Why?\n\nHow is that?\n", False),
        ("# GEMM\n\n| question? |\n", False),
        ("How does it work?\n\nHow does it work?\n", False),
    ],
)
def test_questions_are_recognised(text, is_question):
    assert opens_with_question(text) == is_question


def test_every_page_is_linked():
    """From docs/README.md; so a stranger finds it."""
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    pages = {page.name for page in PAGES if page.parent.name == "docs"} - {"README.md"}
    assert linked == pages


@pytest.fixture(scope="module")
def make_pictures():
    """The module docs/make_pictures.py."""
    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "docs" / "make_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_cpu
def test_pictures_are_drawn_and_shown(make_pictures, tmp_path):
    """The pages show the pictures in docs/pictures, all of them, and the script draws these."""
    shown = {
        target for page in PAGES for target in re.findall(r"!\[[^]]+\]\((?:docs/)?pictures/([^)]+)\)", page.read_text())
    }
    stored = {path.name for path in make_pictures.FOLDER.iterdir()}
    make_pictures.main(tmp_path)
    assert shown == stored == {path.name for path in tmp_path.iterdir()}


@pytest.mark.sm90
@pytest.mark.sim
def test_layouts_of_pictures(make_pictures):
    """A box after its copy, the fragments of its first 16 lines, and the sums of a product with a unit matrix."""
    start, wait = wgmma.wgmma_async(16, "float16", 4), wgmma.wgmma_wait_group(8, 0)

    @cuda.jit
    def layouts_kernel(a_map, b_map, memory, words, sums):
        thread = np.int32(cuda.threadIdx.x)
        a_place = (shared_memory.shared_address(cuda.shared.array(12 * 1024, np.uint8)) + 1023) // 1024 * 1024
        b_place, barrier = a_place + 8192, a_place + 8192 + 2048
        if thread == 0:
            sm90.mbarrier_init(barrier, 1)
            sm90.mbarrier_init_fence()
        cuda.syncthreads()
        if thread == 0:
            sm90.mbarrier_expect_tx(barrier, 8192 + 2048)
            sm90.tma_load_2d(a_place, sm90.tensor_map_address(a_map), 0, 0, barrier)
            sm90.tma_load_2d(b_place, sm90.tensor_map_address(b_map), 0, 0, barrier)
        sm90.mbarrier_wait(barrier, 0)
        for i in range(2):
            memory[2 * thread + i] = shared_memory.load_word(a_place + (2 * thread + i) * 4)
        of_a = cuda.local.array(4, np.int32)
        of_b = cuda.local.array(4, np.int32)
        lane = thread % 32
        line, chunk = lane % 16, lane // 16
        sm80.ldmatrix_fragment(of_a, 0, a_place + line * 128 + (chunk ^ (line & 7)) * 16)
        line, chunk = lane % 8 + lane // 16 * 8, lane // 8 % 2
        sm80.ldmatrix_fragment(of_b, 0, a_place + line * 128 + (chunk ^ (line & 7)) * 16)
        for i in range(4):
            words[0, thread, i], words[1, thread, i] = of_a[i], of_b[i]
        acc = cuda.local.array(8, np.float32)
        for i in range(8):
            acc[i] = np.float32(0.0)
        start(acc, wgmma.smem_descriptor(a_place), wgmma.smem_descriptor(b_place), np.int32(0))
        wait(acc)
        for i in range(8):
            sums[thread, i] = acc[i]

    # Every number says where it stands: 16 line + column in the first 16 columns.
    a, b = np.zeros((64, 64), np.float16), np.eye(16, 64, dtype=np.float16)
    a[:, :16] = np.arange(1024).reshape(64, 16)
    shapes = ((256,), np.int32), ((2, 128, 4), np.int32), ((128, 8), np.float32)
    found = [device.xp().zeros(*shape) for shape in shapes]
    operands = [device.asarray(x) for x in (a, b)]
    launch(layouts_kernel, 1, 128, *(tensor_map(x, len(x), 64) for x in operands), *found)
    memory, words, sums = (device.to_host(x) for x in found)

    lines = memory.view(np.float16).reshape(8, 8, 8)
    for line in range(8):
        for chunk in range(8):
            place = make_pictures.swizzled(line, chunk)
            np.testing.assert_array_equal(lines[line, place], a[line, 8 * chunk : 8 * chunk + 8])
    for of_b in (False, True):
        pairs = words[int(of_b)].view(np.float16).reshape(128, 4, 2)
        for lane in range(32):
            for word in range(4):
                line, k = make_pictures.fragment_place(lane, word, of_b)
                np.testing.assert_array_equal(pairs[lane, word], a[line, k : k + 2])
    for thread in range(128):
        for i in range(8):
            assert sums[thread, i] == a[make_pictures.accumulator_place(thread, i)]
