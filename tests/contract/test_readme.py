"""The pages are true: commands exist with these options, cheap ones run, trees, tables and links match reality."""

from __future__ import annotations

import re
import shlex

import pytest
from commands import parse, surface
from house import PACKAGE, PAGES, ROOT, code_blocks, project_files

from coremill import errors
from coremill.cli import app
from coremill.config.load import load_config

# Named on the pages as things that do not exist yet.
NOT_YET: set[str] = set()
# Other programs that may begin a line.
OTHERS = {"pip", "hf", "torchrun", "mpirun"}
README_FILES = "tests/end_to_end/test_readme_files.py"
# The README's commands that `test_cheap_commands_run` does not run, with the test that does.
RUN_BY = {
    "make demo": f"{README_FILES}::test_the_built_in_example_trains",
    "make test": "tests/contract/test_readme.py::test_the_two_commands",  # CI runs it
    "pip install --constraint constraints.txt torch --index-url https://download.pytorch.org/whl/cpu": (
        "tests/contract/test_versions.py::test_the_pages_install_what_was_tested"
    ),
    "pip install --constraint constraints.txt .[lora]": (
        "tests/contract/test_versions.py::test_the_pages_install_what_was_tested"
    ),
    "coremill doctor": "tests/distributed/test_hardware_for_real.py::test_two_ranks_add_and_train",
    "coremill train --model gpt2 --data notes/*.txt": f"{README_FILES}::test_a_first_try_needs_no_run_file",
    "coremill plan text.yaml": "tests/end_to_end/test_train.py::test_a_run_of_epochs_is_planned_as_long_as_it_will_be",
    "coremill train text.yaml": f"{README_FILES}::test_the_run_files_of_the_readme_train",
    "coremill train chat.yaml": f"{README_FILES}::test_the_run_files_of_the_readme_train",
    "coremill train labels.yaml": f"{README_FILES}::test_the_run_files_of_the_readme_train",
    "coremill report runs/labels": "tests/end_to_end/test_train.py::test_report_shows_a_run",
}


def command_lines() -> list[tuple[str, list[str]]]:
    """Page and words of each command in a block of shell."""
    found = []
    for page in PAGES:
        for language, block in code_blocks(page):
            for line in block.splitlines() if language == "sh" else ():
                words = shlex.split(line, comments=True)
                if words:
                    found.append((page, words))
    return found


def words_for_coremill(words: list[str]) -> list[str] | None:
    """What follows `coremill`, also where another program starts it; None where it is no such line."""
    if words[0] == "coremill":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1 :][:1] == ["coremill"]:
        return words[words.index("-m") + 2 :]
    return None


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_there_are_commands_to_check():
    assert len(command_lines()) > 20


@pytest.mark.parametrize(("page", "words"), command_lines(), ids=lambda value: " ".join(value) if value else "")
def test_commands_on_the_pages_exist(page, words):
    ours = words_for_coremill(words)
    if ours is not None:
        parse(ours)
    elif words[0] == "make":
        assert set(words[1:]) <= targets()
    elif words[:2] == ["python", "-m"]:
        name = words[2].replace(".", "/")
        assert any((ROOT / path).is_file() for path in (f"{name}.py", f"src/{name}.py", f"{name}/__main__.py"))
    else:
        assert words[0] in OTHERS, f"{page}: {words}"


def cheap() -> list[list[str]]:
    """Commands that need no network, no measurement and no rank."""
    found = []
    for _, words in command_lines():
        ours = words_for_coremill(words) or [""]
        offline = ours[0] in ("config", "instances") and "--live" not in ours
        if (offline or (ours[0] == "plan" and "--fleet" in ours)) and ours not in found:
            found.append(ours)
    return found


@pytest.mark.parametrize("words", cheap(), ids=" ".join)
def test_cheap_commands_run(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    app(words, standalone_mode=False)
    assert capsys.readouterr().out.strip()


def test_every_command_of_the_readme_is_run_by_a_test():
    run_here = [["coremill", *words] for words in cheap()]
    others = {" ".join(words) for page, words in command_lines() if page == "README.md" and words not in run_here}
    assert others == set(RUN_BY)
    for command, test in RUN_BY.items():
        file, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{command}: {test}"


def test_commands_in_running_text_exist():
    known = surface()
    for page in PAGES:
        for quoted in re.findall(r"`(coremill [^`]*)`", (ROOT / page).read_text()):
            words = quoted.partition(" -- ")[0].split()  # behind it is another program's command
            name = " ".join(words[:3]) if " ".join(words[:3]) in known else " ".join(words[:2])
            if name in NOT_YET:
                assert name not in known
                continue
            assert name in known or words[1].startswith("-"), f"{page}: {quoted}"
            options = {word for typed in known.get(name, known["coremill"]) for word in typed.split("/")}
            asked = {word for word in words if word.startswith("--")}
            assert asked <= options | {"--help", "--version"}, f"{page}: {quoted}"


def test_the_command_table_is_complete():
    text = (ROOT / "README.md").read_text()
    section = text.partition("\n## Commands\n")[2].partition("\n## ")[0]
    listed = {}
    for cell, meaning in re.findall(r"^\| (`coremill.*?`) \| (.*) \|$", section, flags=re.MULTILINE):
        for name in re.findall(r"`(coremill [a-z0-9 ]+?)(?: [\[A-Z].*?)?`", cell):
            listed[name] = set(re.findall(r"`(--[\w-]+)", meaning))
    groups = ("coremill", "coremill config", "coremill data", "coremill k8s")
    known = {name: words for name, words in surface().items() if name not in groups}
    assert set(listed) == set(known)
    for name, options in listed.items():
        assert options <= {word for typed in known[name] for word in typed.split("/")}, name


def test_the_two_commands():
    first = next(block for language, block in code_blocks("README.md") if language == "sh")
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]
    assert {"setup", "demo", "test", "check", "bench"} <= targets()
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def tree_of_contributing() -> set[str]:
    """Paths in the annotated tree; a folder ends with a slash."""
    (block,) = [block for _, block in code_blocks("CONTRIBUTING.md") if "src/coremill/\n" in block]
    paths, folder = set(), ""
    for line in block.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name if name.endswith("/") else ""
            paths.add(name)
        else:
            paths.add(folder + name)
    return paths


def test_the_tree_is_what_is_there():
    files = [path.as_posix() for path in project_files() if not path.as_posix().startswith(".")]
    real = {re.sub(r"/.*", "/", file) for file in files} - {"src/"} | {"src/coremill/"}
    real |= {re.sub(r"^(src/coremill/[^/]+/).*", r"\1", file) for file in files if file.startswith("src/coremill/")}
    real |= {re.sub(r"^(tests/[^/]+/).*", r"\1", file) for file in files if re.match("tests/[^/]+/", file)}
    real -= {"src/coremill/__init__.py", "src/coremill/__main__.py"}
    drawn = tree_of_contributing()
    assert drawn - real == set(), "drawn, but not there"
    assert real - drawn == set(), "there, but not drawn"
    assert all(len(line.split(maxsplit=1)) == 2 for line in tree_lines()), "every line says what it is"


def tree_lines() -> list[str]:
    (block,) = [block for _, block in code_blocks("CONTRIBUTING.md") if "src/coremill/\n" in block]
    return [line for line in block.splitlines() if line.strip() not in ("src/coremill/", "tests/")]


def prose(page: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)


def anchors(page: str) -> set[str]:
    """The names under which headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert linked.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(linked.relative_to(ROOT).as_posix()), f"{page}: {target}"


def test_run_files_on_the_pages_load(tmp_path):
    blocks = [(page, block) for page in PAGES for language, block in code_blocks(page) if language == "yaml"]
    assert blocks
    for page, block in blocks:
        path = tmp_path / "run.yaml"
        path.write_text(block)
        load_config(path, [] if re.search(r"steps:|epochs:", block) else ["train.steps=1"]), page


def test_python_on_the_pages_compiles():
    for page in PAGES:
        for language, block in code_blocks(page):
            if language == "python":
                compile(block, page, "exec")


def test_the_guide_lists_the_exit_codes():
    section = (
        (ROOT / "docs" / "guide" / "trouble.md").read_text().partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    )
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", section, flags=re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert listed == raised | {0, 137}


def test_every_decision_is_listed():
    folder = ROOT / "docs" / "decisions"
    pages = {path.name for path in folder.glob("*.md")} - {"README.md"}
    subjects, _, numbers = (folder / "README.md").read_text().partition("\n## ")
    listed = re.findall(r"\]\(([\w-]+\.md)\)", subjects)
    assert sorted(listed) == sorted(pages), "each page once, and no other"
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", numbers)) <= pages
    for name in pages:
        text = (folder / name).read_text()
        assert text.startswith("# "), name
        assert "**Decided**" in text and "**Why**" in text and "**Rejected**" in text, name
        assert len(text.splitlines()) <= 60, f"{name}: one page"


def test_the_version_is_said_once_and_the_same():
    packaging = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    package = re.search(r'__version__ = "(.*)"', (PACKAGE / "__init__.py").read_text())
    assert packaging and package and packaging[1] == package[1]
    assert package[1] in (ROOT / "README.md").read_text()
    assert f"\n## [{package[1]}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {package[1]}\n" in (ROOT / "CITATION.cff").read_text()
