"""Dependencies point downwards only (DESIGN §12), and the library core needs no server, Spark or Airflow."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "include" / "ringsync"

LAYERS = [
    {"cql"},
    {"schema", "ring"},
    {"changes"},
    {"formats"},
    {"storage"},
    {"config"},
    {"sources", "streams", "replica", "state"},
    {"progress", "status", "metrics"},
    {"warm"},
    {"steps", "spark_daemon"},
    {"orchestration", "airflow_client", "inspect"},
    {"service"},
    {"cli"},
]
"""From the bottom; a module may import its own room and rooms below its own."""

CORE = {"cql", "schema", "ring", "changes", "formats"}
CORE_LIBRARIES = {"numpy", "numba", "llvmlite", "pyarrow"}
CORE_EXCEPTION = {
    "schema/from_cluster.py": {"cassandra"},
    "formats/commitlog/encryption.py": {"cryptography"},
    "formats/keystores/passwords.py": {"cryptography"},
}


def imports(path: Path, at_top_level_only: bool = False) -> set[str]:
    """Full names of the modules that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def typing_only(path: Path) -> set[str]:
    """Modules imported under ``if TYPE_CHECKING`` and inside functions (factories of the layer's own port)."""
    tree = ast.parse(path.read_text())
    inner: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.FunctionDef):
            for child in ast.walk(node):
                if isinstance(child, ast.ImportFrom) and child.module:
                    inner.add(child.module)
    return inner


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    level = {name: index for index, names in enumerate(LAYERS) for name in names}
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert own in level, f"{own} is in no layer: add it to LAYERS"
    used = imports(path)
    if own == "config":
        used -= typing_only(path)
    for module in used:
        if module.startswith("ringsync."):
            other = room(module)
            assert other == own or level[other] < level[own], f"{path.name} imports {module}, which is not below it"


@pytest.mark.parametrize("path", [p for p in files() if p.relative_to(PACKAGE).parts[0] in CORE], ids=str)
def test_the_core_needs_few_libraries(path: Path) -> None:
    allowed = CORE_LIBRARIES | CORE_EXCEPTION.get(str(path.relative_to(PACKAGE)), set())
    foreign = {module.split(".")[0] for module in imports(path)} - {"ringsync"}
    standard = foreign & set(__import__("sys").stdlib_module_names)
    assert foreign - standard <= allowed


def test_no_airflow_inside_the_package() -> None:
    for path in files():
        assert not any(module.split(".")[0] == "airflow" for module in imports(path)), path


def test_files_are_short() -> None:
    code = [*PACKAGE.rglob("*.py"), *(ROOT / "dags").glob("*.py"), *(ROOT / "spark_apps").glob("*.py")]
    code += [*(ROOT / "servers").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    too_long = {str(p.relative_to(ROOT)): n for p in code if (n := len(p.read_text().splitlines())) > 500}
    assert not too_long
