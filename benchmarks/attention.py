"""Attention's backward by products beside torch's: `python -m benchmarks.attention [--threads N] [--rounds N]`.

A few layers of three Llama shapes in bf16 with random weights, rows of 512, loss and optimizer left out. Steps with
`model/quick_attention.py` and steps without take turns; printed are the seconds of forward and backward of each (the
median), what attention alone takes backward, and how far either's gradients are from those of double precision.
Wants a CPU with matrix units, but for `--errors`, which prints the last alone; asserts nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROW_TOKENS = 512
# (hidden, feed-forward, heads, heads of keys, layers, rows)
SHAPES = {
    "50M": (512, 1408, 8, 8, 8, 4),
    "350M": (1024, 2816, 16, 16, 6, 4),
    "1.24B": (2048, 8192, 32, 8, 3, 2),
}


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    if not options.errors:
        _print_speeds(torch, options.rounds)
    print("\nerror of the gradients of query, key and value, beside double precision:")
    for steepness, shift in ((1.0, 0.0), (4.0, 0.0), (1.0, 100.0)):
        torchs, ours = _errors(torch, steepness, shift)
        common = f", keys with {shift:g} in common" if shift else ""
        print(f"  scores of standard deviation {steepness:g}{common}: torch's {torchs}, by products {ours}")
    return 0


def _print_speeds(torch: Any, rounds: int) -> None:
    print("| layers of | step, s: torch's, by products | ratio | attention backward, ms | ratio |")
    print("|---|---|---:|---|---:|")
    for name, shape in SHAPES.items():
        steps, backward = _steps(torch, shape, rounds), _backward(torch, shape, rounds)
        print(
            f"| {name} | {steps[0]:.3f}, {steps[1]:.3f} | {steps[0] / steps[1]:.2f}"
            f" | {1e3 * backward[0]:.1f}, {1e3 * backward[1]:.1f} | {backward[0] / backward[1]:.2f} |"
        )


def _steps(torch: Any, shape: tuple[int, ...], rounds: int) -> tuple[float, float]:
    """Of a model's layers, forward and backward: torch's attention, and ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from coremill.model import quick_attention
    from coremill.model.fused_layers import fuse_layers

    hidden, wide, heads, key_heads, layers, rows = shape
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=wide, num_attention_heads=heads, num_key_value_heads=key_heads,
        num_hidden_layers=layers, vocab_size=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().train()
    fuse_layers(model)
    ids = torch.randint(0, 1024, (rows, ROW_TOKENS))

    def step() -> None:
        model.zero_grad()
        model.model(input_ids=ids).last_hidden_state.float().pow(2).mean().backward()

    def with_ours() -> None:
        if quick_attention.quicken_attention(model) is None:
            raise SystemExit("this CPU has no matrix units: nothing would be changed")
        step()
        quick_attention._changed.clear()

    return _in_turns((step, with_ours), rounds)


def _backward(torch: Any, shape: tuple[int, ...], rounds: int) -> tuple[float, float]:
    """Of one layer's attention alone."""
    from coremill.model.quick_attention import attention_backward

    gradient, query, key, value = _inputs(torch, shape)
    scale = query.shape[-1] ** -0.5
    leaves = [each.clone().requires_grad_() for each in (query, key, value)]
    grouped = query.shape[1] != key.shape[1]
    result = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=grouped)
    return _in_turns(
        (
            lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True),
            lambda: attention_backward(gradient, query, key, value, scale),
        ),
        4 * rounds,
    )


def _errors(torch: Any, steepness: float, shift: float) -> tuple[str, str]:
    from coremill.model.quick_attention import attention_backward

    gradient, query, key, value = _inputs(torch, SHAPES["350M"])
    query = query * steepness
    key[..., 5] += shift
    scale = query.shape[-1] ** -0.5

    def by_torch(dtype: Any) -> Any:
        leaves = [each.to(dtype).requires_grad_() for each in (query, key, value)]
        result = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        return torch.autograd.grad(result, leaves, gradient.to(dtype))

    exact = by_torch(torch.float64)

    def error(found: Any) -> str:
        pairs = zip(found, exact, strict=True)
        return ", ".join(f"{((one.double() - right).norm() / right.norm()).item():.4f}" for one, right in pairs)

    return error(by_torch(torch.bfloat16)), error(attention_backward(gradient, query, key, value, scale))


def _inputs(torch: Any, shape: tuple[int, ...]) -> list[Any]:
    """A gradient, a query, a key and a value."""
    torch.manual_seed(0)
    hidden, _, heads, key_heads, _, rows = shape
    counts = (heads, heads, key_heads, key_heads)
    return [torch.randn(rows, count, ROW_TOKENS, hidden // heads).bfloat16() for count in counts]


def _in_turns(works: Sequence[Callable[[], Any]], rounds: int) -> tuple[float, float]:
    """Median seconds of each; the first turn is not counted."""
    seconds: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 1):
        for work, taken in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work()
            if turn:
                taken.append(time.perf_counter() - began)
    first, second = map(statistics.median, seconds)
    return first, second


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, help="of torch (default: as many as it takes)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (default 10)")
    parser.add_argument("--errors", action="store_true", help="print errors alone; any CPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
