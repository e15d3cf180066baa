"""Admission strategies and counters of dynamicemb, which are translated to a table's rules."""

from __future__ import annotations

import abc
from typing import Any

import torch

from .enums import DynamicEmbInitializerArgs


class Counter(abc.ABC):
    """Interface of counters that users write for dynamicemb. Tables accept only `KVCounter`, counted by the engine."""

    @abc.abstractmethod
    def add(self, keys: torch.Tensor, frequencies: torch.Tensor, inplace: bool) -> torch.Tensor:
        """Adds frequencies to the counts of keys; returns the new counts."""

    @abc.abstractmethod
    def erase(self, keys: torch.Tensor) -> None:
        """Removes the counts of keys."""

    @abc.abstractmethod
    def memory_usage(self, mem_type: Any = None) -> int:
        """Returns the memory that the counter uses, in bytes."""

    @abc.abstractmethod
    def load(self, key_file: str, counter_file: str) -> None:
        """Reads keys and counts from files."""

    @abc.abstractmethod
    def dump(self, key_file: str, counter_file: str) -> None:
        """Writes keys and counts to files."""


class KVCounter:
    """Option of a table: the engine counts lookups of ids that are not admitted yet."""

    def __init__(self, capacity: int, bucket_capacity: int = 1024, key_type: torch.dtype = torch.int64) -> None:
        """Stores dynamicemb's arguments, without effect: a table counts at most as many ids as it may have rows."""
        self.capacity = capacity
        self.bucket_capacity = bucket_capacity
        self.key_type = key_type


class AdmissionStrategy(abc.ABC):
    """Interface of admission strategies that users write for dynamicemb."""

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Returns which keys get a row, bool `[n]`."""

    @abc.abstractmethod
    def get_initializer_args(self) -> DynamicEmbInitializerArgs | None:
        """Returns the weights that a lookup returns for keys without a row."""


class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Strategy that admits an id after `threshold` lookups; until then, `initializer_args` defines its weights.

    Raises:
        ValueError: `threshold` is negative.
    """

    def __init__(self, threshold: int, initializer_args: DynamicEmbInitializerArgs | None = None) -> None:
        if threshold < 0:
            raise ValueError(f"threshold is {threshold}, must be 0 or more")
        self.threshold = threshold
        self.initializer_args = initializer_args

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Returns which frequencies reach the threshold, bool `[n]`."""
        return frequencies >= self.threshold

    def get_initializer_args(self) -> DynamicEmbInitializerArgs | None:
        return self.initializer_args
