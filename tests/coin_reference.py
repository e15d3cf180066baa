"""Reference in plain Python for admission by probability: the random draw for an id in a batch."""

from __future__ import annotations

from sketch_reference import GOLDEN, WORD, fold

HALF = 2**32


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Returns the four random words of Philox4x32-10 (Salmon et al., 2011)."""
    a, b, c, d = counter
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second // HALF ^ b ^ key[0], second % HALF, first // HALF ^ d ^ key[1], first % HALF
        key = [(key[0] + 0x9E3779B9) % HALF, (key[1] + 0xBB67AE85) % HALF]
    return [a, b, c, d]


class Coin:
    def __init__(self, seed: int, table: str) -> None:
        name = 0xCBF29CE484222325
        for byte in table.encode():
            name = (name ^ byte) * 0x100000001B3 % WORD
        self.key = fold(seed % WORD ^ name, GOLDEN)

    def toss(self, i: int, batch: int, probability: float) -> bool:
        bits = i % WORD
        counter = [bits % HALF, bits // HALF, batch % HALF, batch // HALF]
        drawn = philox(counter, [self.key % HALF, self.key // HALF])
        return bool((drawn[0] * HALF + drawn[1] >> 11) * 2.0**-53 < probability)
