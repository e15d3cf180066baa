// Formats a string like printf.
#pragma once

#include <string>

namespace rec_sdk::emulator {

__attribute__((format(printf, 1, 2))) std::string text(const char* format, ...);

}  // namespace rec_sdk::emulator
