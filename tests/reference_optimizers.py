"""Reference optimizers for the rows that a sparse gradient names: torch's own, and documented formulas for others.

The formulas are in docs/optimizers.md. States are `[n, D]`, or `[n, 1]` if they have one number per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

States = dict[str, Tensor]
Options = dict[str, Any]
COUNTED = ("counter_weight_decay_mode", "weight_decay", "counter_halflife")


class RowOptimizer(torch.optim.Optimizer):
    """An optimizer of one matrix of rows."""

    states: tuple[str, ...] = ()
    rowwise: tuple[str, ...] = ()

    def __init__(self, params: Any, initial_accumulator_value: float = 0.0, **options: Any) -> None:
        super().__init__(params, options)
        (self.weight,) = self.param_groups[0]["params"]
        rows, dim = self.weight.shape
        self.state[self.weight]["step"] = 0
        for name in self.states:
            shape = (rows, 1 if name in self.rowwise else dim)
            start = initial_accumulator_value if name == "sum" else 0.0
            self.state[self.weight][name] = self.weight.new_full(shape, start)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        state = self.state[self.weight]
        state["step"] += 1
        assert self.weight.grad is not None
        grad = self.weight.grad.coalesce()
        rows = grad.indices()[0]
        states = {name: state[name][rows] for name in self.states}
        weight = self.weight[rows]
        self.update(weight, grad.values(), states, state["step"], self.param_groups[0])
        self.weight[rows] = weight
        for name, values in states.items():
            state[name][rows] = values

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        """Updates the rows `w` and their states in place."""
        raise NotImplementedError


def mean_square(g: Tensor) -> Tensor:
    return (g * g).mean(dim=1, keepdim=True)


def norm(rows: Tensor) -> Tensor:
    """Returns the L2 norm of each row, `[n, 1]`; unlike torch's norm, it overflows if a square overflows."""
    return (rows * rows).sum(dim=1, keepdim=True).sqrt()


def ratio(over: Tensor, under: Tensor) -> Tensor:
    """Divides; the result is 0 where the denominator is 0, unless the numerator has overflowed."""
    return torch.where((under == 0) & over.isfinite(), 0, over / under)


class _TorchRowOptimizer(RowOptimizer):
    """A torch optimizer applied to the rows that a gradient names, with the table's step count."""

    cls: type[torch.optim.Optimizer]

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        rows = torch.nn.Parameter(w.clone())
        optimizer = self.cls([rows], **{name: value for name, value in options.items() if name != "params"})
        state, for_all = optimizer.state[rows], self.state[self.weight].setdefault("for_all", {})
        if t > 1 or state:  # at the first update, the class creates its state itself
            state.update(for_all | states, step=torch.tensor(t - 1, dtype=torch.float64))
        rows.grad = of_all_rows(g) if self.cls is torch.optim.SparseAdam else g
        optimizer.step()
        w.copy_(rows.detach())
        for_all.update((name, value) for name, value in state.items() if name not in states)
        for name, values in states.items():
            values.copy_(state[name])


def on_rows_by(torchs: type[torch.optim.Optimizer], states: tuple[str, ...]) -> type[RowOptimizer]:
    """Returns a class that applies a torch optimizer, with these state names, to the rows that a gradient names."""
    return type(f"{torchs.__name__}OnRows", (_TorchRowOptimizer,), {"cls": torchs, "states": states})


def of_all_rows(g: Tensor) -> Tensor:
    """Converts a dense gradient to a sparse gradient of all rows."""
    return torch.sparse_coo_tensor(torch.arange(len(g))[None], g, check_invariants=True)


class Adam(RowOptimizer):
    """The formula of torch.optim.Adam."""

    states = ("exp_avg", "exp_avg_sq")

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        w -= options["lr"] * self.direction(g, states, t, options)

    def direction(self, g: Tensor, states: States, t: int, options: Options) -> Tensor:
        (m, v), (b1, b2) = states.values(), options["betas"]
        m.mul_(b1).add_(g, alpha=1 - b1)
        if "exp_avg_sq" in self.rowwise:
            v.mul_(b2).add_(mean_square(g), alpha=1 - b2)
        else:
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
        return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + options["eps"])


class SparseAdam(Adam):
    """The formula of torch.optim.SparseAdam, with the moments computed as in Adam: torch's SparseAdam loses digits if
    betas are small.
    """

    def direction(self, g: Tensor, states: States, t: int, options: Options) -> Tensor:
        b2, eps = options["betas"][1], options["eps"]
        return super().direction(g, states, t, {**options, "eps": eps / (1 - b2**t) ** 0.5})


class CenteredRmsProp(RowOptimizer):
    """The centered formula of torch.optim.RMSprop, computed so that rounding cannot make the variance negative."""

    states = ("square_avg", "momentum_buffer", "grad_avg")

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        (squares, buffer, average), alpha = states.values(), options["alpha"]
        g = (-g if options["maximize"] else g) + options["weight_decay"] * w
        variance = alpha * ((squares - average * average).clamp(min=0) + (1 - alpha) * (g - average) ** 2)
        squares.mul_(alpha).add_((1 - alpha) * g * g)
        average.mul_(alpha).add_((1 - alpha) * g)
        w -= options["lr"] * buffer.mul_(options.get("momentum", 0.0)).add_(g / (variance.sqrt() + options["eps"]))


class Lamb(Adam):
    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        step = self.direction(g, states, t, options) + options["weight_decay"] * w
        w -= options["lr"] * ratio(norm(w), norm(step)) * step


class PartialRowWiseLamb(Lamb):
    rowwise = ("exp_avg_sq",)


class PartialRowWiseAdam(Adam):
    rowwise = ("exp_avg_sq",)

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        w -= options["lr"] * (self.direction(g, states, t, options) + options["weight_decay"] * w)


class LarsSgd(RowOptimizer):
    states = ("momentum",)

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        decay, length = options["weight_decay"], norm(w)
        rate = options["lr"] * options["eta"] * ratio(length, norm(g) + decay * length)
        w -= states["momentum"].mul_(options["momentum"]).add_(rate * (g + decay * w))


class RowWiseAdagrad(RowOptimizer):
    """Rowwise Adagrad with one accumulator per row: sum += mean(g * g).

    With L2 decay, the decay term is added to the gradient before it is squared. Decoupled decay is applied with the
    learning rate.
    """

    states = ("sum",)
    rowwise = ("sum",)

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        decay = options.get("weight_decay", 0.0)
        l2 = options.get("weight_decay_mode", "l2") == "l2"
        lr = options["lr"] / (1 + (t - 1) * options.get("lr_decay", 0.0))
        if l2 and decay:
            g = g + decay * w
        states["sum"] += mean_square(g)
        step = lr * g / (states["sum"].sqrt() + options["eps"])
        w -= step if l2 else step + lr * decay * w


class BoundedRowWiseAdagrad(RowWiseAdagrad):
    """RowWiseAdagrad that, after the update, scales rows longer than max_norm down to this norm."""

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        super().update(w, g, states, t, options)
        bound = options.get("max_norm") or torch.inf
        w *= ratio(torch.full_like(norm(w), bound), norm(w)).where(norm(w) > bound, 1)


class EnsembleRowWiseAdagrad(BoundedRowWiseAdagrad):
    """RowWiseAdagrad with a moving average of each weight; `between` swaps averages and weights between updates."""

    states = ("sparse_ema", "sum")

    @torch.no_grad()
    def between(self, rows: Tensor) -> None:
        """Updates the moving averages of all `rows` of the table, between two updates."""
        options, state = self.param_groups[0], self.state[self.weight]
        t = state["step"] + 1
        weight, average = self.weight[rows], state["sparse_ema"][rows]
        if t % options["step_ema"] == 0:
            share = 1.0 if t <= options.get("step_start", 0) else 1.0 - options["step_ema_coef"]
            average = average + share * (weight - average)
        if t % options["step_swap"] == 0:
            weight = average
        if t % options["step_ema"] == 0 and options.get("step_mode") == "none":
            average = torch.zeros_like(average)
        self.weight[rows], state["sparse_ema"][rows] = weight, average


def missed_updates(states: dict[str, Tensor], t: int) -> Tensor:
    """Returns the number of table updates between a row's previous update and this one; 0 before its first."""
    last = states["prev_iter"]
    missed = torch.where(last == 0, 0.0, t - last - 1)
    last.fill_(t)
    return missed


class GloballyDecayedRowWiseAdagrad(RowWiseAdagrad):
    """RowWiseAdagrad whose weights shrink by 1 - lr * decay in each update, including those that the row missed."""

    states = ("sum", "prev_iter")
    rowwise = ("sum", "prev_iter")

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        lr = options["lr"] / (1 + (t - 1) * options.get("lr_decay", 0.0))
        missed = missed_updates(states, t)
        if t >= options.get("gwd_start_iter", 0):
            w *= ((1 - lr * options["weight_decay"]) ** missed).clamp(min=options.get("gwd_lower_bound", 0.0))
        super().update(w, g, states, t, {**options, "weight_decay_mode": "decouple"})


def count_update(count: Tensor, steps: Tensor, halflife: int) -> None:
    """Decays a count over `steps` updates and adds one. A negative half-life means no decay; 0 means decay to 0."""
    count.mul_(0.5 ** (steps / halflife) if halflife > 0 else float(halflife < 0)).add_(1)


class CountedRowWiseAdagrad(RowOptimizer):
    """RowWiseAdagrad whose learning rate and decay for a row depend on how often the row was updated."""

    states = ("sum", "prev_iter", "row_counter")
    rowwise = states

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        mode, decay, halflife = map(options.get, COUNTED)
        bound, begin = options["adjustment_ub"], options["adjustment_iter"]
        total, count = states["sum"], states["row_counter"]
        lr = options["lr"]
        total += mean_square(g + decay * w if mode == "l2" else g)
        steps = missed_updates(states, t) + 1
        count_update(count, steps, halflife)
        plain = lr / (total.sqrt() + options["eps"])
        if t <= begin:
            w -= plain * g
        elif mode == "adagradw":
            grown = {-1: lr * count.sqrt(), -2: (lr * count).clamp(max=bound)}.get(halflife, lr)
            missed = (1 - lr * decay) ** (steps.clamp(max=t - begin) - 1)
            w.mul_(missed * (1 - lr * decay)).sub_(missed * grown / (total.sqrt() + options["eps"]) * g)
        else:
            ratio = options["max_counter"] / (count + 1)
            rates = {
                "equal": plain,
                "tail_id_lr_increase": plain * (ratio**bound).clamp(1, 10),
                "tail_id_lr_decrease": plain * ((1 / ratio) ** bound).clamp(0.1, 1),
                "counter_sgd": lr / ((bound * count).sqrt() + options["eps"]),
            }
            tail = options["tail_id_threshold_val"]
            rate = torch.where(count > tail, rates[options["learning_rate_mode"]], plain)
            decayed = {"l2": plain, "decouple": lr}.get(mode, 0.0) * decay * halflife / count
            w.mul_(1 - decayed).sub_(rate * g)


class CowClipRowWiseAdagrad(RowOptimizer):
    """RowWiseAdagrad that clips each row's gradient to the row's count times a fraction of the norm of its weight."""

    states = ("sum", "prev_iter", "row_counter")
    rowwise = states

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        mode, decay, halflife = map(options.get, COUNTED)
        lr = options["lr"] / (1 + (t - 1) * options.get("lr_decay", 0.0))
        if mode == "l2":
            g = g + decay * w
        states["sum"] += mean_square(g)
        steps, count = missed_updates(states, t) + 1, states["row_counter"]
        count_update(count, steps, halflife)
        bound = count * (options["weight_norm_coefficient"] * norm(w)).clamp(min=options["lower_bound"])
        clip = ratio(bound, norm(g)).fmin(torch.ones_like(bound))  # a NaN becomes 1, as in FBGEMM
        step = lr * clip * g / (states["sum"].sqrt() + options["eps"])
        w -= step + lr * decay * w if mode == "decouple" else step
