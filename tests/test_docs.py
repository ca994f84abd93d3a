"""docs/ points at what exists, and its examples run."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from magicdec.specs.catalog import load_model_spec

ROOT = Path(__file__).resolve().parent.parent
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
EXAMPLE = (ROOT / "docs" / "worked-example.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


@pytest.mark.slow
def test_the_image_plans() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(
            ["docker", "info"], check=False, capture_output=True
        ).returncode
    ):
        pytest.skip("needs docker and its daemon")
    subprocess.run(["docker", "build", "--tag", "magicdec-test", str(ROOT)], check=True)
    done = subprocess.run(
        ["docker", "run", "--rm", "magicdec-test"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "next: " in done.stdout


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_files_and_names_that_extending_points_at_exist() -> None:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    paths = set(
        re.findall(r"`((?:magicdec|tests|scripts|docs)/[\w/.-]+\.(?:py|toml))`", text)
    )
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize(
    ("document", "printed"),
    [("extending", ["[512.0, 1024.0]"]), ("planning", ["streamingllm 512", "(3, 5)"])],
)
def test_the_examples_in_python_run(
    document: str,
    printed: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / f"{document}.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n((?:from|import) .*?)```", text, flags=re.DOTALL)
    for block, start in zip(blocks, printed, strict=True):
        exec(compile(block, document, "exec"), {})
        assert capsys.readouterr().out.startswith(start)


def test_the_profiles_of_a_device_and_an_engine_load(tmp_path: Path) -> None:
    from magicdec.perfmodel.kernels.profile import load_hardware
    from magicdec.specs.engine import load_engine

    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    device, engine = re.findall(r"```toml\n(name = .*?)```", text, flags=re.DOTALL)
    (tmp_path / "my-gpu.toml").write_text(device)
    (tmp_path / "my-server.toml").write_text(engine)
    assert not load_hardware(tmp_path / "my-gpu.toml").is_measured
    assert load_engine(tmp_path / "my-server.toml").overheads.step_overhead_s == 1e-3


def test_the_worked_example_says_what_the_model_holds() -> None:
    model = load_model_spec("embedded")
    assert f"{model.num_parameters / 1e6:.1f} million parameters" in EXAMPLE
    per_token = (
        2
        * model.num_hidden_layers
        * model.num_key_value_heads
        * model.attention.head_dim
        * 4
    )
    assert (
        f"{model.num_hidden_layers} layers × {model.num_key_value_heads} heads × {model.attention.head_dim}"
        in EXAMPLE
    )
    assert f"= {per_token // 1024} KiB" in EXAMPLE
    assert f"hold {32 * 4096 * per_token / 2**30:.1f} GiB" in EXAMPLE


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_files_that_the_documents_name_exist(document: Path) -> None:
    """Paths in code font, from the repository's root or the package's; a name in capitals is the reader's to choose."""
    roots = {
        "magicdec",
        "tests",
        "scripts",
        "docs",
        "results",
        "benchmarks",
        "specs",
        "perfmodel",
        "runtime",
    }
    text = document.read_text(encoding="utf-8")
    for path in re.findall(r"`([\w.-]+/[\w/.-]+)`", text):
        if path.split("/")[0] in roots and not Path(path).stem.isupper():
            assert (ROOT / path).exists() or (ROOT / "magicdec" / path).exists(), path


def test_docstrings_can_be_read_alone() -> None:
    """None leans on what stands before it: in a hover nothing does."""
    found = []
    folders = ("magicdec", "evidence", "plugins/vllm/magicdec_vllm")
    for path in [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.startswith("test_")
    ]:
        strings = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Expr)
        ]
        texts = [
            (node.lineno, node.value.value)
            for node in strings
            if isinstance(node.value, ast.Constant)
        ]
        found += [
            f"{path}:{line}"
            for line, text in texts
            if re.match(r"\s*(Of|The same|What)\b", str(text))
        ]
    assert not found
