// Curves as SVG.
#include "cli/report/chart.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <string_view>

#include "cli/report/html.h"

namespace ferry::cli {
namespace chart_test {

constexpr auto kNan = std::numeric_limits<double>::quiet_NaN();

std::size_t count(std::string_view text, std::string_view part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(RoundTicks, AreStepsOfOneTwoOrFive) {
  EXPECT_EQ(round_ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(round_ticks(0.1, 0.9, 4), (std::vector<double>{0.2, 0.4, 0.6000000000000001, 0.8}));
  EXPECT_EQ(round_ticks(3, 3, 5), std::vector<double>{3});
}

TEST(ShortNumber, HasFourDigitsAndALetterForThousands) {
  EXPECT_EQ(short_number(0), "0");
  EXPECT_EQ(short_number(0.25), "0.25");
  EXPECT_EQ(short_number(12'500), "12.5k");
  EXPECT_EQ(short_number(-3'200'000), "-3.2M");
  EXPECT_EQ(short_number(1e-5), "1e-5");
  EXPECT_EQ(short_number(1e20), "1e+20");
}

TEST(ShortTime, ChoosesItsUnit) {
  EXPECT_EQ(short_time(1.25), "1.25 s");
  EXPECT_EQ(short_time(0.062), "62 ms");
  EXPECT_EQ(short_time(3.1e-6), "3.1 µs");
}

TEST(ColourClass, BeginsAnewAfterTwelve) {
  EXPECT_EQ(colour_class(11), "c11");
  EXPECT_EQ(colour_class(12), "c0");
}

TEST(LineChart, OfNothingIsNothing) {
  EXPECT_EQ(line_chart({.title = "t"}, {}), "");
  EXPECT_EQ(line_chart({.title = "t"}, {{.steps = {1, 2}, .values = {kNan, kNan}}}), "");
}

TEST(LineChart, ShowsTheLastFiniteValueWithItsUnit) {
  const auto html = line_chart({.title = "Memory", .unit = "GiB"},
                               {{.steps = {1, 2, 3}, .values = {1, 7.5, kNan}}});
  EXPECT_NE(html.find("<b>Memory</b>"), html.npos);
  EXPECT_NE(html.find("7.5 GiB"), html.npos);
  EXPECT_EQ(count(html, "nan"), 1U);  // said under the pointer, not drawn
}

TEST(LineChart, LeavesAGapWhereNoValueIsFinite) {
  const auto of = [](double middle) {
    return line_chart({.title = "t"}, {{.steps = {1, 2, 3, 4, 5}, .values = {1, 2, middle, 4, 5}}});
  };
  EXPECT_GT(count(of(kNan), "class=\"curve"), count(of(3), "class=\"curve"));
}

TEST(LineChart, EscapesTitlesAndNames) {
  const auto html =
      line_chart({.title = "a<b"}, {{.name = "x&y", .steps = {1, 2}, .values = {1, 2}},
                                    {.name = "z", .steps = {1, 2}, .values = {1, 2}}});
  EXPECT_NE(html.find("a&lt;b"), html.npos);
  EXPECT_NE(html.find("x&amp;y"), html.npos);
  EXPECT_EQ(html.find("a<b"), html.npos);
}

TEST(ChartFile, IsAPictureThatFerryKnowsAsItsOwn) {
  const auto svg = chart_file({.title = "t"}, {{.steps = {1, 2}, .values = {1, 2}}});
  EXPECT_TRUE(svg.starts_with("<svg"));
  EXPECT_NE(svg.substr(0, 4096).find(kPictureMark), svg.npos);
  EXPECT_EQ(chart_file({.title = "t"}, {}), "");
}

TEST(HtmlPage, BearsItsMarkInItsFirstBytes) {
  EXPECT_NE(html_page("t", "b").substr(0, 4096).find(kPageMark), std::string::npos);
}

TEST(EscapeXml, LeavesNoMarkup) {
  EXPECT_EQ(escape_xml("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
}

}  // namespace chart_test
}  // namespace ferry::cli
