#include "distckpt/storage/network/aws_settings.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/remote/environment.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace aws_settings_test {

using support::anonymous_s3;
using support::Environment;
using support::fails;

TEST(AwsFile, HasSectionsKeysAndKeysBelowKeys) {
  const auto sections = parse_aws_file(
      "# of mine\n; too\n[default]\r\nAWS_Access_Key_Id = a=b#c \nregion:eu-west-1\n\n"
      "[profile  \"two words\"]\ns3 =\n  endpoint_url = http://x:1\n\taddressing_style=path\n"
      "output = json\n[ default ]\nlast =",
      "config");
  EXPECT_EQ(sections,
            (AwsSections{{"default",
                          {{"aws_access_key_id", "a=b#c"}, {"region", "eu-west-1"}, {"last", ""}}},
                         {"profile two words",
                          {{"s3", ""},
                           {"s3.endpoint_url", "http://x:1"},
                           {"s3.addressing_style", "path"},
                           {"output", "json"}}}}));
}

TEST(AwsFile, NamesALineAndDoesNotShowIt) {
  for (const auto& [text, words] :
       {std::pair{"[a]\nsecret", "config: line 2: is no key = value"},
        std::pair{"\n[secret", "config: line 2: a section has no ]"},
        std::pair{"secret=1", "config: line 1: stands before any [section]"},
        std::pair{"[a]\n=secret", "line 2: is no key"}}) {
    try {
      parse_aws_file(text, "config");
      FAIL() << text;
    } catch (const Error& error) {
      const std::string said = error.what();
      EXPECT_NE(said.find(words), std::string::npos) << said;
      EXPECT_EQ(said.find("secret"), std::string::npos) << said;
    }
  }
}

class AwsSettingsTest : public testing::Test {
 protected:
  AwsSettings read(const std::string& credentials, const std::string& config) {
    std::ofstream(credentials_) << credentials;
    std::ofstream(config_) << config;
    return aws_settings();
  }

  support::TempDir dir_;
  std::string credentials_ = (dir_ / "keys").string(), config_ = (dir_ / "settings").string();
  Environment nobody_ = anonymous_s3("");
  Environment files_{{"AWS_SHARED_CREDENTIALS_FILE", credentials_}, {"AWS_CONFIG_FILE", config_}};
};

constexpr const char* kTwo =
    "[default]\naws_access_key_id = a\naws_secret_access_key = b\n"
    "[other]\naws_access_key_id = c\naws_secret_access_key = d\naws_session_token = e\n";

TEST_F(AwsSettingsTest, AreNobodysWithoutFiles) {
  const auto settings = aws_settings();
  EXPECT_EQ(settings.id, "");
  EXPECT_EQ(settings.region, "us-east-1");
  EXPECT_EQ(settings.endpoint, "");
}

TEST_F(AwsSettingsTest, AreThoseOfTheDefaultProfile) {
  const auto settings =
      read(kTwo, "[default]\nregion = eu-west-3\nendpoint_url = http://127.0.0.1:9/\n");
  EXPECT_EQ(settings.id, "a");
  EXPECT_EQ(settings.secret, "b");
  EXPECT_EQ(settings.session_token, "");
  EXPECT_EQ(settings.region, "eu-west-3");
  EXPECT_EQ(settings.endpoint, "http://127.0.0.1:9");
}

TEST_F(AwsSettingsTest, AreThoseOfTheProfileThatIsAskedFor) {
  const Environment other{{"AWS_PROFILE", "other"}};
  const auto settings = read(kTwo,
                             "[default]\nregion = eu-west-3\n[profile other]\nregion = eu-west-1\n"
                             "services = mine\nendpoint_url = http://all\n"
                             "[services mine]\ns3 =\n  endpoint_url = http://s3\n");
  EXPECT_EQ(settings.id, "c");
  EXPECT_EQ(settings.secret, "d");
  EXPECT_EQ(settings.session_token, "e");
  EXPECT_EQ(settings.region, "eu-west-1");
  EXPECT_EQ(settings.endpoint, "http://s3");
  const Environment ignores{{"AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true"}};
  EXPECT_EQ(aws_settings().endpoint, "");
}

TEST_F(AwsSettingsTest, OfTheEnvironmentComeFirst) {
  const Environment keys{{"AWS_ACCESS_KEY_ID", "x"},
                         {"AWS_SECRET_ACCESS_KEY", "y"},
                         {"AWS_REGION", "us-west-2"},
                         {"AWS_ENDPOINT_URL", "http://here"}};
  const auto settings = read(kTwo, "[default]\nregion = eu-west-3\nendpoint_url = http://there\n");
  EXPECT_EQ(settings.id, "x");
  EXPECT_EQ(settings.secret, "y");
  EXPECT_EQ(settings.region, "us-west-2");
  EXPECT_EQ(settings.endpoint, "http://here");
}

TEST_F(AwsSettingsTest, OfAProfileThatIsNotThereAreAnError) {
  const Environment third{{"AWS_PROFILE", "third"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"no profile third", credentials_, config_},
                    [&] { read(kTwo, ""); }));
}

TEST_F(AwsSettingsTest, OfAProfileWithoutKeysSayWhereKeysComeFrom) {
  const Environment other{{"AWS_PROFILE", "other"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage,
                    {"profile other", config_, "aws configure export-credentials --profile other"},
                    [&] { read("", "[profile other]\nsso_session = mine\n"); }));
}

TEST_F(AwsSettingsTest, WithOneKeyOfTwoAreAnError) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {credentials_, "profile default", "has only one of"},
                    [&] { read("[default]\naws_access_key_id = a\n", ""); }));
}

TEST_F(AwsSettingsTest, NameTheProfileWhoseEndpointIsNoAddress) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {config_, "profile default", "is no address"},
                    [&] { read("", "[default]\nendpoint_url = localhost:9000\n"); }));
}

}  // namespace aws_settings_test
}  // namespace ferry::distckpt
