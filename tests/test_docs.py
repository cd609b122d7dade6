"""The documentation names only what is there: files, functions, sections; and nothing outside the project."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layers import LAYERS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "include" / "ringsync"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
ELSEWHERE = ["DES" + "IGN", "specs" + "/", chr(167), "peers" + ".md", "kernels" + ".md"]
"""Documents that are not in the project, and the sign by which their sections were cited."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_WHOLE_LINK = re.compile(r"\[[^\]]*\]\([^)]*\)")
_QUOTED = re.compile(r"`([^`\n]+)`")
_NAMED = re.compile(r"`([\w./-]+\.py)`\)?(?:\]\([^)]*\))?\s`([A-Za-z_][\w.]*)`")
_PROGRAM = re.compile(r"```.*?```", re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_REFERENCE = re.compile(r":(?:mod|func|class|data|meth|attr):`~?(ringsync[\w.]*)`")
_DOCUMENT = re.compile(r"docs/([\w.-]+\.(?:md|json))(?:, (\d+(?:\.\d+)?)\b)?")


def committed_texts() -> Iterator[tuple[str, str]]:
    """Path and content of each text file that is committed, or would be by ``git add``."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        try:
            yield name, path.read_text() if path.is_file() else ""
        except UnicodeDecodeError:
            continue


def anchors(page: Path) -> set[str]:
    """What links to sections of a page may name, as GitHub makes it of headings."""
    text = _PROGRAM.sub("", page.read_text())
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text)}


def names_in(path: Path) -> set[str]:
    """Functions, classes and their members, and constants that a module defines: ``run``, ``Stager.cycle``."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def is_defined(reference: str) -> bool:
    """Whether a dotted name is that of a module, or of something that it defines."""
    parts = reference.split(".")
    for length in range(len(parts), 0, -1):
        path = PACKAGE.parent.joinpath(*parts[:length])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.exists():
            return length == len(parts) or ".".join(parts[length:]) in names_in(source)
    return False


def find(name: str, page: Path) -> Path | None:
    """The file or folder of ours that a page means by a name: of the project, of the package, or beside the page."""
    places = (ROOT / name, PACKAGE / name, PACKAGE.parent / name, page.parent / name)
    return next((place for place in places if place.exists()), None)


def is_path_of_ours(name: str) -> bool:
    """Whether what a page quotes must be there: modules, and what begins with a folder of the project."""
    if not re.fullmatch(r"[\w./-]+", name) or name.startswith(("/", ".")):
        return False
    return name.endswith(".py") or ("/" in name and name.split("/")[0] in FOLDERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_PROGRAM.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    quoted = set(_QUOTED.findall(_WHOLE_LINK.sub("", _PROGRAM.sub("", text))))
    in_programs = {word for program in _PROGRAM.findall(text) for word in re.findall(r"[\w./-]+\.py\b", program)}
    missing = {name for name in quoted | in_programs if is_path_of_ours(name) and find(name, page) is None}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_that_a_page_names_are_there(page: Path) -> None:
    for name, wanted in _NAMED.findall(page.read_text()):
        module = find(name, page)
        assert module is not None, f"{page.name} names {name}, which is not there"
        assert wanted in names_in(module), f"{page.name} names {wanted} in {name}, which does not define it"


def test_modules_that_a_page_imports_are_there() -> None:
    for page in PAGES:
        for module, names in re.findall(r"^from (ringsync[\w.]*) import ([\w, ]+)$", page.read_text(), re.MULTILINE):
            path = PACKAGE.parent.joinpath(*module.split("."))
            source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert source.exists(), f"{page.name} imports {module}"
            missing = set(names.split(", ")) - names_in(source)
            assert not missing, f"{page.name} imports {missing} from {module}"


def test_nothing_cites_what_is_not_in_the_project() -> None:
    found = [
        f"{name}: {line.strip()}"
        for name, text in committed_texts()
        for line in text.splitlines()
        if any(word in line for word in ELSEWHERE)
    ]
    assert not found


def test_documents_and_their_sections_that_the_code_cites_are_there() -> None:
    numbers = {re.match(r"[\d.]*", heading)[0] for heading in _HEADING.findall((ROOT / "docs/formats.md").read_text())}  # type: ignore[index]
    for name, text in committed_texts():
        for document, section in _DOCUMENT.findall(text):
            assert (ROOT / "docs" / document).exists(), f"{name} cites docs/{document}"
            if document == "formats.md" and section:
                assert section in numbers, f"{name} cites docs/{document}, {section}"


def test_modules_and_functions_that_docstrings_name_are_there() -> None:
    texts = dict(committed_texts())
    files = {Path(name).name for name in texts}
    for name, text in texts.items():
        if not name.endswith(".py"):
            continue
        if name.startswith("include/"):
            missing = {word for word in re.findall(r"\b\w+\.py\b", text) if word not in files}
            assert not missing, f"{name} names {missing}"
        for reference in _REFERENCE.findall(text):
            assert is_defined(reference), f"{name} refers to {reference}"


def test_the_rooms_are_those_of_the_layers() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## Rooms\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", section, re.MULTILINE)
    rooms = [(int(layer), re.sub(r"/$|\.py$", "", name)) for layer, names in rows for name in _QUOTED.findall(names)]
    assert sorted(rooms) == sorted((layer, room) for layer, found in enumerate(LAYERS, 1) for room in found)
