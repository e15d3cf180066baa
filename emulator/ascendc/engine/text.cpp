#include "emulator/ascendc/engine/text.h"

#include <cstdarg>
#include <cstdio>

namespace rec_sdk::emulator {

std::string text(const char* format, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace rec_sdk::emulator
