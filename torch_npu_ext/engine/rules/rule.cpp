#include "torch_npu_ext/engine/rules/rule.h"

#include <algorithm>
#include <stdexcept>

namespace rec_sdk {

double RuleNumbers::real(const std::string& name, std::optional<double> otherwise) {
  const auto* const found = find(name, otherwise.has_value());
  if (found == nullptr) return *otherwise;
  return std::visit([](auto number) { return static_cast<double>(number); }, *found);
}

int64_t RuleNumbers::whole(const std::string& name, int64_t least, std::optional<int64_t> otherwise) {
  const auto* const found = find(name, otherwise.has_value());
  if (found == nullptr) return *otherwise;
  const int64_t* const number = std::get_if<int64_t>(found);
  check(number != nullptr && *number >= least,
        "'" + name + "' must be a whole number, " + std::to_string(least) + " or more");
  return *number;
}

void RuleNumbers::check(bool valid, const std::string& message) const {
  if (!valid) throw std::invalid_argument("rule '" + rule_ + "': " + message);
}

void RuleNumbers::check_names() const {
  std::string known;
  for (const std::string& name : names_) known += (known.empty() ? "'" : ", '") + name + "'";
  for (const auto& [name, number] : values_) {
    check(std::find(names_.begin(), names_.end(), name) != names_.end(),
          "parameter '" + name + "' is not known; use " + known);
  }
}

const std::variant<int64_t, double>* RuleNumbers::find(const std::string& name, bool optional) {
  if (std::find(names_.begin(), names_.end(), name) == names_.end()) names_.push_back(name);
  const auto found = values_.find(name);
  check(optional || found != values_.end(), "it needs the parameter '" + name + "'");
  return found == values_.end() ? nullptr : &found->second;
}

}  // namespace rec_sdk
