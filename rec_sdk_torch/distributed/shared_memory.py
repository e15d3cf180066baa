"""Exchanges through shared memory, between ranks of one machine that are connected by sockets.

A sender copies its data into a segment of shared memory that all ranks map, and sends each receiver the position in a
small message over a socket. So no thread is needed, and data is copied once by the sender and once by the receiver.
Segments are files without names (memfd), whose descriptors are sent over the sockets: nothing has to be removed when a
rank ends or is killed, and its end closes its sockets, which the other ranks notice at once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ..runtime.forks import notify_of_forks
from ..runtime.host_groups import exchanging, timeout_of
from ..runtime.settings import read_settings

Bytes: TypeAlias = npt.NDArray[np.uint8]
Array: TypeAlias = npt.NDArray[Any]

INLINE = 2048
"""Maximum number of bytes that are sent in the message itself; more go through a segment."""
ALIGNMENT = 64
SMALLEST_SEGMENT = 1 << 16
HEADER = struct.Struct("<7q")
"""Kind and number of the exchange, bytes of data, segment or -1, its size, position, count of released segments."""
MOST_RELEASED = 64
"""Maximum number of released segments that a message lists."""
LARGEST_MESSAGE = HEADER.size + 8 * MOST_RELEASED + INLINE
HELLO = struct.Struct("<16sq")
"""First message of a connection: the secret of the listening rank, and the rank of the sender."""
_DESCRIPTOR = struct.Struct("i")


class Message(NamedTuple):
    """A received message: the kind of its exchange, its data, and the segment that holds the data, -1 for none."""

    kind: int
    data: Bytes
    segment: int


class Segment:
    """A segment of shared memory of this rank.

    Attributes:
        number: the segment's number on this rank.
        descriptor: its file.
        memory: its bytes.
        readers: number of ranks that have not released the segment yet.
        known_sizes: the size that each rank has mapped, by rank.
    """

    def __init__(self, number: int) -> None:
        self.number, self.readers = number, 0
        self.descriptor = os.memfd_create("rec_sdk_torch", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.memory: Bytes = np.empty(0, np.uint8)
        self.known_sizes: dict[int, int] = {}

    def reserve(self, size: int) -> None:
        """Enlarges the segment to at least `size` bytes; its contents are lost."""
        if size > len(self.memory):
            size = max(SMALLEST_SEGMENT, 1 << (size - 1).bit_length())
            os.ftruncate(self.descriptor, size)
            self.memory = _mapped(self.descriptor, size)


def _mapped(descriptor: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


class Peer:
    """The connection to another rank.

    Attributes:
        rank: the other rank.
        socket: the connection; messages are received whole and in order.
        segments: the mapped segments of the other rank, by number.
        released: segments of the other rank whose data was read since the last message to it.
        messages: received messages of exchanges that have not been waited for, by number of the exchange.
        abandoned: numbers of the exchanges whose messages will not be read.
    """

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.socket = rank, connection
        self.segments: dict[int, Bytes] = {}
        self.released: list[int] = []
        self.messages: dict[int, Message] = {}
        self.abandoned: set[int] = set()

    def release(self, segment: int) -> None:
        """Lets the other rank use its segment again, from the next message to it on."""
        if segment >= 0:
            self.released.append(segment)


class Channel:
    """The connections of this rank to all other ranks of a process group.

    All ranks must start their exchanges in the same order. If an exchange fails, all connections are closed, so that
    the other ranks fail too, and every later exchange raises the error.
    """

    def __init__(self, rank: int, peers: Sequence[Peer]) -> None:
        """Creates the channel of a rank with `peers`, in ascending order of ranks."""
        self.rank, self.peers = rank, peers
        self._started = 0
        self._error: Exception | None = None
        self._segments: list[Segment] = []
        notify_of_forks(self)

    def after_fork(self, parent: int) -> None:
        """Closes the connections in a forked process; otherwise other ranks would not notice the end of this rank."""
        self.close(RuntimeError(f"the process was forked from a rank, process {parent}"))

    def close(self, error: Exception) -> None:
        """Closes all connections; every later exchange raises the error."""
        self._error = self._error or error
        for peer in self.peers:
            peer.socket.close()

    def start(
        self,
        kind: int,
        sent: Sequence[Sequence[Array]],
        received: Sequence[Bytes] | None,
        end: Callable[[], object] | None = None,
    ) -> SharedMemoryWork:
        """Starts an exchange with all ranks.

        Args:
            kind: kind of the exchange; the same on all ranks.
            sent: pieces of the data for each rank, equal in type and all dimensions but the first. They may be changed
                after the call.
            received: memory for the data from each rank, valid after `wait`; None: see `SharedMemoryWork.data`.
            end: function that is called at the end of `wait`.
        """
        number, self._started = self._started, self._started + 1
        try:
            if self._error is None:
                self._send(kind, number, sent)
        except OSError as error:
            self.close(error)
        except BaseException:  # some ranks may have the message
            self.close(RuntimeError("an exchange was interrupted"))
            raise
        if received is not None:
            _write(received[self.rank], sent[self.rank])
        return SharedMemoryWork(self, kind, number, received, end)

    def _send(self, kind: int, number: int, sent: Sequence[Sequence[Array]]) -> None:
        counts = []
        for pieces in sent:
            count = 0
            for piece in pieces:
                count += piece.nbytes
            counts.append(count)
        size = sum(counts) - counts[self.rank] + ALIGNMENT * len(counts)
        segment, position = None, 0
        for peer in self.peers:
            if peer.abandoned:
                self._drain(peer)
            pieces, count = sent[peer.rank], counts[peer.rank]
            listed = peer.released[:MOST_RELEASED]
            del peer.released[: len(listed)]  # a finalizer may append meanwhile
            released = struct.pack(f"<{len(listed)}q", *listed)
            if count <= INLINE:
                head = HEADER.pack(kind, number, count, -1, 0, 0, len(listed))
                self._deliver(peer, b"".join([head, released, *map(np.ndarray.tobytes, pieces)]))
                continue
            if segment is None:
                segment = self._free_segment(size)
                size = len(segment.memory)
            _write(segment.memory[position : position + count], pieces)
            head = HEADER.pack(kind, number, count, segment.number, size, position, len(listed))
            segment.readers += 1
            position += (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            if segment.known_sizes.get(peer.rank) == size:
                self._deliver(peer, head + released)
            else:
                segment.known_sizes[peer.rank] = size
                rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(segment.descriptor)
                self._deliver(peer, head + released, [rights])

    def _deliver(self, peer: Peer, message: bytes, rights: Sequence[tuple[int, int, bytes]] = ()) -> None:
        """Sends a message. If the socket is full, first receives what has arrived, since others may wait for that."""
        try:
            peer.socket.sendmsg([message], rights, socket.MSG_DONTWAIT)
        except BlockingIOError:
            for each in self.peers:
                self._drain(each)
            try:
                peer.socket.sendmsg([message], rights)
            except BlockingIOError:
                raise TimeoutError(f"timed out sending to rank {peer.rank}") from None

    def _free_segment(self, size: int) -> Segment:
        """Returns a segment that no rank reads, with at least `size` bytes: the smallest that fits, or the largest."""
        free = sorted((len(each.memory), each.number) for each in self._segments if not each.readers)
        if not free:
            self._segments.append(Segment(len(self._segments)))
            free = [(0, self._segments[-1].number)]
        _, chosen = next((each for each in free if each[0] >= size), free[-1])
        segment = self._segments[chosen]
        segment.reserve(size)
        return segment

    def receive(self, peer: Peer, number: int, block: bool = True) -> bool:
        """Receives messages until the one of an exchange has arrived, or, without `block`, no more have arrived.

        Returns:
            Whether the message of exchange `number` has arrived.

        Raises:
            RuntimeError: the rank has ended, or the timeout has passed.
        """
        try:
            while number not in peer.messages:
                if self._error is not None:
                    raise RuntimeError(str(self._error)) from self._error
                space, flags = socket.CMSG_SPACE(_DESCRIPTOR.size), 0 if block else socket.MSG_DONTWAIT
                try:
                    content, rights, found, _ = peer.socket.recvmsg(LARGEST_MESSAGE, space, flags)
                except ConnectionResetError:  # a rank has ended with unread messages; its own messages come after this
                    content, rights, found, _ = peer.socket.recvmsg(LARGEST_MESSAGE, space, flags)
                if found & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, "too many open files for a segment of shared memory")
                if not content:
                    raise ConnectionError(f"rank {peer.rank} has closed its connection")
                kind, arrived, count, segment, size, position, listed = HEADER.unpack_from(content)
                for released in struct.unpack_from(f"<{listed}q", content, HEADER.size):
                    self._segments[released].readers -= 1
                if rights:
                    (descriptor,) = _DESCRIPTOR.unpack(rights[0][2])
                    peer.segments[segment] = _mapped(descriptor, size)
                    os.close(descriptor)
                if segment >= 0:
                    data = peer.segments[segment][position : position + count]
                else:
                    data = np.frombuffer(content, np.uint8)[HEADER.size + 8 * listed :]
                peer.messages[arrived] = Message(kind, data, segment)
                if arrived in peer.abandoned:
                    peer.abandoned.remove(arrived)
                    del peer.messages[arrived]
                    peer.release(segment)
        except BlockingIOError as error:
            if not block:
                return False
            self.close(TimeoutError(f"timed out waiting for rank {peer.rank}"))
            raise RuntimeError(str(self._error)) from error
        except OSError as error:
            self.close(error)
            raise RuntimeError(str(error)) from error
        return True

    def _drain(self, peer: Peer) -> None:
        """Receives all messages that have arrived; otherwise unread messages would fill the socket."""
        with contextlib.suppress(RuntimeError):  # the wait for an exchange raises it
            self.receive(peer, -1, block=False)

    def abandon(self, number: int) -> None:
        """Declares that the messages of an exchange will not be read, so that their segments are released."""
        for peer in self.peers:
            message = peer.messages.pop(number, None)
            if message is None:
                peer.abandoned.add(number)
            else:
                peer.release(message.segment)


class SharedMemoryWork:
    """A running exchange of a channel; see `Channel.start`.

    Attributes:
        data: if the exchange has no memory for received data: after `wait`, the data of each other rank, uint8, in the
            sender's memory, which is not used again before the tensor is deleted.
    """

    def __init__(
        self,
        channel: Channel,
        kind: int,
        number: int,
        received: Sequence[Bytes] | None,
        end: Callable[[], object] | None,
    ) -> None:
        self._channel, self._kind, self._number, self._received, self._end = channel, kind, number, received, end
        self._done = False
        self.data: dict[int, torch.Tensor] = {}

    def is_completed(self) -> bool:
        """Returns whether all data has arrived, or the exchange has failed."""
        try:
            return self._done or all(self._channel.receive(peer, self._number, False) for peer in self._channel.peers)
        except RuntimeError:
            return True

    def wait(self) -> None:
        """Blocks until the data of all ranks has arrived, and copies it.

        Raises:
            RuntimeError: a rank has ended, did not take part in time, or takes part in another exchange.
        """
        if self._done:
            return
        number, received = self._number, self._received
        for peer in self._channel.peers:
            self._channel.receive(peer, number)
        for peer in self._channel.peers:
            kind, data, segment = peer.messages[number]
            if kind != self._kind or (received is not None and len(data) != len(received[peer.rank])):
                error = RuntimeError(f"rank {peer.rank} has sent {len(data)} bytes of another exchange")
                self._channel.close(error)
                raise error
            del peer.messages[number]
            if received is not None:
                received[peer.rank][:] = data
                peer.release(segment)
            elif segment < 0:
                self.data[peer.rank] = copied = torch.empty(len(data), dtype=torch.uint8, device="cpu")
                copied.numpy()[:] = data
            else:
                self.data[peer.rank] = torch.from_numpy(data)  # the tensor's storage keeps this array alive
                weakref.finalize(data, peer.release, segment).atexit = False
        self._done = True
        if self._end is not None:
            self._end()

    def __del__(self) -> None:
        if not self._done:
            self._channel.abandon(self._number)


def _write(memory: Bytes, pieces: Sequence[Array]) -> None:
    """Writes pieces of data one after the other; they fill the memory."""
    first = pieces[0]
    target = memory.view(first.dtype).reshape(-1, *first.shape[1:])
    if len(pieces) == 1:
        target[:] = first
    else:
        np.concatenate(pieces, out=target)


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel | None] = weakref.WeakKeyDictionary()


def connect(group: dist.ProcessGroup) -> Channel | None:
    """Returns the channel of a process group; None if some ranks cannot reach each other, as on different machines.

    The first call for a group is collective.
    """
    if group not in _channels:
        with exchanging("addresses of shared memory", group):
            _channels[group] = _connected(group)
    return _channels[group]


def _connected(group: dist.ProcessGroup) -> Channel | None:
    rank, world_size, timeout = dist.get_rank(group), dist.get_world_size(group), timeout_of(group)
    listener, own = _listen(world_size)
    offers: list[tuple[str, bytes] | None] = [None] * world_size
    dist.all_gather_object(offers, own, group=group)
    reached = {}
    if None not in offers:
        for other, offer in enumerate(offers[:rank]):
            assert offer is not None
            reached[other] = _dial(offer, rank)
    complete: list[bool] = [False] * world_size
    dist.all_gather_object(complete, None not in offers and None not in reached.values(), group=group)
    if not all(complete):
        return None
    assert listener is not None
    assert own is not None
    listener.settimeout(timeout.total_seconds() if timeout else None)
    while len(reached) < world_size - 1:
        connection, _ = listener.accept()
        connection.settimeout(1)  # the hello of a rank has arrived already
        with contextlib.suppress(OSError):
            secret, other = HELLO.unpack(connection.recv(HELLO.size).ljust(HELLO.size))
            if secret == own[1]:
                reached[other] = connection
    peers = []
    for other, connected in sorted(reached.items()):
        assert connected is not None
        connected.setblocking(True)
        if timeout is not None:
            fraction, seconds = math.modf(timeout.total_seconds())
            limit = struct.pack("ll", int(seconds), int(1e6 * fraction))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        peers.append(Peer(other, connected))
    return Channel(rank, peers)


def _listen(world_size: int) -> tuple[socket.socket | None, tuple[str, bytes] | None]:
    """Returns a listening socket, and its address with the secret of its connections; None where that is impossible."""
    if not read_settings().embcache_shared_memory or not hasattr(os, "memfd_create"):
        return None, None
    address = f"\0rec_sdk_torch-{secrets.token_hex(16)}"  # abstract: no file that would have to be removed
    try:
        os.close(os.memfd_create("rec_sdk_torch", os.MFD_CLOEXEC))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(world_size)
    except OSError:
        return None, None
    return listener, (address, secrets.token_bytes(16))


def _dial(offer: tuple[str, bytes], rank: int) -> socket.socket | None:
    """Returns a connection to another rank; None if it is not on this machine."""
    address, secret = offer
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(address)
        connection.send(HELLO.pack(secret, rank))
    except OSError:
        connection.close()
        return None
    return connection
