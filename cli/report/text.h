// Reports for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "converter/convert.h"
#include "converter/inspect.h"
#include "converter/manifest.h"
#include "converter/verify.h"

namespace ferry::cli {

std::string format_bytes(std::int64_t bytes);  // "3.09 GB"
std::string format_seconds(double seconds);    // "0.4 s", "3 min 12 s"
std::string format_count(std::int64_t count);  // "1,543,714,304"

std::string convert_text(const converter::ConvertReport& report);
std::string inspect_text(const converter::InspectReport& report, std::string_view filter);
std::string verify_text(const converter::VerifyReport& report);
std::string digest_text(const converter::Manifest& manifest);

}  // namespace ferry::cli
