# SPDX-License-Identifier: Apache-2.0
"""The mutations still apply, and the tests that they name still exist.

Whether each turns its tests red is for `make mutations` to see: it compiles.
"""

import ast
import collections
import importlib.util
import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).parent
ROOT = TESTS.parent


def _table():
    path = TESTS / "mutations" / "table.py"
    spec = importlib.util.spec_from_file_location("mutation_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MUTATIONS


MUTATIONS = _table()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_applies_to_the_sources_as_they_are(mutation):
    for file, old, new in mutation.edits:
        assert (ROOT / file).read_text().count(old) == 1, f"{file}: {old!r}"
        assert old != new


def _functions(file):
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_a_mutation_names_exists():
    for mutation in MUTATIONS:
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            file, name = re.fullmatch(r"(\w+\.py)::(\w+)(?:\[.*\])?", test).groups()
            assert name in _functions(file), f"{mutation.name}: {test}"


def test_names_are_unique_and_what_is_not_plainly_red_says_why():
    counts = collections.Counter(mutation.name for mutation in MUTATIONS)
    assert max(counts.values()) == 1
    for mutation in MUTATIONS:
        assert mutation.where in ("cpu", "gpu", "2 gpus")
        assert mutation.expect in ("red", "green", "either")
        assert mutation.expect != "either" or mutation.why, mutation.name


def test_the_documentation_lists_every_mutation():
    text = (ROOT / "docs" / "testing.md").read_text()
    missing = [m.name for m in MUTATIONS if f"`{m.name}`" not in text]
    assert not missing
