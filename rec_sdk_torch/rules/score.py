from dataclasses import dataclass, field

from ..runtime.numbers import float_field, int_field
from .rule import Rule


@dataclass(frozen=True)
class Score(Rule):
    """The rule that gives each row a score; `Share` and bounds evict the rows with the lowest scores.

    Each batch that contains the id sets the score to `(old + alpha * shows + beta * clicks) * decay`, with all shows
    and clicks of the id so far; the first score is not decayed. With a half-life, the old score decays with the number
    of batches since the last one that contained the id, and only the shows and clicks of the present batch are added.

    Attributes:
        alpha: factor of the shows, which are lookups.
        beta: factor of the clicks.
        decay: factor from 0 to 1; must be 1 with a half-life.
        half_life: training batches of the table in which a score halves; 0: only `decay` applies.
    """

    alpha: float = field(default=1.0, metadata=float_field())
    beta: float = field(default=0.0, metadata=float_field())
    decay: float = field(default=1.0, metadata=float_field(0, 1))
    half_life: int = field(default=0, metadata=int_field(0))

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        if self.half_life and self.decay != 1:
            raise ValueError(f"Score: half_life is {self.half_life} beside decay {self.decay}, a score has one of them")

    def columns(self) -> tuple[str, ...]:
        return "count", "score", *(["clicks"] if self.beta else []), *(["last_use"] if self.half_life else [])

    def needs_clicks(self) -> bool:
        return self.beta != 0
