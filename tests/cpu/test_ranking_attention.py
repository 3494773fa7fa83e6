"""observe.ranking counts the products of attention that is called, forward and backward."""

import torch

import reflib


def test_the_products_of_attention_are_counted():
    b, h, n, d = 2, 3, 32, 16
    q, k, v = (torch.randn(b, h, n, d, requires_grad=True) for _ in range(3))
    e = reflib.explain(torch.nn.functional.scaled_dot_product_attention, q, k, v)
    found = {r.name: r.flops for r in e.ranking() if "attention" in r.name}
    forward, backward = sorted(found.values())
    assert forward == 2 * (2 * b * h * n * n * d)  # q @ k, and the weights @ v
    assert backward == 5 * (2 * b * h * n * n * d)  # the scores again, and two gradients of each product
