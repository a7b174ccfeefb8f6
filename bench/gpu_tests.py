"""All tests marked `gpu`, in parts that each end within eight minutes on one GPU; their counts as one page.

    python bench/gpu_tests.py FOLDER                      every part, one after the other, then the page
    python bench/gpu_tests.py FOLDER --parts attention    some of them; the others' results stay in FOLDER
    python bench/gpu_tests.py FOLDER --page               only the page, from FOLDER's results; needs no GPU
    python bench/gpu_tests.py --list                      the parts and their files

A part is one pytest with a process a core, at most sixteen, since most of its time goes to compiling; "peer" has four,
which share two GPUs. A part's result is FOLDER/PART.json: the commit, the GPU, the counts, the failures, and a digest
of the part's tests and of every module that they import, directly or through others. The page,
bench/results/gpu-tests.md, is of the sources of this checkout: results of other ones are refused, and a part whose
sources are those of an earlier commit need not run again. The exit code is 1 if a test failed or a part did not end.
"""

import argparse
import datetime
import functools
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "bench" / "results" / "gpu-tests.md"
# Each part's files, as patterns below tests/. tests/test_bench.py checks that every file with GPU tests is in one part.
PARTS = {
    "attention": ("kernels/test_attention*.py", "kernels/test_paged_attention.py", "kernels/test_dec*.py"),
    "gemm": ("kernels/test_gemm*.py", "kernels/test_logprob*.py", "kernels/test_qkv.py", "kernels/test_sampling.py"),
    "families": ("kernels/test_delta_rule*.py", "kernels/test_grouped_gemm*.py", "kernels/test_ex*.py"),
    # The last two run whole models.
    "engine": ("engine/test_*.py", "model/test_*.py", "test_*.py", "kernels/test_dis*.py", "kernels/test_window.py"),
    "kernels": ("kernels/test_*.py",),
    "trainers": ("trainers/test_*.py",),
    "peer": ("parallel/test_peer.py",),
    "parallel": ("parallel/test_*.py",),
}
MOST_SECONDS = 480
# Kernels of "peer" turn until another rank's have answered: the more processes share a GPU, the longer each waits.
MOST_PROCESSES = {"peer": 4}
# With a process a core, threads of NumPy's products would only wait for each other.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# What a source may import of this repository: dotted names, also in strings, and names after `from ... import`. That is
# more than the kernel cache follows (runtime/compile/cache.py): tests, and modules imported by a name in a string.
DOTTED = re.compile(r"\b(?:rlnumba|tests|bench)(?:\.\w+)+")
FROM = re.compile(r"^[ \t]*from[ \t]+((?:rlnumba|tests|bench)[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|.*)", re.M)


def files_of_parts():
    """{part: its files with GPU tests}; a file belongs to the first part with a pattern that it matches."""
    files, taken = {}, set()
    for part, patterns in PARTS.items():
        matching = [path for pattern in patterns for path in sorted((ROOT / "tests").glob(pattern))]
        files[part] = [path for path in matching if path not in taken and "mark.gpu" in path.read_text()]
        taken.update(files[part])
    return files


@functools.cache
def imported_files(source):
    """The Python files of this repository that a Python file may import: set of Path."""
    text = source.read_text()
    names = set(DOTTED.findall(text))
    for module, imported in FROM.findall(text):
        names |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", re.sub(r"#.*", "", imported)))}
    modules = [ROOT.joinpath(*name.split(".")) for name in names]
    files = [file for module in modules for file in (module.with_suffix(".py"), module / "__init__.py")]
    return {file for file in files if file.exists()}


def reached_files(files):
    """A part's files and all that they import, directly or through others: sorted list of Path."""
    reached, new = set(), set(files)
    while new:
        reached |= new
        new = {file for source in new for file in imported_files(source)} - reached
    return sorted(reached)


def sources_digest(files):
    """The hash of all that a part's tests run: of `reached_files`."""
    digest = hashlib.sha256()
    for path in reached_files(files):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def commit_name():
    """The commit of this checkout, shortened, or "unknown" where there is no repository."""
    found = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def gpu_name():
    """The GPUs of this machine and their driver, as nvidia-smi lists them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    name, driver = lines[0].split(", ")
    return f"{len(lines)} x {name}, driver {driver}"


def results_of(report):
    """(passed, skipped, {failed test: first line of its message}) of a JUnit file of pytest."""
    passed, skipped, failed = 0, 0, {}
    for case in ElementTree.parse(report).iter("testcase"):
        troubles = [child for child in case if child.tag in ("failure", "error")]
        if troubles:
            name = f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"
            failed[name] = (troubles[0].get("message") or "").strip().splitlines()[:1]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def run_part(part, files, folder, seconds, commit):
    """Run a part's tests, write FOLDER/PART.json and the log beside it, and return the result."""
    report, log = folder / f"{part}.xml", folder / f"{part}.txt"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["-n", str(min(os.cpu_count(), MOST_PROCESSES.get(part, 16))), "--durations=30"]
    command += [str(path.relative_to(ROOT)) for path in files]
    begun = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"RLNUMBA_DEVICE": "cuda"} | ONE_THREAD,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    passed, skipped, failed = results_of(report) if report.exists() else (0, 0, {})
    result = {
        "sources": sources_digest(files), "commit": commit, "gpu": gpu_name(), "date": str(datetime.date.today()),
        "seconds": round(time.monotonic() - begun), "passed": passed, "skipped": skipped, "failed": failed,
        # pytest's exit code is 1 where tests failed, and 0; any other is no result.
        "ended": process.returncode in (0, 1),
    }  # fmt: skip
    (folder / f"{part}.json").write_text(json.dumps(result, indent=1))
    return result


def row_of(part, result):
    """The page's line on a part."""
    what = f"{result['passed']} passed, {len(result['failed'])} failed, {result['skipped']} skipped"
    what = what if result["ended"] else "did not end"
    return f"| {part} | {what} | {result['seconds']} s | {result['commit']} | {result['gpu']} |"


def page_of(results, commit):
    """The page's text. results: {part: its result}; commit: one whose sources all of them ran."""
    total = {key: sum(result[key] for result in results.values()) for key in ("passed", "skipped")}
    failed = {name: message for result in results.values() for name, message in result["failed"].items()}
    missing = [part for part in PARTS if part not in results or not results[part]["ended"]]
    lines = [
        "# GPU tests",
        "",
        "Which GPU tests were run last, of which commit, on which GPU, and did they pass? This page is written by",
        "`python bench/gpu_tests.py`; CONTRIBUTING.md says when to run it.",
        "",
        f"Commit {commit}, {max(result['date'] for result in results.values())}: {total['passed']} passed, "
        f"{len(failed)} failed, {total['skipped']} skipped.",
        *([f"Parts without a result: {', '.join(missing)}."] if missing else []),
        "A part that ran at an earlier commit has the same sources in both: its tests and what they import.",
        "",
        "| part | tests | time | commit | GPU |",
        "| --- | --- | --- | --- | --- |",
        *(row_of(part, results[part]) for part in PARTS if part in results),
    ]
    if failed:
        lines += ["", "Failed:", "", *(f"- `{name}`: {' '.join(message)[:160]}" for name, message in failed.items())]
    return "\n".join(lines) + "\n"


def write_page(folder, commit):
    """Write the page of a commit from FOLDER's results; SystemExit if they are of other sources than this checkout."""
    results = {
        part: json.loads((folder / f"{part}.json").read_text()) for part in PARTS if (folder / f"{part}.json").exists()
    }
    files = files_of_parts()
    for part, result in results.items():
        if result["sources"] != sources_digest(files[part]):
            raise SystemExit(f"{folder / part}.json: of other sources than this checkout's; run the part again")
    if not results:
        raise SystemExit(f"{folder}: no results of parts")
    PAGE.write_text(page_of(results, commit))
    print(PAGE)
    return int(any(result["failed"] or not result["ended"] for result in results.values()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, help="where results and logs go")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="limit for one part")
    parser.add_argument("--commit", default=commit_name(), help="of the sources, where there is no repository")
    parser.add_argument("--page", action="store_true", help="write the page from FOLDER's results")
    parser.add_argument("--list", action="store_true", help="print the parts and do nothing")
    options = parser.parse_args()
    files = files_of_parts()
    if options.list:
        for part, paths in files.items():
            print(f"{part:12} {' '.join(path.name for path in paths)}")
        return 0
    if options.folder is None:
        parser.error("folder is required")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if options.page:
        return write_page(options.folder, options.commit)
    options.folder.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        result = run_part(part, files[part], options.folder, options.seconds, options.commit)
        failures = (f"  FAILED {name}: {' '.join(message)}" for name, message in result["failed"].items())
        print(row_of(part, result), *failures, sep="\n", flush=True)
    return write_page(options.folder, options.commit)


if __name__ == "__main__":
    sys.exit(main())
