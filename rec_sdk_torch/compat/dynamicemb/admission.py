"""Admission: strategies and counters, which a table's rules follow."""

from __future__ import annotations

import abc
from typing import Any

import torch

from .enums import DynamicEmbInitializerArgs


class Counter(abc.ABC):
    """The interface of counters that users write for dynamicemb; tables here count in the engine, see `KVCounter`."""

    @abc.abstractmethod
    def add(self, keys: torch.Tensor, frequencies: torch.Tensor, inplace: bool) -> torch.Tensor:
        """Adds to what is counted of keys; the sums."""

    @abc.abstractmethod
    def erase(self, keys: torch.Tensor) -> None:
        """Forgets keys."""

    @abc.abstractmethod
    def memory_usage(self, mem_type: Any = None) -> int:
        """Bytes."""

    @abc.abstractmethod
    def load(self, key_file: str, counter_file: str) -> None:
        """Reads files."""

    @abc.abstractmethod
    def dump(self, key_file: str, counter_file: str) -> None:
        """Writes files."""


class KVCounter:
    """Says that a table counts the ids that it has not admitted. The engine counts them, within the table's bound."""

    def __init__(self, capacity: int, bucket_capacity: int = 1024, key_type: torch.dtype = torch.int64) -> None:
        """The arguments are dynamicemb's; as many candidates are kept here as the table may have rows."""
        self.capacity = capacity
        self.bucket_capacity = bucket_capacity
        self.key_type = key_type


class AdmissionStrategy(abc.ABC):
    """The interface of strategies that users write for dynamicemb."""

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Which keys get a row, bool `[n]`."""

    @abc.abstractmethod
    def get_initializer_args(self) -> DynamicEmbInitializerArgs | None:
        """The values that the others are read as."""


class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Admits ids that were looked up `threshold` times; the others are read as `initializer_args` says.

    Raises:
        ValueError: a negative threshold.
    """

    def __init__(self, threshold: int, initializer_args: DynamicEmbInitializerArgs | None = None) -> None:
        if threshold < 0:
            raise ValueError(f"threshold is {threshold}, must be 0 or more")
        self.threshold = threshold
        self.initializer_args = initializer_args

    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Which frequencies reach the threshold, bool `[n]`."""
        return frequencies >= self.threshold

    def get_initializer_args(self) -> DynamicEmbInitializerArgs | None:
        return self.initializer_args
