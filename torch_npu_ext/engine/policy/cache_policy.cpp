#include "torch_npu_ext/engine/policy/cache_policy.h"

#include <stdexcept>

#include "torch_npu_ext/engine/policy/lfu_policy.h"
#include "torch_npu_ext/engine/policy/lrfu_policy.h"
#include "torch_npu_ext/engine/policy/lru_policy.h"

namespace rec_sdk {
namespace {

template <class Policy>
std::unique_ptr<CachePolicy> make(int64_t first_slot, int64_t slots) {
  return std::make_unique<Policy>(first_slot, slots);
}

struct Registered {
  const char* name;
  std::unique_ptr<CachePolicy> (*make)(int64_t first_slot, int64_t slots);
};
constexpr Registered kPolicies[] = {
    {"lru", make<LruPolicy>},
    {"lfu", make<LfuPolicy>},
    {"lrfu", make<LrfuPolicy>},
    {"look_ahead", make<LookAheadPolicy>},
};

}  // namespace

std::vector<std::string> cache_policy_names() {
  std::vector<std::string> names;
  for (const Registered& policy : kPolicies) names.emplace_back(policy.name);
  return names;
}

std::unique_ptr<CachePolicy> make_cache_policy(const std::string& name, int64_t first_slot, int64_t slots) {
  std::string known;
  for (const Registered& policy : kPolicies) {
    if (name == policy.name) return policy.make(first_slot, slots);
    known += std::string(known.empty() ? "" : ", ") + "'" + policy.name + "'";
  }
  throw std::invalid_argument("cache policy '" + name + "' is not known; there is " + known);
}

}  // namespace rec_sdk
