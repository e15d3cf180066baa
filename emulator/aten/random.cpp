#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <mutex>

namespace rec_sdk::emulator {
namespace {

// The generator of a device advances in steps of 4 random numbers.
constexpr uint64_t kStep = 4;

// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
// With it, seeds that differ in one bit give unrelated sequences.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t next_seed(at::Generator generator, c10::Device device) {
  if (!generator.defined()) generator = at::globalContext().defaultGenerator(device);
  TORCH_CHECK(generator.device().type() == device.type(), "Expected a '", device.type(),
              "' device type for generator but found '", generator.device().type(), "'");
  std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + kStep);
  return mix(mix(generator.current_seed() + 0x9e3779b97f4a7c15) + offset);
}

}  // namespace

at::Generator host_generator(at::Generator generator, c10::Device device) {
  return at::detail::createCPUGenerator(next_seed(std::move(generator), device));
}

void with_host_generator(c10::Device device, const std::function<void()>& work) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> alone(one_at_a_time);
  const uint64_t seed = next_seed({}, device);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  at::Tensor saved;
  {
    std::lock_guard<std::mutex> lock(cpu.mutex());
    saved = cpu.get_state();
    cpu.set_current_seed(seed);
  }
  // The generator's mutex is not held during work(), because kernels lock it.
  struct Restore {
    at::Generator& generator;
    const at::Tensor& state;
    ~Restore() {
      std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  } restore{cpu, saved};
  work();
}

}  // namespace rec_sdk::emulator
