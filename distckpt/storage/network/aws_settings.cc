#include "distckpt/storage/network/aws_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/printable.h"
#include "distckpt/base/trimmed.h"
#include "distckpt/storage/network/http.h"

namespace ferry::distckpt {
namespace {

constexpr std::string_view kBlank = " \t\r";

// `profile "a b"` as `profile a b`.
std::string section_name(std::string_view text) {
  text = trimmed(text);
  const auto blank = std::min(text.find_first_of(kBlank), text.size());
  auto rest = trimmed(text.substr(blank));
  if (rest.size() > 1 && rest.front() == rest.back() && (rest[0] == '"' || rest[0] == '\''))
    rest = rest.substr(1, rest.size() - 2);
  return std::string(text.substr(0, blank)) + (rest.empty() ? "" : " ") + std::string(rest);
}

std::filesystem::path path_of(const char* variable, const char* name) {
  const auto home = environment("HOME").value_or("");
  auto given = environment(variable).value_or(fmt::format("~/.aws/{}", name));
  if (given.starts_with("~/")) given.replace(0, 1, home);
  return given;
}

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  require(!file.bad() && file.is_open(), ErrorKind::kUsage, "{}: cannot be read", path.string());
  return text;
}

// One of the two files; empty if it is not there.
struct AwsFile {
  std::filesystem::path path{};
  AwsSections sections{};

  AwsFile(const char* variable, const char* name) : path(path_of(variable, name)) {
    std::error_code error;
    if (std::filesystem::exists(path, error))
      sections = parse_aws_file(text_of(path), path.string());
  }
  const std::string* find(const std::string& section, const std::string& key) const {
    const auto found = sections.find(section);
    if (found == sections.end()) return nullptr;
    const auto value = found->second.find(key);
    return value == found->second.end() || value->second.empty() ? nullptr : &value->second;
  }
};

class Profile {
 public:
  Profile() {
    for (const char* variable : {"AWS_PROFILE", "AWS_DEFAULT_PROFILE"})
      if (!asked_) asked_ = environment(variable);
    name_ = asked_.value_or("default");
    in_config_ = name_ == "default" && !config_.sections.contains("profile default")
                     ? name_
                     : "profile " + name_;
    if (!asked_ || credentials_.sections.contains(name_) || config_.sections.contains(in_config_))
      return;
    throw Error(ErrorKind::kUsage,
                fmt::format("AWS_PROFILE: there is no profile {} in {} or {}", printable(name_),
                            credentials_.path.string(), config_.path.string()));
  }

  // The value of a key, and where it stands.
  struct Value {
    std::string text{};
    std::string from{};
  };
  std::optional<Value> find(const std::string& key) const {
    if (const auto* const text = credentials_.find(name_, key))
      return Value{*text, place_in(credentials_)};
    if (const auto* const text = config_.find(in_config_, key))
      return Value{*text, place_in(config_)};
    return std::nullopt;
  }
  // The endpoint of S3 that a section of services has, if the profile names such.
  std::optional<Value> endpoint() const {
    if (environment("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") == "true") return std::nullopt;
    if (const auto services = find("services")) {
      const auto section = "services " + services->text;
      if (const auto* const text = config_.find(section, "s3.endpoint_url"))
        return Value{*text, fmt::format("{}, {}", config_.path.string(), printable(section))};
    }
    return find("endpoint_url");
  }

  void read_keys(AwsSettings& settings) const {
    for (const auto* const file : {&credentials_, &config_}) {
      const auto& section = file == &config_ ? in_config_ : name_;
      const auto* const id = file->find(section, "aws_access_key_id");
      const auto* const secret = file->find(section, "aws_secret_access_key");
      require((id == nullptr) == (secret == nullptr), ErrorKind::kUsage,
              "{}: has only one of aws_access_key_id and aws_secret_access_key", place_in(*file));
      if (id == nullptr) continue;
      settings.id = *id;
      settings.secret = *secret;
      if (const auto* const token = file->find(section, "aws_session_token"))
        settings.session_token = *token;
      return;
    }
    if (!asked_) return;
    throw Error(
        ErrorKind::kUsage,
        fmt::format("AWS_PROFILE: the profile {} has no aws_access_key_id in {} or {}",
                    printable(name_), credentials_.path.string(), config_.path.string()),
        fmt::format("'aws configure export-credentials --profile {} --format env' prints keys of "
                    "single sign-on, roles and programs for the environment",
                    printable(name_)));
  }

 private:
  std::string place_in(const AwsFile& file) const {
    return fmt::format("{}, profile {}", file.path.string(), printable(name_));
  }

  AwsFile credentials_{"AWS_SHARED_CREDENTIALS_FILE", "credentials"};
  AwsFile config_{"AWS_CONFIG_FILE", "config"};
  std::optional<std::string> asked_{};
  std::string name_{};
  std::string in_config_{};  // the profile's section there
};

}  // namespace

AwsSections parse_aws_file(std::string_view text, std::string_view source) {
  AwsSections sections;
  std::map<std::string, std::string>* section = nullptr;
  std::string above;  // the key that indented lines belong to
  for (int number = 1; !text.empty(); ++number) {
    const auto end = std::min(text.find('\n'), text.size());
    const auto line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const auto content = trimmed(line);
    if (content.empty() || content[0] == '#' || content[0] == ';') continue;
    const auto require_that = [&](bool is_so, std::string_view what) {
      require(is_so, ErrorKind::kUsage, "{}: line {}: {}", source, number, what);
    };
    const bool is_indented = line[0] == ' ' || line[0] == '\t';
    if (content[0] == '[' && !is_indented) {
      const auto close = content.find(']');
      require_that(close != std::string_view::npos, "a section has no ]");
      section = &sections[section_name(content.substr(1, close - 1))];
      above.clear();
      continue;
    }
    const auto equals = content.find_first_of("=:");
    require_that(equals != std::string_view::npos && equals > 0, "is no key = value");
    require_that(section != nullptr, "stands before any [section]");
    std::string key(trimmed(content.substr(0, equals)));
    std::ranges::transform(key, key.begin(),
                           [](char c) { return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c; });
    if (!is_indented) above = key;
    const auto name = is_indented && !above.empty() ? above + "." + key : key;
    (*section)[name] = trimmed(content.substr(equals + 1));
  }
  return sections;
}

AwsSettings aws_settings() {
  AwsSettings settings;
  const Profile profile;
  const auto id = environment("AWS_ACCESS_KEY_ID");
  const auto secret = environment("AWS_SECRET_ACCESS_KEY");
  require(id.has_value() == secret.has_value(), ErrorKind::kUsage,
          "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY: only one of the two is set");
  if (id) {
    settings.id = *id;
    settings.secret = *secret;
    settings.session_token = environment("AWS_SESSION_TOKEN").value_or("");
  } else {
    profile.read_keys(settings);
  }
  auto region = environment("AWS_REGION");
  if (!region) region = environment("AWS_DEFAULT_REGION");
  if (const auto of_profile = profile.find("region"); !region && of_profile)
    region = of_profile->text;
  if (region) settings.region = *region;
  for (const auto* name : {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"})
    if (const auto url = environment(name); url && settings.endpoint.empty())
      settings.endpoint = *url, settings.endpoint_from = name;
  if (const auto endpoint = profile.endpoint(); settings.endpoint.empty() && endpoint) {
    settings.endpoint = endpoint->text;
    settings.endpoint_from = endpoint->from;
  }
  auto& endpoint = settings.endpoint;
  require(endpoint.empty() || endpoint.starts_with("https://") || endpoint.starts_with("http://"),
          ErrorKind::kUsage, "{}: is no address: it begins with https:// or http://",
          settings.endpoint_from);
  while (endpoint.ends_with('/')) endpoint.pop_back();
  return settings;
}

}  // namespace ferry::distckpt
