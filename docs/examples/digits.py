"""Train a classifier of handwritten digits on several ranks, each holding a part of the samples.

Run it with any number of ranks, on GPUs or on none:

    ncclcomm run -n 4 docs/examples/digits.py
    mpirun -n 4 python docs/examples/digits.py

The root loads the 1,797 images that scikit-learn ships and scatters them, unevenly, over the ranks. Each step, every
rank computes the gradient over its own samples, reduce_add sums the gradients on the root, and the root broadcasts the
new weights. The sum does not depend on the split, so any number of ranks gives the same loss, up to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import ncclcomm

FEATURES, CLASSES = 64, 10
TEST_SAMPLES = 360
LEARNING_RATE = 0.5
DECAY = 1e-4


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits on several ranks.")
    parser.add_argument("--steps", type=int, default=300, help="gradient steps (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="of samples and weights")
    parser.add_argument("--output", type=Path, default=Path("digits.png"), help="picture (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the final loss, accuracy and where it ran")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least one step is needed")
    return args


def load_digits(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training and test samples, shape (n, 65) with a last feature of 1 for the bias, and their labels, shape (n,)."""
    from sklearn.datasets import load_digits as load

    pixels, labels = load(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    samples = np.hstack([pixels / 16.0, np.ones((len(labels), 1))]).astype(dtype)[order]
    labels = labels.astype(np.int64)[order]
    return samples[TEST_SAMPLES:], labels[TEST_SAMPLES:], samples[:TEST_SAMPLES], labels[:TEST_SAMPLES]


def uneven_sizes(count: int, ranks: int) -> list[int]:
    """Split count samples so that each rank gets more than the one before: rank r about r + 2 shares."""
    shares = np.arange(2, ranks + 2)
    edges = np.rint(np.cumsum(shares) * count / shares.sum()).astype(int)
    return np.diff(edges, prepend=0).tolist()


def loss_and_gradient(weights: Any, samples: Any, labels: Any) -> tuple[Any, Any]:
    """Summed cross-entropy, shape (1,), and its gradient, the shape of weights, over one rank's samples."""
    xp = ncclcomm.xp
    scores = samples @ weights
    scores = scores - scores.max(axis=1, keepdims=True)
    log_likelihood = scores - xp.log(xp.exp(scores).sum(axis=1, keepdims=True))
    wanted = (labels[:, None] == xp.arange(CLASSES)[None, :]).astype(weights.dtype)
    loss = -(log_likelihood * wanted).sum().reshape(1)
    return loss, samples.T @ (xp.exp(log_likelihood) - wanted)


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as 1 node or 2 nodes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def progress(steps: int, show: bool) -> Iterable[int]:
    """The step numbers, with a bar where a person watches."""
    if not show:
        return range(steps)
    from tqdm import tqdm

    return tqdm(range(steps), desc="training", unit="step")


def train(comm: Any, args: argparse.Namespace, samples: Any, labels: Any) -> tuple[Any, list[float]]:
    """Descend from zero weights; the final weights on every rank, and on the root the mean loss before each step."""
    xp = ncclcomm.xp
    is_root = comm.rank == 0
    count = int(comm.all_reduce(np.array([len(samples)]))[0])
    weights = comm.broadcast(xp.zeros((FEATURES + 1, CLASSES), dtype=args.dtype) if is_root else None)
    # `ncclcomm run` says whether a person watches: to a rank the launcher is a pipe.
    watched = is_root and (sys.stderr.isatty() or os.environ.get("NCCLCOMM_WATCHED") == "1")
    losses: list[float] = []
    for step in progress(args.steps, watched):
        loss, gradient = loss_and_gradient(weights, samples, labels)
        loss_sum = comm.reduce_add(loss)
        gradient_sum = comm.reduce_add(gradient)
        if is_root:
            losses.append(float(ncclcomm.to_numpy(loss_sum)[0]) / count)
            weights = weights - LEARNING_RATE * (gradient_sum / count + DECAY * weights)
            if not watched and step % max(1, args.steps // 5) == 0:
                print(f"step {step:4d}  loss {losses[-1]:.6f}", flush=True)
        weights = comm.broadcast(weights if is_root else None)
    loss_sum = comm.reduce_add(loss_and_gradient(weights, samples, labels)[0])
    if is_root:
        losses.append(float(ncclcomm.to_numpy(loss_sum)[0]) / count)
    return weights, losses


def save_picture(path: Path, losses: list[float], labels: np.ndarray, predicted: np.ndarray, title: str) -> None:
    """Draw the loss curve and the confusion matrix of the test samples."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    confusion = np.zeros((CLASSES, CLASSES), dtype=int)
    np.add.at(confusion, (labels, predicted), 1)
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    curve, matrix = figure.subplots(1, 2)
    curve.plot(losses)
    curve.set(xlabel="step", ylabel="mean cross-entropy", title="training samples", ylim=(0, None))
    curve.grid(alpha=0.3)
    matrix.imshow(confusion, cmap="Blues")
    for (row, column), number in np.ndenumerate(confusion):
        if number:
            colour = "white" if number > confusion.max() / 2 else "black"
            matrix.text(column, row, str(number), ha="center", va="center", color=colour)
    digits = range(CLASSES)
    matrix.set(xlabel="predicted digit", ylabel="true digit", title="test samples", xticks=digits, yticks=digits)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train, test, and on the root tell how it went."""
    args = parse_args()
    with ncclcomm.init() as comm:
        start = time.perf_counter()
        train_x = train_y = test_x = test_y = labels = train_sizes = test_sizes = None
        if comm.rank == 0:
            *arrays, labels = load_digits(args.dtype)
            train_x, train_y, test_x, test_y = (ncclcomm.asarray(a, device=comm.device) for a in (*arrays, labels))
            train_sizes, test_sizes = uneven_sizes(len(train_x), comm.size), uneven_sizes(len(test_x), comm.size)
        samples = comm.scatter(train_x, chunk_sizes=train_sizes)
        targets = comm.scatter(train_y, chunk_sizes=train_sizes)
        held_out = comm.scatter(test_x, chunk_sizes=test_sizes)

        weights, losses = train(comm, args, samples, targets)
        predicted = comm.gather((held_out @ weights).argmax(axis=1))
        if comm.rank != 0:
            return
        seconds = time.perf_counter() - start
        predicted = ncclcomm.to_numpy(predicted)
        result = {
            "loss": losses[-1],
            "accuracy": float((predicted == labels).mean()),
            "seconds": seconds,
            "dtype": args.dtype,
            "steps": args.steps,
            "backend": comm.backend,
            "ranks": comm.size,
            "nodes": comm.num_nodes,
            "samples_per_rank": train_sizes,
            "transports": comm.explain("all_reduce", weights.nbytes),
        }
        where = f"{counted(comm.size, 'rank')} on {counted(comm.num_nodes, 'node')}, {comm.backend} backend"
        title = f"Digits: accuracy {result['accuracy']:.4f}, loss {result['loss']:.6f} ({where})"
        save_picture(args.output, losses, labels, predicted, title)
        if args.json:
            args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"test accuracy {result['accuracy']:.4f}")
        print(f"final loss    {result['loss']:.12f}")
        print(f"seconds       {seconds:.2f}")
        print(f"ran on        {where}; samples per rank {train_sizes}")
        print(f"all_reduce    {result['transports']}")
        print(f"picture       {args.output}")


if __name__ == "__main__":
    main()
