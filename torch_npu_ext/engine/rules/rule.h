// The base class of the rules of admission and eviction. Each rule is one file, a test, and a line in
// rules.cpp.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "torch_npu_ext/engine/directory/row_columns.h"

namespace rec_sdk {

// The parameters of a rule, by name. Its functions throw std::invalid_argument with the name of the rule in
// the message.
class RuleNumbers {
 public:
  using Values = std::map<std::string, std::variant<int64_t, double>>;

  RuleNumbers(const std::string& rule, const Values& values) : rule_(rule), values_(values) {}

  double real(const std::string& name, std::optional<double> otherwise = {});
  int64_t whole(const std::string& name, int64_t least, std::optional<int64_t> otherwise = {});
  void check(bool valid, const std::string& message) const;
  void check_names() const;  // must be called last; throws if there is a parameter that no call has read

 private:
  const std::variant<int64_t, double>* find(const std::string& name, bool optional);

  const std::string& rule_;
  const Values& values_;
  std::vector<std::string> names_;
};

// A rule of admission or eviction of a table.
class Rule {
 public:
  virtual ~Rule() = default;
  virtual ColumnSet columns() const { return {}; }  // the columns that the rule needs for each row
  virtual bool needs_clicks() const { return false; }
};

}  // namespace rec_sdk
