#include "cli/torch/numerics_report.h"

#include <fmt/format.h>

#include "cli/report/text.h"

namespace ferry::cli {

using models::NumericsCertificate;

std::string numerics_text(const NumericsCertificate& certificate) {
  std::string text;
  for (const auto& [name, value] : certificate.environment)
    text += fmt::format("{:<12} {}\n", name, value);
  for (const auto& check : certificate.checks) {
    text += fmt::format("{:<6} {:<40} {}{}{}\n", check.passed ? "pass" : "FAIL", check.subject,
                        check.property, check.detail.empty() ? "" : ": ", check.detail);
  }
  for (const auto& kernel : certificate.kernels) text += fmt::format("kernel {}\n", kernel);
  text += fmt::format("{} checks in {}\n", certificate.checks.size(),
                      format_seconds(certificate.seconds));
  return text + (certificate.passed() ? "PASS\n" : "FAIL\n");
}

nlohmann::ordered_json numerics_json(const NumericsCertificate& certificate) {
  nlohmann::ordered_json json{{"passed", certificate.passed()}, {"seconds", certificate.seconds}};
  for (const auto& [name, value] : certificate.environment) json["environment"][name] = value;
  for (const auto& check : certificate.checks) {
    json["checks"].push_back({{"subject", check.subject},
                              {"property", check.property},
                              {"passed", check.passed},
                              {"detail", check.detail}});
  }
  json["kernels"] = certificate.kernels;
  return json;
}

}  // namespace ferry::cli
