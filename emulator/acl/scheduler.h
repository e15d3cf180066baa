// The schedules of streams, selected by REC_SDK_EMULATED_STREAMS.
//
// eager   A stream runs whenever it can, as on an otherwise idle device.
// late    A stream runs only when the host needs its results: when the host waits for the stream, an event or
//         the device, copies pageable memory, destroys the stream, or ends. Only the needed part runs: the
//         stream up to that point, and the points of events just before a task waits for them. If the host
//         waits for several streams, the one with the most recently added next task runs first.
// random  Each call runs up to two tasks of random streams, also while the host waits.
//
// With late and random, one task runs at a time. The following rules ensure that no correct program waits
// forever:
// - A query of an event or stream returns the present state; then one task on the way to it runs.
// - If a stream has more than kDepth tasks, the oldest one runs, because a chip's queues are finite too.
// - If there was no call and no progress for about a second, all queued work runs as with eager. A device
// makes
//   progress by itself, and something outside the runtime may depend on it: the host on a host function, or
//   another process on a collective.
#pragma once

#include "stream.h"

namespace rec_sdk::emulator {

// Every function of the runtime that concerns streams must call this before it does its work.
void on_call();

// Puts the task on the stream and returns its point.
Point put(const std::shared_ptr<Stream>& stream, Task task);

// Returns whether streams run as soon as they can.
bool runs_freely();

// Waits until all points are reached; returns false after the deadline.
bool wait_for(std::vector<Point> points, Clock::time_point deadline);

// Called after a query of whether the point is reached.
void asked(const Point& point);

}  // namespace rec_sdk::emulator
