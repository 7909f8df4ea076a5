"""Least squares, orders and norms on their own, against plain arithmetic."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from acc.passes import least_squares as ls
from acc.passes.norms import probe_offset, scaled_gain
from acc.passes.search import program


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [6, 12] and second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(400, 12, generator=generator, dtype=torch.float64)
    inputs = inputs @ (torch.eye(12, dtype=torch.float64) + 0.5 * torch.randn(12, 12, generator=generator).double())
    return torch.randn(6, 12, generator=generator, dtype=torch.float64), inputs.T @ inputs / len(inputs)


def test_refit_is_the_least_squares_solution(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, moments = problem
    keep = [0, 2, 3, 7, 11]
    value = ls.refit(weight, moments, keep, fraction=1e-12)
    expected = torch.linalg.lstsq(moments[keep][:, keep], (weight @ moments[:, keep]).T).solution.T
    torch.testing.assert_close(value, expected)
    best = ls.output_error(weight, keep, value, moments)
    assert best < ls.output_error(weight, keep, weight[:, keep], moments)
    assert best < ls.output_error(weight, keep, value + 0.01, moments)


def test_ridge_leads_back_to_the_plain_cut(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, moments = problem
    value = ls.refit(weight, moments, [1, 4, 5], fraction=1e9)
    torch.testing.assert_close(value, weight[:, [1, 4, 5]], rtol=1e-6, atol=1e-6)


def test_first_removed_is_the_cheapest_after_a_refit(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, moments = problem
    errors = []
    for gone in range(12):
        keep = [index for index in range(12) if index != gone]
        errors.append(ls.output_error(weight, keep, ls.refit(weight, moments, keep, 1e-9), moments))
    order = ls.obs_order(weight, moments, [[index] for index in range(12)], step=1)
    assert sorted(order) == list(range(12))
    assert order[-1] == int(np.argmin(errors))


def test_blocks_are_removed_whole_and_cheapest_first(problem: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight, moments = problem
    blocks = [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    errors = []
    for gone in range(6):
        keep = [column for number, block in enumerate(blocks) if number != gone for column in block]
        errors.append(ls.output_error(weight, keep, ls.refit(weight, moments, keep, 1e-9), moments))
    first = ls.obs_order(weight, moments, blocks, step=1)[-1]
    assert errors[first] < 1.1 * min(errors)  # the order's own ridge is larger
    assert errors[first] < 0.5 * sorted(errors)[3]


@pytest.mark.parametrize("step", [1, 4, 5, 100])
def test_every_block_has_one_place_whatever_the_step(problem: tuple[torch.Tensor, torch.Tensor], step: int) -> None:
    weight, moments = problem
    assert sorted(ls.obs_order(weight, moments, [[i] for i in range(12)], step)) == list(range(12))


def test_program_equals_brute_force() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        scores = random.random((5, 4)).tolist()
        costs = [random.random((5, 4)).tolist(), random.random((5, 4)).tolist()]
        budgets = [float(random.uniform(0.8, 2.5)), float(random.uniform(0.8, 2.5))]
        feasible = {
            pick: sum(scores[group][index] for group, index in enumerate(pick))
            for pick in itertools.product(range(4), repeat=5)
            if all(
                sum(table[group][index] for group, index in enumerate(pick)) <= budget
                for table, budget in zip(costs, budgets, strict=True)
            )
        }
        found = program.solve(scores, costs, budgets)
        if not feasible:
            assert found is None
        else:
            assert found is not None
            assert feasible[tuple(found)] == pytest.approx(min(feasible.values()))


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e12])
def test_program_does_not_mind_the_unit(scale: float) -> None:
    scores, costs = [[0.0, 1.0, 3.0]] * 4, [[5.0, 3.0, 1.0]] * 4
    scaled = [[cost * scale for cost in group] for group in costs]
    found = program.solve(scores, [scaled], [12.0 * scale])
    assert found is not None
    assert sum(costs[0][index] for index in found) == 12
    assert program.solve(scores, [scaled], [3.9 * scale]) is None


def test_offset_of_a_gain_is_found_by_running_the_norm() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert probe_offset(LlamaRMSNorm(16)) == 0.0
    assert probe_offset(Gemma3RMSNorm(16)) == 1.0
    assert float(scaled_gain(torch.tensor([0.5]), 2.0, 1.0)) == pytest.approx(2.0)
