// One C launch function per kernel, provided by CANN on an NPU (the .asc files) and by the emulator
// elsewhere. All are asynchronous on `stream` (an aclrtStream); the arguments hold device pointers and are
// already checked.
#pragma once

#include <cstdint>

#include "op_kernels/common/arguments.h"
#include "op_kernels/common/operators.h"

#pragma GCC visibility push(default)
extern "C" {

// Returns the number of vector cores that launches on the stream may use, at least 1.
int64_t rec_sdk_ascendc_vector_cores(void* stream);
// Returns and clears the error (an aclError, 0 is none) of this thread's launches since the last call; launch
// functions return nothing.
int32_t rec_sdk_ascendc_take_error();
// Launches a kernel on zero cores, which the runtime must reject. Used to test that failures are reported.
void rec_sdk_launch_on_no_cores(void* stream);

// Declares the launch function of each operator, such as rec_sdk_launch_gather_rows(stream, arguments).
#define REC_SDK_LAUNCH(name, Arguments) void rec_sdk_launch_##name(void* stream, const rec_sdk::Arguments* a);
REC_SDK_OPERATORS(REC_SDK_LAUNCH)
REC_SDK_JOINED_OPERATORS(REC_SDK_LAUNCH)
#undef REC_SDK_LAUNCH

// workspace: device memory of rec_sdk_segments_workspace(segments) bytes with any contents; may be null if
// that is 0.
int64_t rec_sdk_segments_workspace(const rec_sdk::Segments* segments);
void rec_sdk_launch_update_rows(void* stream, const rec_sdk::UpdateRows* a, const char* optimizer,
                                void* workspace);
void rec_sdk_launch_accumulate_rows(void* stream, const rec_sdk::AccumulateRows* a, void* workspace);

}  // extern "C"
#pragma GCC visibility pop
