#include "cli/torch/report/numerics_report.h"

#include <fmt/format.h>

#include "cli/report/text.h"

namespace ferry::cli {

using models::NumericsCertificate;

namespace {

nlohmann::ordered_json checks_json(const std::vector<models::NumericsCheck>& checks) {
  auto json = nlohmann::ordered_json::array();
  for (const auto& check : checks) {
    json.push_back({{"subject", check.subject},
                    {"property", check.property},
                    {"passed", check.passed},
                    {"detail", check.detail}});
  }
  return json;
}

}  // namespace

std::string numerics_text(const NumericsCertificate& certificate) {
  std::string text;
  for (const auto& [name, value] : certificate.environment)
    text += fmt::format("{:<12} {}\n", name, value);
  const auto add = [&](const models::NumericsCheck& check, const char* mark) {
    text += fmt::format("{:<6} {:<40} {}{}{}\n", mark, check.subject, check.property,
                        check.detail.empty() ? "" : ": ", check.detail);
  };
  for (const auto& check : certificate.checks) add(check, check.passed ? "pass" : "FAIL");
  for (const auto& check : certificate.transformers) add(check, check.passed ? "same" : "other");
  for (const auto& kernel : certificate.kernels) text += fmt::format("kernel {}\n", kernel);
  text += fmt::format("{} checks in {}\n", certificate.checks.size(),
                      format_seconds(certificate.seconds));
  return text + (certificate.passed() ? "PASS\n" : "FAIL\n");
}

nlohmann::ordered_json numerics_json(const NumericsCertificate& certificate) {
  nlohmann::ordered_json json{{"passed", certificate.passed()}, {"seconds", certificate.seconds}};
  for (const auto& [name, value] : certificate.environment) json["environment"][name] = value;
  json["checks"] = checks_json(certificate.checks);
  json["equals_transformers"] = certificate.equals_transformers();
  json["transformers"] = checks_json(certificate.transformers);
  json["kernels"] = certificate.kernels;
  return json;
}

}  // namespace ferry::cli
