// Keys, region and endpoint of S3 as AWS's own tools find them: in the environment, else in the
// profile AWS_PROFILE (default) of ~/.aws/credentials and ~/.aws/config, or of the files that
// AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE name. A value of the first file counts before one
// of the second.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace ferry::distckpt {

struct AwsSettings {
  std::string id{};  // empty: there are no keys
  std::string secret{};
  std::string session_token{};  // of temporary keys, else empty
  std::string region = "us-east-1";
  std::string endpoint{};       // "https://host"; empty: AWS's own
  std::string endpoint_from{};  // the variable, or the file and its profile, for messages
};

// Reads the files anew, so that keys may change while a long command runs. Throws Error(kUsage)
// that names the variable, or file and profile: a file that cannot be parsed, one key without the
// other, a profile that AWS_PROFILE asks for and that is not there or has no keys (single sign-on,
// roles and programs are not asked).
AwsSettings aws_settings();

// {section: {key: value}} of such a file; a key below another is "s3.endpoint_url". `source`: the
// file's name. Throws Error(kUsage) that names a line, and never shows it.
using AwsSections = std::map<std::string, std::map<std::string, std::string>>;
AwsSections parse_aws_file(std::string_view text, std::string_view source);

}  // namespace ferry::distckpt
