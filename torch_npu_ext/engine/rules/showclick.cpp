// Admission by score: an id gets a row in the batch in which alpha * shows + beta * clicks reaches the
// threshold.
#include "torch_npu_ext/engine/rules/candidate_admission.h"

namespace rec_sdk {

std::unique_ptr<Rule> make_showclick_rule(RuleNumbers* numbers) {
  const double threshold = numbers->real("threshold");
  const double alpha = numbers->real("alpha", 1.0), beta = numbers->real("beta", 0.0);
  const auto make = [=](const AdmissionTable& table) {
    return std::make_unique<CandidateAdmission>(table, threshold, alpha, beta);
  };
  return std::make_unique<AdmissionRule>(make, beta != 0);
}

}  // namespace rec_sdk
