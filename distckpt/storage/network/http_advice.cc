#include "distckpt/storage/network/http_advice.h"

#include <charconv>
#include <ctime>
#include <iomanip>
#include <locale>
#include <sstream>
#include <string_view>

#include "distckpt/base/printable.h"
#include "distckpt/storage/network/s3_client.h"

namespace ferry::distckpt {
namespace {

// "Fri, 27 Nov 2026 06:20:56 GMT" in seconds since 1970.
std::optional<double> date_of(const std::string& text) {
  std::tm time{};
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  in >> std::get_time(&time, "%a, %d %b %Y %H:%M:%S GMT");
  if (in.fail()) return std::nullopt;
  return static_cast<double>(timegm(&time));
}

// t of: "api";r=0;t=55
std::optional<double> seconds_until_reset(std::string_view limit) {
  const auto at = limit.find(";t=");
  int seconds = 0;
  if (at == std::string_view::npos ||
      std::from_chars(limit.data() + at + 3, limit.data() + limit.size(), seconds).ec !=
          std::errc() ||
      seconds < 0)
    return std::nullopt;
  return seconds;
}

}  // namespace

std::optional<double> asked_pause(const HttpResponse& response) {
  if (const auto seconds = response.number("retry-after")) return static_cast<double>(*seconds);
  if (const auto then = date_of(response.header("retry-after"))) {
    const auto now = date_of(response.header("date"));
    return *then - now.value_or(static_cast<double>(std::time(nullptr)));
  }
  if (response.status == 429) return seconds_until_reset(response.header("ratelimit"));
  return std::nullopt;
}

std::string advice(const HttpResponse& response) {
  const auto code = element_text(response.body, "Code").value_or("");
  if (code == "ExpiredToken")
    return "the keys were for a time that is over: renew AWS_SESSION_TOKEN, or the profile's";
  if (code == "RequestTimeTooSkewed")
    return fmt::format("the clock of this machine is wrong: at the store it is {}",
                       printable(response.header("date")));
  const bool redirected = response.status >= 300 && response.status < 400;
  if (!redirected && code != "AuthorizationHeaderMalformed") return "";
  auto region = response.header("x-amz-bucket-region");
  if (region.empty()) region = element_text(response.body, "Region").value_or("");
  if (region.empty()) return "";
  return fmt::format("the bucket is in the region {}: set AWS_REGION", printable(region));
}

}  // namespace ferry::distckpt
