// Variables of the environment, for as long as a test wants them.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ferry::support {

class Environment {
 public:
  // Environment quick{{"FERRY_HTTP_RETRIES", "1"}}; an empty value: the variable is not set.
  Environment(std::initializer_list<std::pair<const char*, std::string>> values) {
    for (const auto& [name, value] : values) {
      const auto* const before = std::getenv(name);
      before_.emplace_back(name,
                           before == nullptr ? std::nullopt : std::optional<std::string>(before));
      assign(name, value.empty() ? std::nullopt : std::optional(value));
    }
  }
  ~Environment() {
    for (auto at = before_.rbegin(); at != before_.rend(); ++at) assign(at->first, at->second);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static void assign(const char* name, const std::optional<std::string>& value) {
    if (value)
      ::setenv(name, value->c_str(), 1);
    else
      ::unsetenv(name);
  }

  std::vector<std::pair<const char*, std::optional<std::string>>> before_;
};

// Nobody's keys, `endpoint` for S3, and one attempt a request.
inline Environment anonymous_s3(const std::string& endpoint) {
  return {{"AWS_ENDPOINT_URL_S3", endpoint}, {"AWS_ENDPOINT_URL", ""},
          {"AWS_ACCESS_KEY_ID", ""},         {"AWS_SECRET_ACCESS_KEY", ""},
          {"AWS_SESSION_TOKEN", ""},         {"AWS_REGION", ""},
          {"AWS_DEFAULT_REGION", ""},        {"AWS_PROFILE", ""},
          {"AWS_DEFAULT_PROFILE", ""},       {"AWS_SHARED_CREDENTIALS_FILE", "/dev/null"},
          {"AWS_CONFIG_FILE", "/dev/null"},  {"FERRY_HTTP_RETRIES", "1"}};
}

}  // namespace ferry::support
