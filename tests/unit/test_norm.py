"""The norm of gradients, against sums in 64 bits."""

from __future__ import annotations

import math

import pytest
import torch

from horovod_train.frameworks.torch.strategies.base import total_norm


def test_the_norm_of_a_million_equal_numbers_is_exact():
    gradient = torch.full((1024, 1024), 0.1)

    assert float(total_norm([gradient])) == pytest.approx(1024 * float(gradient[0, 0]), rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_the_norm_is_that_of_all_numbers_of_all_gradients(dtype):
    make = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=make).to(dtype) for shape in ((300, 7), (), (0, 3), (5,))]
    squares = [
        float(x.real) ** 2 + float(x.imag) ** 2
        for x in torch.cat([*map(torch.ravel, gradients)]).to(torch.complex128)
    ]

    assert float(total_norm(gradients)) == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-10)


def test_the_norm_of_no_gradient_is_zero():
    assert float(total_norm([])) == 0.0
