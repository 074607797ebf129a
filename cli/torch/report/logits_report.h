// The report of verify --logits: for people, for programs, and as a page.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "converter/alignment/logits_check.h"

namespace ferry::cli {

// The model and the reference that were compared.
struct LogitsSubject {
  std::string checkpoint{};
  std::string reference{};
  std::string family{};
  std::string alignment{};
  std::string dtype{};
  std::string device{};
  models::MeshShape mesh;
  bool sequence_parallel = false;
};

std::string logits_text(const LogitsSubject& subject, const converter::LogitsReport& report);
nlohmann::ordered_json logits_json(const LogitsSubject& subject,
                                   const converter::LogitsReport& report);
std::string logits_html(const LogitsSubject& subject, const converter::LogitsReport& report);

}  // namespace ferry::cli
