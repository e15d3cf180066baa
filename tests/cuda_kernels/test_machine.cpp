// Tests of the host machine for CUDA kernels: correct kernels must run, and kernels that break a rule of CUDA
// must be reported.
#include <sys/wait.h>
#include <unistd.h>

#include "op_kernels/common/cuda/launch.h"
#include "tests/cuda_kernels/support.h"

using cuda_tests::in_every_order;
using rec_sdk::cuda::kBlockThreads;
using rec_sdk::cuda::launch;

namespace {

constexpr int kBlocks = 3;
constexpr int kThreads = kBlocks * kBlockThreads;
constexpr unsigned kFullMask = 0xffffffffu;

int index_in_grid() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

// Correct kernels. Thread i of the grid sets to[i] to the value that the kernel's comment describes.

// The mirrored position of the thread in its block.
__global__ void mirror(int* to) {
  __shared__ int places[kBlockThreads];
  places[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  to[index_in_grid()] = places[kBlockThreads - 1 - threadIdx.x];
}

// The sum of the lane numbers of the thread's team, plus ten times the next lane number. The last lane uses
// its own number.
__global__ void sum_team(int* to, int width) {
  const rec_sdk::cuda::Team team(width);
  if (team.index % 2 == 0) return;  // a team may end or lag behind other teams of its warp
  int sum = team.lane;
  for (int step = width / 2; step > 0; step /= 2) sum += __shfl_xor_sync(team.mask, sum, step, width);
  to[index_in_grid()] = sum + 10 * __shfl_down_sync(team.mask, team.lane, 1, width);
}

// An 8-byte value that lane 15 of the thread's 16 lanes provides.
__global__ void broadcast(double* to) {
  to[index_in_grid()] = __shfl_sync(kFullMask, threadIdx.x / 7.0, 15, 16);
}

// The value that the corresponding thread of the warp's other half wrote to shared memory.
__global__ void swap_halves(int* to) {
  __shared__ int places[kBlockThreads];
  places[threadIdx.x] = index_in_grid();
  __syncwarp();
  to[index_in_grid()] = places[threadIdx.x ^ 16];
}

// Incorrect kernels.

__global__ void mirror_without_barrier(int* to) {
  __shared__ int places[kBlockThreads];
  places[threadIdx.x] = static_cast<int>(threadIdx.x);
  to[index_in_grid()] = places[kBlockThreads - 1 - threadIdx.x];
}

__global__ void swap_halves_without_barrier(int* to) {
  __shared__ int places[kBlockThreads];
  places[threadIdx.x] = index_in_grid();
  to[index_in_grid()] = places[threadIdx.x ^ 16];
}

// After a barrier of one warp, its threads see writes by threads of this warp, but not of other warps.
__global__ void mirror_with_warp_barrier(int* to) {
  __shared__ int places[kBlockThreads];
  places[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncwarp();
  to[index_in_grid()] = places[kBlockThreads - 1 - threadIdx.x];
}

__global__ void count_blocks_in_shared_memory(int* to) {
  __shared__ int blocks;
  if (threadIdx.x == 0) to[blockIdx.x] = ++blocks;
}

// The result is the index of the block that runs last.
__global__ void write_one_place(int* to) { to[0] = static_cast<int>(blockIdx.x); }

__global__ void barrier_for_some(int* to) {
  if (threadIdx.x < 100) __syncthreads();
  to[index_in_grid()] = 1;
}

__global__ void divergent_barriers(int* to) {
  if (threadIdx.x < 100) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  to[index_in_grid()] = 1;
}

__global__ void barrier_after_end(int* to) {
  if (threadIdx.x == 200) return;
  __syncthreads();
  to[index_in_grid()] = 1;
}

__global__ void not_in_mask(int* to) { to[index_in_grid()] = __shfl_sync(0xffffu, 1, 0); }

__global__ void reads_outside_mask(int* to) {
  if (threadIdx.x % 32 < 16) to[index_in_grid()] = __shfl_sync(0xffffu, 1, 20);
}

__global__ void names_ended_lane(int* to) {
  if (threadIdx.x % 32 == 3) return;
  to[index_in_grid()] = __shfl_xor_sync(kFullMask, 1, 1);
}

__global__ void different_masks(int* to) {
  const unsigned mask = threadIdx.x % 32 < 16 ? 0xffffu : kFullMask;
  to[index_in_grid()] = __shfl_sync(mask, 1, 0);
}

__global__ void empty_mask(int* to) {
  __syncwarp(0);
  to[index_in_grid()] = 1;
}

__global__ void odd_width(int* to) { to[index_in_grid()] = __shfl_sync(kFullMask, 1, 0, 12); }

__global__ void past_the_end(int* to) { to[index_in_grid() + 1] = 1; }

__global__ void before_the_start(const int* from, int* to) {
  to[index_in_grid()] = from[index_in_grid() - 1];
}

__global__ void past_shared_memory(int* to) {
  __shared__ int places[kBlockThreads];
  places[threadIdx.x + 1] = 1;
  to[index_in_grid()] = places[threadIdx.x];
}

__global__ void misaligned(const int* from, int* to) {
  const int4 all = __ldg(reinterpret_cast<const int4*>(from + 1));
  to[index_in_grid()] = all.x + all.w;
}

template <class Kernel, class... Arguments>
std::string error_of(Kernel kernel, int64_t blocks, const Arguments&... arguments) {
  try {
    launch(kernel, blocks, nullptr, arguments...);
  } catch (const cuda_host::KernelError& error) {
    return error.what();
  }
  return "no error";
}

void check_contains(const std::string& text, const std::string& part) {
  CHECK(text.find(part) != std::string::npos);
  if (text.find(part) == std::string::npos) {
    std::fprintf(stderr, "not \"%s\" but:\n%s\n", part.c_str(), text.c_str());
  }
}

// Checks that an incorrect kernel throws an error that contains `part`, in every order of blocks and threads.
template <class Kernel>
void check_error(Kernel kernel, const std::string& part) {
  in_every_order("a wrong kernel", [&](const std::string&) {
    std::vector<int> to(kThreads);
    check_contains(error_of(kernel, kBlocks, to.data()), part);
  });
}

void check_right_kernels() {
  in_every_order("right kernels", [&](const std::string& where) {
    std::vector<int> to(kThreads), expected(kThreads);
    std::vector<double> doubles(kThreads), expected_doubles(kThreads);
    for (int i = 0; i < kThreads; ++i) expected[i] = kBlockThreads - 1 - i % kBlockThreads;
    launch(mirror, kBlocks, nullptr, to.data());
    cuda_tests::check_bits(where + ", mirror", to, expected);
    for (int i = 0; i < kThreads; ++i) expected[i] = i ^ 16;
    launch(swap_halves, kBlocks, nullptr, to.data());
    cuda_tests::check_bits(where + ", swap_halves", to, expected);
    for (int i = 0; i < kThreads; ++i) expected_doubles[i] = (i % kBlockThreads / 16 * 16 + 15) / 7.0;
    launch(broadcast, kBlocks, nullptr, doubles.data());
    cuda_tests::check_bits(where + ", broadcast", doubles, expected_doubles);
    for (const int width : {4, 8, 16, 32}) {
      for (int i = 0; i < kThreads; ++i) {
        const int lane = i % width, next = std::min(lane + 1, width - 1);
        expected[i] = i / width % 2 == 0 ? -1 : width * (width - 1) / 2 + 10 * next;
      }
      to.assign(kThreads, -1);
      launch(sum_team, kBlocks, nullptr, to.data(), width);
      cuda_tests::check_bits(where + ", sum_team", to, expected);
    }
  });
}

// Returns the results of a kernel, one for each order of blocks and threads.
template <class Kernel>
std::vector<std::vector<int>> results_of(Kernel kernel) {
  std::vector<std::vector<int>> all;
  in_every_order("a racing kernel", [&](const std::string&) {
    all.emplace_back(kThreads);
    launch(kernel, kBlocks, nullptr, all.back().data());
  });
  return all;
}

template <class Kernel>
void check_depends_on_order(Kernel kernel) {
  const auto all = results_of(kernel);
  CHECK(all[0] != all[1] && all[0] != all[2]);
}

void check_stale_memory() {
  for (const std::vector<int>& result : results_of(count_blocks_in_shared_memory)) {
    const int fresh = static_cast<int>(0xCDCDCDCD + 1u);
    for (int block = 0; block < kBlocks; ++block) CHECK(result[block] == fresh);
  }
}

void check_launches() {
  std::vector<int> to(1);
  cudaLaunchConfig_t config{};
  const auto error = [&](const dim3& grid, const dim3& block) {
    config.gridDim = grid;
    config.blockDim = block;
    try {
      cudaLaunchKernelEx(&config, write_one_place, to.data());
    } catch (const cuda_host::KernelError& thrown) {
      return std::string(thrown.what());
    }
    return std::string("no error");
  };
  check_contains(error(0, 256), "write_one_place");
  check_contains(error(0, 256), "0 blocks of 256 threads");
  check_contains(error(0x80000000u, 256), "cannot be launched");
  check_contains(error(1, 0), "cannot be launched");
  check_contains(error(1, 1025), "cannot be launched");
  check_contains(error(1, 1024), "no error");
  check_contains(error(dim3(1, 2), 32), "one dimension");
  CHECK(launch(write_one_place, 0, nullptr, to.data()) == cudaSuccess);
}

// Runs `body` in a child process, because the sanitizers end the process, and returns their report.
template <class Body>
std::string report_of(const Body& body) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    body();
    _exit(0);
  }
  close(ends[1]);
  std::string report;
  char part[4096];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) report.append(part, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
  return report;
}

void check_sanitizers() {
  cuda_host::set_order(cuda_host::kAscending);
  cuda_host::set_title("a test");
  std::vector<int> from(kThreads), to(kThreads);
  const auto reports = [&](const std::string& part, const std::string& thread, auto body) {
    const std::string report = report_of(body);
    check_contains(report, part);
    check_contains(report, "a test, " + thread);
  };
  reports("heap-buffer-overflow", "block 2, thread 255",
          [&] { launch(past_the_end, kBlocks, nullptr, to.data()); });
  reports("heap-buffer-overflow", "block 0, thread 0",
          [&] { launch(before_the_start, kBlocks, nullptr, from.data(), to.data()); });
  reports("out of bounds", "block 0, thread 255",
          [&] { launch(past_shared_memory, kBlocks, nullptr, to.data()); });
  reports("misaligned address", "block 0, thread 0",
          [&] { launch(misaligned, kBlocks, nullptr, from.data(), to.data()); });
}

}  // namespace

int main() {
  check_right_kernels();
  check_depends_on_order(mirror_without_barrier);
  check_depends_on_order(mirror_with_warp_barrier);
  check_depends_on_order(swap_halves_without_barrier);
  check_depends_on_order(write_one_place);
  check_stale_memory();
  check_error(barrier_for_some, "which has ended");
  check_error(divergent_barriers, "for thread 100, which waits in __syncthreads at");
  check_error(barrier_after_end, "for thread 200, which has ended");
  check_error(not_in_mask, "is not in the mask of its __shfl_sync with mask 0x0000ffff at ");
  check_error(reads_outside_mask, "which is not in the mask");
  check_error(names_ended_lane, "waits in __shfl_xor_sync with mask 0xffffffff at ");
  check_error(names_ended_lane, "names_ended_lane");
  check_error(names_ended_lane, "thread 3, which has ended");
  check_error(different_masks, "thread 16 waits in __shfl_sync with mask 0xffffffff at ");
  check_error(empty_mask, "an empty mask in __syncwarp at ");
  check_error(odd_width, "a shuffle of width 12");
  check_right_kernels();  // the machine must still work after incorrect kernels were stopped
  check_launches();
  check_sanitizers();
  return check_result();
}
