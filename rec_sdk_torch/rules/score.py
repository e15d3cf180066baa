from dataclasses import dataclass, field

from ..runtime.numbers import float_field, int_field
from .rule import Rule


@dataclass(frozen=True)
class Score(Rule):
    """Gives each row a score, of which `Share` and bounds evict the lowest.

    A batch with the id sets it to `(old + score) * decay`, where `score = alpha * shows + beta * clicks` of the id's
    whole life in the table. With a half-life it adds that batch's `alpha * shows + beta * clicks` to what is left.

    Attributes:
        alpha: factor of the shows, which are lookups.
        beta: factor of the clicks.
        decay: 0 to 1.
        half_life: batches of the table after which half of a score is left; 0: scores decay by `decay` alone.
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
