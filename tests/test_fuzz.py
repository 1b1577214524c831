# SPDX-License-Identifier: Apache-2.0
"""A short slice of the fuzzer; `make fuzz` runs all of it."""

import re

import fuzz
import oracle
import pytest


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_problems_are_answered_exactly(name):
    cases, _ = fuzz.run(name, first=20_000, rows=1_000_000, seconds=15)
    assert cases > 10


def test_a_seed_is_one_case():
    one, other = (fuzz.case(7, "cpu") for _ in range(2))
    assert str(one) == str(other)
    assert one.scores.tobytes() == other.scores.tobytes()


def test_a_wrong_answer_is_reported_with_the_command_that_repeats_it(monkeypatch):
    real, calls = oracle.top_k, []

    def wrong_at_the_third(*args, **options):
        calls.append(args)
        values, indices = real(*args, **options)
        if len(calls) == 3:
            indices.reshape(-1)[0] += 1
        return values, indices

    monkeypatch.setattr(oracle, "top_k", wrong_at_the_third)
    with pytest.raises(AssertionError, match="rows differ") as raised:
        fuzz.run("cpu", first=30, rows=10_000, seconds=60)
    command = r"repeat with: python tests/fuzz.py --platform cpu --seed 32 --rows 1"
    assert re.search(command, str(raised.value))
