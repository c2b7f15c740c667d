"""Answers of a matcher to random logits validate, for schemas drawn at random."""

import json
from random import Random

import jsonschema_rs

from common.sampling_params import Grammar
from engine.grammar.json_schemas import check_schema
from tests.engine.grammar.test_masks import EOS, processor, start, step, text
from tests.random_schemas import random_schema


def test_answers_of_random_logits_to_random_schemas_validate() -> None:
    rows, random = 12, Random(5)
    schemas = [random_schema(random) for _ in range(rows)]
    one = processor()
    for schema in schemas:
        check_schema(schema, "schema")
    one.start([start(row, Grammar("json_schema", json.dumps(schema)), []) for row, schema in enumerate(schemas)])
    answers: list[list[int]] = [[] for _ in schemas]
    going, number = list(range(rows)), 0
    while going and number < 600:
        for row, token in zip(list(going), step(one, going, number), strict=True):
            answers[row].append(token)
            if token == EOS:
                going.remove(row)
        number += 1
    ended = [row for row in range(rows) if row not in going]
    assert len(ended) > rows // 2, "most end: random logits prefer long answers"
    for row in ended:
        assert jsonschema_rs.is_valid(schemas[row], json.loads(text(answers[row]))), (schemas[row], text(answers[row]))
