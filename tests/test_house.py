"""The house rules that no other tool checks: sizes, documents that stay true, nothing of a developer's machine."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import paxserve
from paxserve import flags

ROOT = Path(__file__).parent.parent
PACKAGES = ("paxserve", "models", "pallas_kernels", "sharding")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OTHER_TEXTS = [ROOT / name for name in ("Makefile", "pyproject.toml", "requirements.lock", ".ci/run", ".gitignore")]

MAX_LINES, MAX_FUNCTION_LINES = 600, 60
MAX_KERNEL_LINES, MAX_KERNEL_FUNCTION_LINES = 900, 90  # a kernel and its specs are read as one


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check():
    assert len(SOURCES) > 40
    assert len(TESTS) > 10
    assert len(DOCUMENTS) >= 5
    assert all(path.is_file() for path in OTHER_TEXTS)


def is_kernel(path: Path) -> bool:
    return path.is_relative_to(ROOT / "pallas_kernels")


def test_modules_stay_small():
    limits = {path: MAX_KERNEL_LINES if is_kernel(path) else MAX_LINES for path in SOURCES}
    lines = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name_of(path): lines[path] for path in SOURCES if lines[path] > limits[path]}


def test_functions_stay_small():
    too_long = {}
    for path in SOURCES:
        limit = MAX_KERNEL_FUNCTION_LINES if is_kernel(path) else MAX_FUNCTION_LINES
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                count = node.end_lineno - node.lineno + 1
                if count > limit:
                    too_long[f"{name_of(path)}:{node.name}"] = count
    assert not too_long


def test_no_module_is_a_drawer_for_everything():
    assert not [name_of(path) for path in SOURCES if path.stem in ("utils", "util", "helpers", "misc")]


def test_every_package_says_what_lives_there():
    for path in SOURCES:
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)
        assert (path.parent / "__init__.py").exists(), f"{name_of(path.parent)} is no package"
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def test_tests_are_no_packages():
    assert not [name_of(path) for path in TESTS if path.name == "__init__.py"]


def test_torch_is_not_used():
    pattern = re.compile(r"^\s*(import|from) (torch|tensorflow)\b", re.MULTILINE)
    assert not [name_of(path) for path in SOURCES if pattern.search(path.read_text())]


def test_the_table_of_flags_in_the_readme_is_the_generated_one():
    begin, end = flags.MARKERS
    shown = (ROOT / "README.md").read_text().split(begin)[1].split(end)[0]
    assert shown.strip() == flags.markdown_table().strip(), "Run `make readme`."


def test_the_changelog_knows_the_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased" or versions[0] == paxserve.__version__
    assert paxserve.__version__ in versions


def anchors(document: Path) -> set[str]:
    """The fragments that GitHub gives a document's headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_inside_the_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), f"{name_of(document)}: {target}"
        if fragment:
            assert fragment in anchors(path), f"{name_of(document)}: {target}"


def test_files_that_documents_name_exist():
    tops = "paxserve|models|pallas_kernels|sharding|tests|docs"
    for document in DOCUMENTS:
        if document.name != "CHANGELOG.md":  # tells of what was, too
            for path in re.findall(rf"`((?:{tops})/[\w/.]+\.(?:py|md|json|toml))`", document.read_text()):
                assert (ROOT / path).exists(), f"{name_of(document)} names {path}"


def test_nothing_tells_of_a_machine_or_a_registry():
    pattern = re.compile(r"(?<![\w.}])(/work/|/root/|/opt/pypi|/Users/|/home/[a-z])|--(extra-)?index-url|--find-links")
    for path in {*SOURCES, *TESTS, *DOCUMENTS, *OTHER_TEXTS} - {Path(__file__)}:
        found = pattern.search(path.read_text())
        assert not found, f"{name_of(path)}: {found and found[0]}"


def test_the_lock_pins_what_pyproject_asks_for_and_names_no_host():
    pins = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines())
    assert all(re.fullmatch(r"[\w.+]+", version) for version in pins.values())
    locked = {name.lower().replace("_", "-") for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["test"], *extras["plot"], *extras["dev"]]:
        name = re.split(r"[\[<>=~ ]", requirement)[0].lower().replace("_", "-")
        assert name in locked | {"paxserve"}, f"{name} is not in requirements.lock: run `make lock`."


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("driver", "expected"), [("590.44.01", "cuda"), ("570.10", "cuda12"), (None, "cpu")])
def test_make_installs_for_the_hardware_there_is(driver, expected, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + (f"echo {driver}\n" if driver else "exit 9\n"))
    tool.chmod(0o755)
    if expected == "cpu" and Path("/dev/nvidia0").exists():
        expected = "cuda"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "")}
    done = subprocess.run(
        ["make", "--dry-run", "serve", "VENV=none"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"none/installed-{expected}" in done.stdout
    assert "none/bin/paxserve serve smollm2-135m-instruct" in done.stdout
