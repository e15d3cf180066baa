// The schedules of streams, which REC_SDK_EMULATED_STREAMS selects.
//
// eager   A stream runs its tasks as soon as it can, as on an otherwise idle device.
// late    A stream runs only when the host needs its results: when the host waits for the stream, an event or
//         the device, copies pageable memory, destroys the stream, or ends. Only tasks that the host needs
//         run: the stream's tasks up to that point, and before each of them the tasks of other streams whose
//         events it waits for. If the host waits for several streams, the stream whose next task was added
//         last runs first.
// random  Each call runs up to two tasks of random streams. So does each step while the host waits.
//
// With late and random, one task runs at a time. The following rules ensure that no correct program waits
// forever:
// - A query of an event or stream returns the present state. Afterwards one task on the way to the queried
//   point runs.
// - If more than kDepth tasks of a stream are not done, its oldest task runs, because the queues of a chip
//   are finite too.
// - If there was neither a call nor progress for about a second, all queued work runs as with eager. A device
//   makes progress by itself, and something outside the runtime may depend on it: the host may wait for a
//   host function, or another process for a collective.
#pragma once

#include "stream.h"

namespace rec_sdk::emulator {

// Must be called first by every function of the runtime that concerns streams.
void on_call();

// Puts the task on the stream and returns the point at which it is done.
Point put(const std::shared_ptr<Stream>& stream, Task task);

// Returns whether the schedule is `eager`.
bool runs_freely();

// Waits until all points are reached; returns false after the deadline.
bool wait_for(std::vector<Point> points, Clock::time_point deadline);

// Must be called after a query of whether the point is reached, so that one task on the way to it runs.
void asked(const Point& point);

}  // namespace rec_sdk::emulator
