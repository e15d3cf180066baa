// Admission by count: an id gets a row in the batch in which its lookups reach the threshold.
#include "torch_npu_ext/engine/rules/candidate_admission.h"

namespace rec_sdk {

std::unique_ptr<Rule> make_count_rule(RuleNumbers* numbers) {
  const double threshold = numbers->real("threshold");
  return std::make_unique<AdmissionRule>([=](const AdmissionTable& table) {
    return std::make_unique<CandidateAdmission>(table, threshold, 1, 0);
  });
}

}  // namespace rec_sdk
