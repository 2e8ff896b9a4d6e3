"""The README's two set-up commands are the ones that continuous integration runs."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
CI = ROOT / ".ci" / "run"
COMMANDS = ("run", "test")


def command(name, text):
    """The shell lines of the fenced block right behind ``<!-- command: name -->``."""
    marker = re.escape(f"<!-- command: {name} -->")
    blocks = re.findall(rf"^{marker}\n```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, f"README.md has {len(blocks)} blocks marked command: {name}"
    return blocks[0].strip()


@pytest.fixture(scope="module")
def readme():
    return README.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_has_the_command_once_and_in_one_line(readme, name):
    lines = command(name, readme).splitlines()
    assert len(lines) == 1
    assert shlex.split(lines[0])


def test_no_other_block_is_marked_as_a_command(readme):
    assert re.findall(r"<!-- command: (.*?) -->", readme) == list(COMMANDS)


def test_the_first_command_installs_with_pinned_torch_and_runs_an_example(readme):
    line = command("run", readme)
    assert re.search(r"\btorch==\d+\.\d+\.\d+\b", line)
    assert re.search(r"-e ['\"]?\.\[", line)
    [example] = re.findall(r"examples/\w+\.py", line)
    assert (ROOT / example).is_file()


def test_the_second_command_runs_the_tests(readme):
    assert "pytest" in command("test", readme)


def test_the_commands_name_no_registry(readme):
    for name in COMMANDS:
        assert "://" not in command(name, readme)
        assert "--index-url" not in command(name, readme)


@pytest.mark.parametrize("name", COMMANDS)
def test_continuous_integration_runs_exactly_the_readmes_line(readme, name):
    shown = subprocess.run([CI, "--show", name], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == command(name, readme)
    assert f'step "README: {name}" readme_step {name}\n' in CI.read_text(encoding="utf-8")


def test_continuous_integration_refuses_a_command_that_the_readme_lacks():
    shown = subprocess.run([CI, "--show", "no-such-command"], capture_output=True, text=True)
    assert shown.returncode != 0
    assert "no-such-command" in shown.stderr


def test_continuous_integration_is_a_program():
    assert CI.stat().st_mode & stat.S_IXUSR
    assert CI.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")


def test_hooks_and_development_tools_have_the_same_pins():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    for tool in ("ruff", "mypy"):
        [pin] = re.findall(rf'"{tool}==([\d.]+)"', pyproject)
        assert f"{tool}=={pin}" in hooks
