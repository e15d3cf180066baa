#include "torch_npu_ext/engine/policy/cache_policy.h"

#include <stdexcept>

namespace rec_sdk {

// Each policy is one file, `<name>_policy.cpp`, which defines make_<name>_policy(), and one line in this
// list. The first policy in the list is the default.
#define REC_SDK_CACHE_POLICIES(POLICY) \
  POLICY(lru)                          \
  POLICY(lfu)                          \
  POLICY(lrfu)                         \
  POLICY(look_ahead)

#define REC_SDK_DECLARE(name) \
  std::unique_ptr<CachePolicy> make_##name##_policy(int64_t first_slot, int64_t slots);
REC_SDK_CACHE_POLICIES(REC_SDK_DECLARE)

namespace {

struct Registered {
  const char* name;
  std::unique_ptr<CachePolicy> (*make)(int64_t first_slot, int64_t slots);
};
#define REC_SDK_REGISTER(name) {#name, make_##name##_policy},
constexpr Registered kPolicies[] = {REC_SDK_CACHE_POLICIES(REC_SDK_REGISTER)};

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
  throw std::invalid_argument("cache policy '" + name + "' is not known; use one of " + known);
}

}  // namespace rec_sdk
