"""The help of the scripts: each option has words, and its default where it has one."""
import argparse

import pytest
from test_docs import PARSERS

import scripts.launch


def with_commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(each for action in commands for each in action.choices.values())]


@pytest.mark.parametrize("name", sorted(PARSERS.keys() - {"bench"}))  # of the lab alone
def test_each_option_has_words_and_its_default(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    for parser in with_commands(PARSERS[name]()):
        said = " ".join(parser.format_help().split())
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, f"{parser.prog} {action.dest}"
            if not action.option_strings or action.nargs == 0 or action.default in (None, []):
                continue
            assert "default" in action.help or f"{action.help} (default: {action.default})" in said


def test_the_launcher_s_page_fits_into_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = scripts.launch.arguments().format_help().splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith("    ")] == []
    (first,) = [number for number, line in enumerate(lines) if line.startswith("- SIGTERM, SIGINT")]
    assert lines[first + 1].startswith("  and end with code 75. ")
    assert not any("- " in line[2:] for line in lines[first:first + 12])
