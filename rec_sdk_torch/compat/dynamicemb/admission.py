"""Admission strategies and counters of dynamicemb, which are translated to a table's rules."""

from __future__ import annotations

import abc
from typing import Any

import torch

from .enums import DynamicEmbInitializerArgs


class Counter(abc.ABC):
    """Interface of users' counters for dynamicemb; tables here count in the engine, see `KVCounter`."""

    @abc.abstractmethod
    def add(self, keys: torch.Tensor, frequencies: torch.Tensor, inplace: bool) -> torch.Tensor:
        """Adds frequencies to the counts of keys; returns the new counts."""

    @abc.abstractmethod
    def erase(self, keys: torch.Tensor) -> None:
        """Removes the counts of keys."""

    @abc.abstractmethod
    def memory_usage(self, mem_type: Any = None) -> int:
        """Returns the memory in bytes."""

    @abc.abstractmethod
    def load(self, key_file: str, counter_file: str) -> None:
        """Reads keys and counts from files."""

    @abc.abstractmethod
    def dump(self, key_file: str, counter_file: str) -> None:
        """Writes keys and counts to files."""


class KVCounter:
    """Option that makes a table count ids that are not admitted yet, in the engine."""

    def __init__(self, capacity: int, bucket_capacity: int = 1024, key_type: torch.dtype = torch.int64) -> None:
        """Stores dynamicemb's arguments; here at most as many ids are counted as the table may have rows."""
        self.capacity = capacity
        self.bucket_capacity = bucket_capacity
        self.key_type = key_type


class AdmissionStrategy(abc.ABC):
    """Interface of users' admission strategies for dynamicemb."""

    @abc.abstractmethod
    def admit(self, keys: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        """Returns which keys get a row, bool `[n]`."""

    @abc.abstractmethod
    def get_initializer_args(self) -> DynamicEmbInitializerArgs | None:
        """Returns the values that keys without a row are read as."""


class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Strategy that admits ids after `threshold` lookups; other ids are read as `initializer_args` describes.

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
