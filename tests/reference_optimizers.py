"""Optimizers on the rows that a sparse gradient names: torch's own, and the documented formulas of those it lacks.

The formulas are in the optimizers page of the docs. States are `[n, D]`, or `[n, 1]` where there is one number a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

States = dict[str, Tensor]
Options = dict[str, Any]
COUNTED = ("counter_weight_decay_mode", "weight_decay", "counter_halflife")


class OnRows(torch.optim.Optimizer):
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
        """Changes the rows `w` and their states in place."""
        raise NotImplementedError


def mean_square(g: Tensor) -> Tensor:
    return (g * g).mean(dim=1, keepdim=True)


def norm(rows: Tensor) -> Tensor:
    """Not torch's, whose squares do not overflow."""
    return (rows * rows).sum(dim=1, keepdim=True).sqrt()


def ratio(over: Tensor, under: Tensor) -> Tensor:
    """0 where nothing is under, unless what is over has overflowed."""
    return torch.where((under == 0) & over.isfinite(), 0, over / under)


class _ByTorch(OnRows):
    """A class of torch's on a matrix of the rows that were named; it counts the updates of all rows."""

    cls: type[torch.optim.Optimizer]

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        rows = torch.nn.Parameter(w.clone())
        optimizer = self.cls([rows], **{name: value for name, value in options.items() if name != "params"})
        state, for_all = optimizer.state[rows], self.state[self.weight].setdefault("for_all", {})
        if t > 1 or state:  # else the class makes it in its first step
            state.update(for_all | states, step=torch.tensor(t - 1, dtype=torch.float64))
        rows.grad = of_all_rows(g) if self.cls is torch.optim.SparseAdam else g
        optimizer.step()
        w.copy_(rows.detach())
        for_all.update((name, value) for name, value in state.items() if name not in states)
        for name, values in states.items():
            values.copy_(state[name])


def on_rows_by(torchs: type[torch.optim.Optimizer], states: tuple[str, ...]) -> type[OnRows]:
    """A class of torch's, with the names of its states, on the rows that a gradient names."""
    return type(f"{torchs.__name__}OnRows", (_ByTorch,), {"cls": torchs, "states": states})


def of_all_rows(g: Tensor) -> Tensor:
    """A dense gradient as a sparse one."""
    return torch.sparse_coo_tensor(torch.arange(len(g))[None], g, check_invariants=True)


class Adam(OnRows):
    """torch.optim.Adam's formula."""

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
    """torch.optim.SparseAdam's formula, with moments as Adam's: torch's own lose digits where betas are small."""

    def direction(self, g: Tensor, states: States, t: int, options: Options) -> Tensor:
        b2, eps = options["betas"][1], options["eps"]
        return super().direction(g, states, t, {**options, "eps": eps / (1 - b2**t) ** 0.5})


class CenteredRmsProp(OnRows):
    """torch.optim.RMSprop's centered formula, with a variance that rounding does not make negative."""

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


class LarsSgd(OnRows):
    states = ("momentum",)

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        decay, length = options["weight_decay"], norm(w)
        rate = options["lr"] * options["eta"] * ratio(length, norm(g) + decay * length)
        w -= states["momentum"].mul_(options["momentum"]).add_(rate * (g + decay * w))


class RowWiseAdagrad(OnRows):
    """One accumulator per row: sum += mean(g * g). With L2 decay the gradient has it, decoupled the rate has."""

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
    """RowWiseAdagrad, after which rows longer than max_norm are cut to it."""

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        super().update(w, g, states, t, options)
        bound = options.get("max_norm") or torch.inf
        w *= ratio(torch.full_like(norm(w), bound), norm(w)).where(norm(w) > bound, 1)


class EnsembleRowWiseAdagrad(BoundedRowWiseAdagrad):
    """With an average of each weight, which whole tables move to and fro between updates."""

    states = ("sparse_ema", "sum")

    @torch.no_grad()
    def between(self, rows: Tensor) -> None:
        """Changes `rows`, all that the table has, before the next update."""
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
    """Updates of the table between a row's last one and this one; none before its first."""
    last = states["prev_iter"]
    missed = torch.where(last == 0, 0.0, t - last - 1)
    last.fill_(t)
    return missed


class GloballyDecayedRowWiseAdagrad(RowWiseAdagrad):
    """The weight shrinks by 1 - lr * decay in each update, also in those that the row missed."""

    states = ("sum", "prev_iter")
    rowwise = ("sum", "prev_iter")

    def update(self, w: Tensor, g: Tensor, states: States, t: int, options: Options) -> None:
        lr = options["lr"] / (1 + (t - 1) * options.get("lr_decay", 0.0))
        missed = missed_updates(states, t)
        if t >= options.get("gwd_start_iter", 0):
            w *= ((1 - lr * options["weight_decay"]) ** missed).clamp(min=options.get("gwd_lower_bound", 0.0))
        super().update(w, g, states, t, {**options, "weight_decay_mode": "decouple"})


def count_update(count: Tensor, steps: Tensor, halflife: int) -> None:
    """One more, after the count has faded for `steps` updates: not with a half-life below 0, to nothing with 0."""
    count.mul_(0.5 ** (steps / halflife) if halflife > 0 else float(halflife < 0)).add_(1)


class CountedRowWiseAdagrad(OnRows):
    """The rate of a row depends on how often it was updated, and so does its decay."""

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


class CowClipRowWiseAdagrad(OnRows):
    """The gradient is no longer than the row's count times a share of the weight's length."""

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
        clip = ratio(bound, norm(g)).fmin(torch.ones_like(bound))  # 1 of a NaN, as FBGEMM's
        step = lr * clip * g / (states["sum"].sqrt() + options["eps"])
        w -= step + lr * decay * w if mode == "decouple" else step
