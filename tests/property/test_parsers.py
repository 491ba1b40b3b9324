"""Whatever comes from outside: a parser gives a value or one of the exceptions it declares, nothing else."""

from __future__ import annotations

import pytest

from tests.effort import how_many
from tests.property.mutate import damaged
from tests.property.parsers import PARSERS, Parser


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_a_sample_is_read(parser: Parser) -> None:
    """Otherwise every damaged one would be refused for the same reason."""
    for sample in parser.samples:
        try:
            parser.read(sample)
        except parser.declared as problem:
            raise AssertionError(f"{parser.name} refused its own sample") from problem


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_damaged_input_gives_a_value_or_a_declared_exception(parser: Parser) -> None:
    for seed in range(how_many(3)):
        problem = problem_of(parser, seed, damaged(parser.name, parser.samples, seed))
        assert problem is None, problem


def problem_of(parser: Parser, seed: int, data: bytes) -> str | None:
    """The input and its undeclared exception in words; None: all is well."""
    try:
        parser.read(data)
    except parser.declared:
        return None
    except Exception as problem:
        where = problem.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        shown = data if len(data) < 3000 else data[:3000] + b"..."
        return f"{parser.name}, seed {seed}: {type(problem).__name__}: {problem} at {at}\ninput: {shown!r}"
    return None
