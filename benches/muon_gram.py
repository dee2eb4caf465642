#!/usr/bin/env python3
"""Muon's orthogonal matrix by products of the matrix itself, as lowp makes it, and by one Gram matrix that row shards could sum:

    muon_gram.py [--rows N] [--cols N]

Both take five steps with the published coefficients, products of bf16 with sums in f32. Printed are singular values of a momentum whose
spectrum falls, and what each way makes of them: a step moves all of them to between 0.7 and 1.2 if it is exact.
"""

import argparse

import torch

A, B, C = 3.4445, -4.7750, 2.0315


def product(x, y):
    """Of bf16, with sums in f32."""
    return x.bfloat16().float() @ y.bfloat16().float()


def of_matrix(x):
    for _ in range(5):
        gram = product(x.T, x)
        x = A * x + product(x, B * gram + C * product(gram, gram))
    return x


def of_gram(x, product):
    """The same polynomials of one Gram matrix; the matrix is multiplied once, by all of them."""
    gram, factor = product(x.T, x), torch.eye(x.shape[1])
    for _ in range(5):
        step = A * torch.eye(x.shape[1]) + B * gram + C * product(gram, gram)
        factor = product(factor, step)
        gram = product(product(step, gram), step)
    return product(x, factor)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--cols", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(args.rows, args.cols))
    right, _ = torch.linalg.qr(torch.randn(args.cols, args.cols))
    values = torch.logspace(0, -3, args.cols)
    x = left * (values / values.norm()) @ right.T
    ways = [of_matrix(x), of_gram(x, product), of_gram(x, torch.matmul)]
    # Along the singular vectors of the momentum.
    along = [(left.T @ way @ right).diagonal() for way in ways]
    exact = values / values.norm()
    for _ in range(5):
        exact = A * exact + B * exact**3 + C * exact**5
    print("singular value  exact  matrix, bf16  Gram, bf16  Gram, f32")
    for at in range(0, args.cols, args.cols // 8):
        print(f"{values[at]:14.4f}  {exact[at]:5.3f}  {along[0][at]:12.3f}  {along[1][at]:10.3f}  {along[2][at]:9.3f}")
    for name, way in zip(("matrix, bf16", "Gram, bf16", "Gram, f32"), along):
        print(f"{name}: largest difference from exact {float((way - exact).abs().max()):.3f}")


if __name__ == "__main__":
    main()
