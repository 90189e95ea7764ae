"""Prices of choices, of which parts are remembered."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.graph import Graph
from tap_planner.search import CostedModel, Recompute, fold_assignment
from tap_planner.search.pricing import price_choices
from tests.search.building import free_configuration, make_model, random_assignments
from tests.search.small_graphs import repeated_graphs
from tests.search.test_free_settings import CHECKS, PHASES


@given(repeated_graphs(3), st.integers(0, 1 << 30))
@settings(max_examples=15, suppress_health_check=CHECKS, phases=PHASES)
def test_prices_do_not_depend_on_what_was_priced_before(graph: Graph, seed: int) -> None:
    """Plans that differ in a few decisions cost the same after one another as each by itself."""
    model = make_model(graph, (2, 2))
    configuration = free_configuration(tuple(Recompute), (0, 1, 2, 3), 2, training=graph.loss is not None)
    costed = CostedModel(model, configuration)
    regions = sorted({int(region) for region in model.region_of[model.run_of >= 0]}) if graph.loss is not None else []
    chance = random.Random(seed)
    for assignment in random_assignments(model, seed, 3, per_class=False):
        for _ in range(3):
            changed = list(assignment.operators)
            place = chance.randrange(len(changed))
            changed[place] = chance.randrange(model.domain(place))
            modes = {region: chance.randrange(len(Recompute)) for region in regions}
            choices = fold_assignment(model, replace(assignment, operators=tuple(changed), recompute=modes))
            alone = price_choices(CostedModel(make_model(graph, (2, 2)), configuration), choices)
            assert price_choices(costed, choices) == alone
