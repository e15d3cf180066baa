// When streams run, which REC_SDK_EMULATED_STREAMS chooses.
//
// eager   A stream runs whenever it can, as on a device with nothing else to do.
// late    A stream runs only when the host must have what it does: it waits for the stream, an event or the
//         device, copies pageable memory, destroys the stream, or ends. Then only what is needed for that
//         runs: the stream up to that point and, just before the wait for an event, what the event stands
//         for. Among streams that are waited for together, the one with the youngest next task is first.
// random  At each call, up to two tasks of random streams run; and while the host waits, too.
//
// In the last two, one task runs at a time, and these hold as well, so that no program that is right waits
// forever:
// - A question whether an event or a stream is done is answered; then one task on the way there runs.
// - Of more than kDepth tasks of a stream the oldest runs. A chip's queues are not endless either.
// - If nothing was called and nothing got done for about a second, all that is queued runs as if eager. A
//   device does go on by itself, and something outside the runtime may wait for it: the host for a host
//   function, another process for a collective.
#pragma once

#include "stream.h"

namespace rec_sdk::emulator {

// To be called by every function of the runtime that concerns streams, before it does its work.
void on_call();

// Puts the task on the stream.
Point put(const std::shared_ptr<Stream>& stream, Task task);

// Whether the streams are to run as soon as they can.
bool runs_freely();

// The host waits for all points; false if it is too late.
bool wait_for(std::vector<Point> points, Clock::time_point deadline);

// The host has asked whether the point is reached, and been told.
void asked(const Point& point);

}  // namespace rec_sdk::emulator
